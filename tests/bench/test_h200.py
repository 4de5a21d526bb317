"""The GPU benchmark, on a tiny model: every part runs and fills its keys. Its metrics; the workload files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import FOLDER, load
from verifypd.bench.drive import Sent
from verifypd.bench.workload import prompts, read
from verifypd.errors import ConfigError
from verifypd.request import Request, SamplingParams


@pytest.fixture(scope="module")
def h200() -> Any:
    return load("h200")


def test_every_part_fills_its_figures(h200: Any, tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    parts = "exact,steps,closed,mixed,record,lone,burst,auto,invariant,placements"
    h200.main(
        ["--tiny", "--parts", parts, "--levels", "1,8", "--rates", "16", "--json", str(out), "--set", "device=cpu"]
    )
    report = json.loads(out.read_text())
    expected = {"plain_step_ms_1", "draft_step_ms_1", "token_ms_128", *(f"cycle_ms_{n}" for n in (1, 8, 32, 128))}
    expected |= {f"{arm}{name}_{n}" for arm in ("", "plain_") for name in ("tpot_ms_p50", "tok_s") for n in (1, 8)}
    expected |= {f"mixed_16_{name}" for name in ("tpot_ms_p95", "ttft_ms_p95", "gap_ms_p99", "gap_ms_max")}
    expected |= {"max_rate", "burst_gap_ratio", "burst_ttft_ms_p95", "lone_ttft_ms_40", "lone_ttft_ms_60"}
    expected |= {f"auto_over_plain_{alpha}_1" for alpha in (0.3, 0.5, 0.8)}
    assert set(report["figures"]) == expected
    assert all(value >= 0 for value in report["figures"].values())
    assert all(result["passed"] for result in report["details"]["exact"].values())
    assert all(
        report["details"][f"prompts {where}"]["ttft_ms_p95"] > 0 for where in ("fused", "stream", "partition:48")
    )
    assert all(report["details"][f"drafts {where}, graphs off"]["tok_s"] > 0 for where in ("stream", "partition:32"))
    assert set(report["details"]["invariant"]) == {"1x1", "1x5", "4x1", "4x5"}
    assert report["details"]["closed_auto_8"]["unfinished"] == 0
    assert report["details"]["closed_plain_8"]["requests"] == 24
    record = json.loads((tmp_path / "record-16-seed1.json").read_text())
    assert record["figures"]["gap_ms_p95"] > 0 and {"verify_rows", "verify_us"} < set(record["columns"])
    assert len(record["steps"]) > 8 and all(len(step) == len(record["columns"]) for step in record["steps"])
    assert report["tiny"] and report["settings"] == {"device": "cpu"} and report["commit"]


def test_a_head_is_passed_on_by_name(h200: Any, tmp_path: Path) -> None:
    for head in ("eagle", "eagle3"):
        bench = h200.Bench(h200.arguments(["--tiny", "--pair", f"llama-2-7b,{head}"]), tmp_path / head)
        assert bench.options()["draft"] == head and Path(bench.model).name == "llama-2-7b"
    rates = h200.arguments(["--tiny"]).rates
    assert rates == "4,8,16,20,24,28,32"
    assert all((FOLDER / "workloads" / f"mixed-{rate}.json").is_file() for rate in rates.split(","))


def test_what_it_refuses(h200: Any) -> None:
    with pytest.raises(SystemExit):
        h200.main(["--tiny", "--parts", "nothing"])
    with pytest.raises(ConfigError, match="no built-in model"):
        h200.main(["--tiny", "--parts", "steps", "--pair", "nothing,tinyllama-1.1b"])


def test_times_of_a_request() -> None:
    request = Request("a", [1, 2], SamplingParams(max_tokens=9), seed=0, max_length=20, arrival=10.0)
    sent = Sent(request, outputs=[10.5, 11.0, 13.5])
    request.tokens += [3] * 7  # 1 + 3 + 3 tokens in three outputs
    assert sent.ttft == 0.5
    assert sent.tpot == pytest.approx(0.5)
    assert sent.gaps == [0.5, 2.5]


def test_workloads() -> None:
    files = sorted((FOLDER / "workloads").glob("*.json"))
    assert len(files) == 22
    for path in files:
        workload = read(path)
        assert workload.name == path.stem and workload.arrivals
        assert [a.at for a in workload.arrivals] == sorted(a.at for a in workload.arrivals)
        few = workload.scaled(60, 8).arrivals
        assert len(few) == 8 and all(a.prompt_tokens >= 1 and a.output_tokens >= 2 for a in few)
    made = prompts([5, 7, 7], 100, seed=1)
    assert [len(ids) for ids in made] == [5, 7, 7] and made[1] != made[2]
    assert made == prompts([5, 7, 7], 100, seed=1)


def test_a_file_that_is_no_workload(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": "x", "rate": 1, "requests": [{"at": 0}]}')
    with pytest.raises(ConfigError, match="is no workload"):
        read(tmp_path / "x.json")
