"""The tables of costs are what was measured: those of the results, to three digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verifypd.simulate.tables import H200

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def steps(name: str) -> dict[str, Any]:
    """Draft and verify ms by requests × tokens of each."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text())["details"]["steps"])


def test_passes_are_those_that_were_measured_with_a_head() -> None:
    measured = steps("h200-head-steps")
    assert {f"{count}x{each}" for count in H200.requests for each in H200.tokens} == set(measured)
    for count, line in zip(H200.requests, H200.passes, strict=True):
        for each, ms in zip(H200.tokens, line, strict=True):
            assert ms == pytest.approx(measured[f"{count}x{each}"]["verify_ms"], rel=0.005)


def test_draft_steps_are_a_quarter_of_a_loop_of_four() -> None:
    measured = steps("h200-draft-steps")
    for count, ms in zip(H200.requests, H200.draft_steps, strict=True):
        assert ms == pytest.approx(measured[f"{count}x5"]["draft_ms"] / 4, rel=0.005)
