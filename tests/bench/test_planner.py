"""The comparison of planners, on a tiny model: arms take turns on the same arrivals, and each has its targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load


@pytest.fixture(scope="module")
def planner() -> Any:
    return load("planner")


def test_arms_take_turns_on_the_same_arrivals(planner: Any, tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    arms = ["gap=30", "ttft=100,tpot=4", "plain,gap=45@16"]
    given = ["--tiny", "--arms", *arms, "--rates", "16,24", "--seeds", "1", "--seconds", "1", "--json", str(out)]
    report = planner.main(given)
    assert json.loads(out.read_text()) == report
    ran = [(cell["rate"], cell["arm"]) for cell in report["cells"]]
    assert ran == [(16, "gap=30"), (16, "ttft=100,tpot=4"), (16, "plain,gap=45"), (24, "gap=30"), (24, arms[1])]
    first, second = (cell["figures"] for cell in report["cells"][:2])
    assert first["requests"] == second["requests"] > 5 and not first["unfinished"] + second["unfinished"]
    assert set(report["cells"][1]["over"]["gap=30"]) == set(planner.RATIOS)
    for cell in report["cells"]:
        gap = cell["longest_gap"]
        assert gap["ms"] == pytest.approx(cell["figures"]["gap_ms_max"], abs=0.01)
        planned = [step for step in gap["longest_steps"] if "rows" in step]
        assert planned and all(step["rows"] > 0 and step["host_ms"] > 0 for step in planned)
        assert set(cell["pauses"]) >= {"compiled", "captured", "collected_ms"}
    assert report["costs"], "what the engine measured, for whoever simulates the same arrivals"


def test_what_an_arm_is_told(planner: Any) -> None:
    def told(text: str) -> Any:
        return planner.Arm.parse(text).told()

    assert told("gap=45,ttft=200") == {"targets": {"slo_gap": 45.0, "slo_ttft": 200.0}, "arch": "auto"}
    assert told("plain,gap=45@8,16") == {"targets": {"slo_gap": 45.0}, "arch": "plain"}
    assert told("plain") == {"targets": {}, "arch": "plain"} and told("other:30") == {"budget": 30.0}
    only = planner.Arm.parse("plain@8,16")
    assert only.runs(8) and not only.runs(20) and planner.Arm.parse("plain").runs(20)
    with pytest.raises(SystemExit):
        planner.main(["--arms", "other:30"])
