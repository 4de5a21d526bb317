"""Whether passes take longer in traffic: on a tiny model all points are timed thrice, and planted times are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import StepTiming


@pytest.fixture(scope="module")
def drift() -> Any:
    return load("pass_drift")


@pytest.mark.slow
def test_points_are_timed_before_and_behind_the_traffic(drift: Any, tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    report = drift.main(["--tiny", "--seconds", "1", "--json", str(out)])
    assert json.loads(out.read_text()) == report
    assert list(report["ms"]) == ["rested", "behind", "rested again"]
    assert list(report["bias"]) == ["at start", *report["ms"]]
    assert all(len(each) == len(report["points"]) and all(ms > 0.0 for ms in each) for each in report["ms"].values())
    steps = [sum(own["steps"] for own in each.values()) for each in report["bias"].values()]
    assert steps[0] > 10 and len(set(steps)) == 1
    assert len(report["steps"]["steps"]) >= steps[0]
    assert {point["chunk"] for point in report["points"]} > {0}


def pass_of(requests: int, chunk: int, model: CostModel, context: int = 500) -> StepTiming:
    """A pass at a model's price."""
    step = StepTiming(
        verify_requests=requests,
        verify_rows=requests + chunk,
        verify_context=context * requests + chunk,
        chunk_rows=chunk,
        chunk_context=chunk * chunk,
    )
    return replace(step, verify_seconds=model.step_seconds(step))


def test_a_slower_device_is_told_from_other_passes(drift: Any) -> None:
    rested = CostModel(Coefficients())
    behind = CostModel(Coefficients(base=5e-3, steep=30e-6, context=0.16e-6, chunk_context=0.9e-9))
    chunks = [(0, rows) for rows in (64, 256, 512, 1024, 2048)]
    points = [*chunks, *((count, 0) for count in (1, 16, 64, 240)), (8, 512)]
    contexts = (100, 1000)
    traffic = [pass_of(count, chunk, behind) for count in (1, 8, 40) for chunk in (0, 100, 700, 1500)]
    low = drift.bias([pass_of(*point, rested, at) for point in points for at in contexts], traffic, padded=False)
    right = drift.bias([pass_of(*point, behind, at) for point in points for at in contexts], traffic, padded=False)
    assert list(low) == list(right) == ["0 to 0", "65 to 200", "513 to 1024", "1025 and more"]
    assert low["1025 and more"]["mean"] == pytest.approx(21.0 / 30.0 - 1.0, abs=0.08)
    assert all(abs(own["mean"]) < 0.1 and own["steps"] == 3 for own in right.values()), "the turn lies at some point"
    assert abs(right["1025 and more"]["mean"]) < 0.03
