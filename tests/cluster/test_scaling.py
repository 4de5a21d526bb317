"""How many replicas there should be."""

from __future__ import annotations

import pytest

from verifypd.cluster.scaling import ReplicaLoad, wanted

GOAL = 0.9


def load(running: float = 0, waiting: float = 0, good: float = 1.0) -> ReplicaLoad:
    return ReplicaLoad(running, waiting, 10, good)


@pytest.mark.parametrize(
    ("loads", "count"),
    [
        ([], 1),
        ([load()], 1),
        ([load(8)], 1),  # as full as it should be
        ([load(9)], 2),
        ([load(10, 22)], 4),
        ([load(4), load(4)], 1),
        ([load(5), load(4)], 2),
        ([load(6, good=0.5)], 2),  # nobody waits, but answers are late
        ([load(4, good=0.5)], 1),  # late, but not for want of replicas
        ([load(6, good=0.95), load(6, good=0.95)], 2),
    ],
)
def test_enough_that_nobody_waits_and_answers_are_in_time(loads: list[ReplicaLoad], count: int) -> None:
    assert wanted(loads, GOAL) == count
