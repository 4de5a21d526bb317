"""The comparison of planners, on a tiny model: arms take turns on the same arrivals, and each has its targets."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def planner() -> Any:
    spec = importlib.util.spec_from_file_location("planner", ROOT / "benchmarks" / "planner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arms_take_turns_on_the_same_arrivals(planner: Any, tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    given = ["--tiny", "--arms", "gap=30", "ttft=100,tpot=4", "--rates", "16", "--seconds", "1", "--json", str(out)]
    report = planner.main(given)
    assert json.loads(out.read_text()) == report
    assert [cell["arm"] for cell in report["cells"]] == ["gap=30", "ttft=100,tpot=4"]
    first, second = (cell["figures"] for cell in report["cells"])
    assert first["requests"] == second["requests"] > 10 and not first["unfinished"] + second["unfinished"]
    assert set(report["cells"][1]["over"]["gap=30"]) == set(planner.RATIOS)


def test_what_an_arm_is_told(planner: Any) -> None:
    assert planner.told("gap=45,ttft=200") == {"targets": {"slo_gap": 45.0, "slo_ttft": 200.0}}
    assert planner.told("other:30") == {"budget": 30.0}
    with pytest.raises(SystemExit):
        planner.main(["--arms", "other:30"])
