"""`verifypd costs` over a tiny model: text, JSON, picture, cache, errors."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import tiny
from verifypd import cli
from verifypd.control.cost import Coefficients, CostModel
from verifypd.engine import costs, measure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def options(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path / "cache"))
    small = ["--dtype", "float32", "--max-model-len", "200", "--kv-memory", "16MB", "--batch-size", "4"]
    return ["--model", str(folder), "--prefill-chunk", "16", *small]


def test_the_table_says_what_was_measured(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["costs", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in (
        "coefficient",
        "knee",
        "verifier passes",
        "draft loops",
        "least acceptance",
        "L=8",
        "ngram",
        "float32",
    ):
        assert word in out
    header, *lines = out[out.index("verifier passes") :].splitlines()[1:10]
    assert {len(line) for line in lines} == {len(header)}, "aligned"


def test_json_holds_the_same_and_the_cache_answers_the_second_time(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["costs", "--json", *options]) == 0
    first = json.loads(capsys.readouterr().out)
    without = {"knee", "draft_row"}  # one is no time and stands apart; n-grams never lag
    assert set(first["coefficients"]) == set(Coefficients.__dataclass_fields__) - without and "knee" in first
    assert set(first["break_even"]) == {"1", "4"} and len(first["break_even"]["1"]) == 8
    for entry in (*first["passes"], *first["drafts"]):
        assert entry["error"] == pytest.approx(entry["predicted"] / entry["measured"] - 1)
    counted: list[int] = []

    def count(*args: Any, **more: Any) -> measure.Measured:
        counted.append(1)
        return measure.measure(*args, **more)

    monkeypatch.setattr(costs, "measure", count)
    assert cli.main(["costs", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out) == first and not counted
    assert cli.main(["costs", "--json", "--refresh", *options]) == 0
    assert json.loads(capsys.readouterr().out)["passes"] != first["passes"] and counted


def test_without_a_drafter_there_is_no_break_even(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["costs", *options, "--draft", "none"]) == 0
    out = capsys.readouterr().out
    assert "drafts: none" in out and "draft loops" not in out and "least acceptance" not in out
    assert "draft_step" not in out, "a coefficient that nothing measured is not shown"


@pytest.mark.slow
def test_the_picture_is_drawn(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.png"
    assert cli.main(["costs", "--plot", str(path), *options]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert str(path) in capsys.readouterr().err


def test_bad_plots_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in (("costs.txt", ".png"), ("none/costs.png", "no folder")):
        assert cli.main(["costs", "--model", "no-such-model", "--plot", str(tmp_path / name)]) == 2
        assert word in capsys.readouterr().err
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(["costs", "--model", "no-such-model", "--plot", str(tmp_path / "costs.png")]) == 2
    assert "verifypd[bench]" in capsys.readouterr().err


def test_an_engine_too_small_for_any_pass_says_so(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["costs", *options, "--max-model-len", "8"]) == 2
    assert "--max-model-len" in capsys.readouterr().err
    assert not (tmp_path / "cache" / "costs").exists(), "nothing is kept of nothing"


def test_a_pass_without_a_knee_is_shown(options: list[str]) -> None:
    from verifypd.cli.costs import show, summary

    cost = CostModel(Coefficients(steep=0.0))
    setup = {
        "model": {"family": "llama", "parameters": 1, "dtype": "float32", "kernels": "torch"},
        "drafter": None,
        "device": "x",
        "threads": 0,
        "torch": "2",
        "batch_size": 4,
        "max_draft": 0,
        "max_model_len": 10,
    }
    report = summary(cost, measure.Measured((), 0.0, 0.0), setup, None)
    assert "every row costs the same" in "\n".join(show(report))
    assert json.loads(json.dumps(report, allow_nan=False))["knee"] is None
