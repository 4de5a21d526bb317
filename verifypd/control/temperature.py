"""Finds the drafter temperature that gets most drafts accepted. Sees counts by temperature, never a token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from verifypd.control.acceptance import Kind, kind_of
from verifypd.control.observe import Observation

TAU_LOW, TAU_HIGH, TAU_STEP = 0.6, 1.6, 0.1


class TemperatureSearch:
    """Finds the drafter temperature with the most accepted tokens, by kind of request: a hill climb on a grid.

    One draft in four is drawn a step to the side of the best so far, turn by turn within each request, so that both see
    the same text. The better one stays when the difference is beyond chance; where it is not, the other side gets its
    turn, and rounds grow longer. It never leaves 0.6..1.6, and never asks about drawn tokens: only counts.
    """

    SHARE = 4

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Climb] = {}

    def choose(self, kind: Kind, request_id: int, turn: int) -> float:
        """τ for the next draft of a request; `turn` moves on with its confirmed tokens."""
        climb = self._kinds.setdefault(kind, _Climb())
        # Knuth's multiplicative hash: which turns try the challenger must not follow any rhythm of the text
        pick = ((request_id * 40503 + turn) * 2654435761) & 0xFFFFFFFF
        return climb.challenger if pick >> 16 & 0xFF < 256 // self.SHARE else climb.best

    def observe(self, seen: Observation) -> None:
        """Count a draft's trials for the temperature it was drawn with."""
        climb = self._kinds.get(kind_of(False, seen.coupled, seen.temperature, None))
        if climb is not None and seen.tau is not None:
            climb.add(seen.tau, seen.accepted, min(seen.accepted + 1, seen.drafted))


@dataclass(slots=True)
class _Climb:
    """One kind's hill climb."""

    ROUND: ClassVar = 200  # trials of the challenger before a verdict

    best: float = 1.0
    direction: int = -1
    patience: int = 1  # rounds without a verdict make the next longer
    counts: dict[float, list[int]] = field(default_factory=dict)  # τ → accepted, trials; of this round

    @property
    def challenger(self) -> float:
        """The neighbour being tried."""
        return round(min(TAU_HIGH, max(TAU_LOW, self.best + self.direction * TAU_STEP)), 1)

    def add(self, tau: float, accepted: int, trials: int) -> None:
        """Count, and judge when there is enough."""
        if tau not in (self.best, self.challenger):  # drawn before the last move
            return
        count = self.counts.setdefault(tau, [0, 0])
        count[0], count[1] = count[0] + accepted, count[1] + trials
        (a, n), (b, m) = (self.counts.get(each, (0, 0)) for each in (self.best, self.challenger))
        if m < self.ROUND or n < self.ROUND or m % 20:
            return
        pooled = (a + b) / (n + m)
        spread = math.sqrt(max(1e-12, pooled * (1.0 - pooled) * (1.0 / n + 1.0 / m)))
        z = (b / m - a / n) / spread
        if z > 2.5:
            self.best, self.patience, self.counts = self.challenger, 1, {}
        elif z < -1.0 or m >= 4 * self.ROUND * self.patience:
            self.direction, self.patience, self.counts = -self.direction, min(8, self.patience + 1), {}
        if self.challenger == self.best:  # at the end of the range
            self.direction = -self.direction
