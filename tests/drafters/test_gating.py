"""Gated drafts: tokens are kept while the chance of the whole draft is above the floor, and drafted while that pays."""

from __future__ import annotations

import pytest

from verifypd.batch import DraftSpan, Gate
from verifypd.drafters.gating import Gating


def span(slot: int, drafts: int, gate: Gate | None) -> DraftSpan:
    return DraftSpan(slot, lag=1, rows=1, drafts=drafts, context=20, gate=gate)


def run(drafts: int, gate: Gate | None, peaks: list[float]) -> tuple[int, int]:
    """(tokens kept, tokens drafted) of one span whose tokens would have these peaks."""
    one = span(0, drafts, gate)
    gating = Gating([one])
    for peak in peaks:
        if not gating.look([one], [peak]):
            break
    found = gating.drafted()
    assert found.steps == len(found.peaks[0])
    return found.kept[0], found.steps


SURE = [0.9, 0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("gate", "peaks", "kept", "drafted"),
    [
        (None, SURE, 4, 4),
        (Gate(0.0, 0.0), [0.01] * 4, 4, 4),
        (Gate(0.5, 0.5), SURE, 4, 4),
        (Gate(0.75, 0.75), SURE, 2, 3),  # 0.9, 0.81, 0.73: the third is drafted and withheld
        (Gate(0.75, 0.85), SURE, 2, 2),  # and here it is not even drafted
        (Gate(0.95, 0.95), SURE, 0, 1),
        (Gate(0.95, 0.95, free=2), SURE, 2, 2),  # two rows cost nothing
        (Gate(0.95, 0.95, free=2, worth=0.92), SURE, 1, 1),  # but a step would
        (Gate(0.5, 0.5), [0.9, 0.4, 0.9, 0.9], 1, 2),
        (Gate(0.75, 0.75, shift=2.0), SURE, 4, 4),  # surer than it thinks
        (Gate(0.75, 0.75, slope=0.0), SURE, 0, 1),  # what it thinks means nothing
    ],
)
def test_what_is_kept_and_drafted(gate: Gate | None, peaks: list[float], kept: int, drafted: int) -> None:
    assert run(4, gate, peaks) == (kept, drafted)


def test_a_draft_is_never_longer_than_asked_for() -> None:
    assert run(2, Gate(0.0, 0.0), SURE) == (2, 2)


def test_each_has_a_gate_of_its_own() -> None:
    spans = [span(3, 2, Gate(0.95, 0.95)), span(1, 2, Gate(0.5, 0.5)), span(2, 1, None)]
    gating = Gating(spans)
    assert gating.look(spans, [0.9, 0.9, 0.1]) == [1]
    assert gating.look([spans[1]], [0.8]) == []
    found = gating.drafted()
    assert found.kept == {3: 0, 1: 2, 2: 1} and found.steps == 2
    assert found.peaks == {3: (0.9,), 1: (0.9, 0.8), 2: (0.1,)}
