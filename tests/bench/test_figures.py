"""Figures from the times of requests: by hand, pooled, and sent as plain data."""

from __future__ import annotations

import json

import pytest

from verifypd.bench.figures import Outcome, Record, figures


def record(due: float, outputs: list[float], tokens: int, finished: bool = True, first: int = 1) -> Record:
    return Record(due, due, tuple(outputs), tokens, first, finished)


def steady(step: float) -> Outcome:
    """Ten requests that all arrive at 0 and get nine tokens, one every `step` s, a little later each."""
    records = [record(0.0, [step * (1 + i / 50) * (n + 1) for n in range(9)], 9) for i in range(10)]
    return Outcome(tuple(records), 10, max(r.outputs[-1] for r in records))


def test_figures_by_hand() -> None:
    good = record(1.0, [1.2, 1.21, 1.24], 6)  # TTFT 200, TPOT 40 / 5 = 8, gaps 10 and 30
    slow = record(2.0, [2.1, 2.2], 5)  # TTFT 100, TPOT 100 / 4 = 25, gap 100
    stopped = record(3.0, [], 0, finished=False, first=0)  # waited 2 s
    found = figures([Outcome((good, slow, stopped), 4, 5.0)])
    assert found["ttft_ms_p50"] == pytest.approx(200) and found["ttft_ms_p95"] == pytest.approx(2000)
    assert found["tpot_ms_p50"] == pytest.approx(8) and found["tpot_ms_p99"] == pytest.approx(25)
    assert found["gap_ms_p50"] == pytest.approx(30) and found["gap_ms_max"] == pytest.approx(100)
    assert found["gaps_late"] == pytest.approx(2 / 3)  # longer than 15 ms
    assert found["e2e_ms_p50"] == pytest.approx(240) and found["e2e_ms_p95"] == pytest.approx(2000)
    assert found["tok_s"] == pytest.approx(11 / 5) and found["goodput"] == pytest.approx(1 / 5)
    assert found["good_share"] == pytest.approx(1 / 4)
    assert found["tokens_per_output"] == pytest.approx(9 / 3)  # first outputs apart
    assert found["requests"] == 4 and found["unfinished"] == 2


def test_a_late_sender_counts_from_when_a_request_was_due() -> None:
    found = figures([Outcome((Record(1.0, 1.5, (1.6, 1.7), 2, 1, True),), 1, 1.7)])
    assert found["ttft_ms_p50"] == pytest.approx(600) and found["sent_late_ms_p95"] == pytest.approx(500)


def test_runs_are_pooled() -> None:
    fast, slow = steady(0.01), steady(0.03)
    found = figures([fast, slow])
    assert found["requests"] == 20
    assert found["tok_s"] == pytest.approx(180 / (fast.seconds + slow.seconds))
    assert (
        figures([fast])["tpot_ms_p95"] < found["tpot_ms_p95"] == pytest.approx(figures([slow])["tpot_ms_p95"], rel=0.03)
    )
    assert found["tpot_ms_p50"] == pytest.approx(figures([fast])["tpot_ms_p99"])


def test_times_travel_whole() -> None:
    outcome = Outcome((record(0.5, [0.7, 0.75, 1.0], 7, first=2), record(1.0, [], 0, False, 0)), 3, 1.25)
    assert Outcome.unpacked(json.loads(json.dumps(outcome.packed()))) == outcome
