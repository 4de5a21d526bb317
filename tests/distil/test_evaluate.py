"""Evaluation of a draft: counts, overlaps and times of a tiny pair, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.heads import head_for
from tests.models.checkpoints import tiny
from verifypd.cli import main


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("pair") / "verifier", max_position_embeddings=1024)


def evaluate(verifier: Path, draft: str, out: Path) -> dict:
    prompts = out / "prompts.jsonl"
    lines = [{"kind": "code" if i % 2 else "story", "text": f"w{i} w{i + 1} w5 w6"} for i in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = {"prompts": prompts, "tokens": 16, "timed": 2, "max-draft": 3, "dtype": "float32", "device": "cpu"}
    flags |= {"json": out / "report.json", "plot": out / "report.png"}
    command = ["evaluate-draft", "--model", str(verifier), "--draft", draft]
    assert main([*command, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]) == 0
    return json.loads((out / "report.json").read_text())


def test_a_model_that_drafts_for_itself_is_always_right(
    verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate(verifier, str(verifier), tmp_path)
    for temperature in ("0", "0.8", "0.3"):
        assert set(report["acceptance"][temperature]) == {"all", "code", "story"}
        assert min(report["acceptance"][temperature]["all"]["alpha"]) > 0.98
    for overlaps in report["overlap_by_tau"].values():
        assert overlaps["1"] == pytest.approx(1.0, abs=1e-3)
        assert max(overlaps.values()) == overlaps["1"]
    assert report["speed"]["same_text"] == 2
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert "calibration error" in capsys.readouterr().out


def test_a_head_is_evaluated(verifier: Path, tmp_path: Path) -> None:
    report = evaluate(verifier, str(head_for(verifier, tmp_path / "head")), tmp_path)
    alpha = report["acceptance"]["0.8"]["all"]["alpha"][0]
    assert 0.0 < alpha < 1.0
    assert report["speed"]["same_text"] == 2 and report["speed"]["cost_ratio"] > 0
