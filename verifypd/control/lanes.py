"""The three lanes as queues: depth, waits, priority, token budgets, ageing. Numbers in, numbers out; no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verifypd.config import LANES
from verifypd.control.snapshot import Snapshot

PRIORITY = ("decode", "verify", "prefill")  # high, medium, low


@dataclass(frozen=True, slots=True)
class LaneView:
    """What waits in one lane."""

    depth: int = 0  # requests
    tokens: int = 0  # verifier rows they would take
    oldest: float = 0.0  # s the first of them has waited
    patience: float = math.inf  # s after which it counts as overdue

    @property
    def overdue(self) -> bool:
        """Whether ageing puts it before lanes of higher priority."""
        return self.depth > 0 and self.oldest >= self.patience


def lane_views(snapshot: Snapshot) -> dict[str, LaneView]:
    """The lanes, by name. A prompt may wait half its target for the first token before it is overdue."""
    patience = {"prefill": snapshot.slo_ttft / 2 / 1e3, "verify": snapshot.verify_wait_ms / 1e3}
    views = {}
    for name in LANES:
        members = [view for view in snapshot.requests if view.lane == name]
        views[name] = LaneView(
            depth=len(members),
            tokens=sum(view.prefill_left or view.pending + 1 for view in members),
            oldest=max((view.waited for view in members), default=0.0),
            patience=patience.get(name, math.inf),
        )
    return views


def in_turn(lanes: Mapping[str, LaneView]) -> list[str]:
    """Lanes with work, in order of service: overdue ones first, the longest wait leading, then strict priority."""
    busy = [name for name in PRIORITY if name in lanes and lanes[name].depth]
    late = sorted((name for name in busy if lanes[name].overdue), key=lambda name: -lanes[name].oldest)
    return late + [name for name in busy if name not in late]


def allot(lanes: Mapping[str, LaneView], tokens: int, weights: Iterable[tuple[str, float]] = ()) -> dict[str, int]:
    """Share a step's tokens: each lane is sure of a floor, the rest goes by order of service to those who want it.

    The floor is the lane's share of weight × depth, so that a longer queue gets more; a weight that is not given is 1.
    The floors come first, so no lane starves: whoever wants a token gets one in every step.
    """
    turn = in_turn(lanes)
    given = dict(weights)
    pressure = {name: given.get(name, 1.0) * lanes[name].depth for name in turn}
    total, shares = sum(pressure.values()), {}
    for name in turn:
        floor = min(tokens * pressure[name] / total, tokens / len(turn))
        shares[name] = min(lanes[name].tokens, max(int(floor), 1))
    left = tokens - sum(shares.values())
    for name in turn:
        more = max(0, min(lanes[name].tokens - shares[name], left))
        shares[name] += more
        left -= more
    return shares
