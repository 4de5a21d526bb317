"""The figures of a simulated run: percentiles in ms, of what each request saw."""

from __future__ import annotations

import pytest

from verifypd.simulate.report import Outcome, Report, percentile


def test_percentiles() -> None:
    assert percentile([], 95) == 0.0
    assert percentile([4.0, 1.0, 3.0, 2.0, 5.0], 50) == 3.0
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)


def test_the_figures_are_those_of_the_outputs() -> None:
    """Two requests by hand: TTFT 100 and 300 ms; TPOT 10 and 20; gaps of 10, 30, 20 and 60 ms between outputs."""
    outcomes = []
    for arrival, times in ((1.0, ((1.1, 1), (1.11, 1), (1.14, 3))), (2.0, ((2.3, 1), (2.32, 2), (2.38, 2)))):
        outcome = Outcome(len(outcomes), arrival, 0, 15.0)
        for now, tokens in times:
            outcome.output(now, tokens)
        outcome.finished = True
        outcomes.append(outcome)
    figures = Report(tuple(outcomes), 1.0, 2.38, 6, 0, 0, 500.0).summary()
    expected = {
        "ttft_p50": 200.0,
        "ttft_p95": 290.0,
        "ttft_p99": 298.0,
        "tpot_p50": 15.0,
        "tpot_p95": 19.5,
        "tpot_p99": 19.9,
        "gap_p50": 25.0,
        "gap_p95": 55.5,
        "gap_p99": 59.1,
        "gap_max": 60.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
