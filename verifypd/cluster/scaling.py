"""How many replicas there should be, from queue depth and goodput. Pure: numbers in, a number out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.8  # share of its slots at which a replica is as full as it should be
IDLE = 0.5  # share of all slots taken below which missed targets are not for want of replicas


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica reports, averaged over a while."""

    running: float  # requests that hold a slot
    waiting: float  # requests without one
    slots: float
    good: float  # share of the requests that ended lately within both targets; 1 where none did


def wanted(loads: Sequence[ReplicaLoad], goal: float) -> int:
    """Enough that nobody waits and `goal` of the requests meet their targets; at least one."""
    if not loads:
        return 1
    asked = sum(load.running + load.waiting for load in loads)
    slots = sum(load.slots for load in loads) / len(loads)
    count = math.ceil(asked / max(1.0, FULL * slots) - 1e-9)
    good = sum(load.good for load in loads) / len(loads)
    if good < goal and asked > IDLE * slots * len(loads):
        count = max(count, len(loads) + 1)
    return max(1, count)
