"""Finds the drafter temperature that gets most drafts accepted. Sees counts by temperature, never a token."""

from __future__ import annotations

import math

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
    ROUND = 200  # trials of the challenger before a verdict

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Climb] = {}

    def choose(self, kind: Kind, order: int, turn: int) -> float:
        """τ for the next draft of a request; `turn` moves on with its confirmed tokens."""
        climb = self._kinds.setdefault(kind, _Climb())
        # Knuth's multiplicative hash: which turns try the challenger must not follow any rhythm of the text
        pick = ((order * 40503 + turn) * 2654435761) & 0xFFFFFFFF
        return climb.challenger if pick >> 16 & 0xFF < 256 // self.SHARE else climb.best

    def observe(self, seen: Observation) -> None:
        """Count a draft's trials for the temperature it was drawn with."""
        climb = self._kinds.get(kind_of(False, seen.coupled, seen.temperature, None))
        if climb is not None and seen.tau is not None:
            climb.add(seen.tau, seen.accepted, min(seen.accepted + 1, seen.drafted), self.ROUND)

    def best(self, kind: Kind) -> float:
        """The best so far for a kind of request."""
        climb = self._kinds.get((kind[0], kind[1], None))
        return climb.best if climb else 1.0


class _Climb:
    """One kind's hill climb."""

    def __init__(self) -> None:
        self.best = 1.0
        self.direction = -1
        self.patience = 1  # rounds without a verdict make the next longer
        self._reset()

    @property
    def challenger(self) -> float:
        """The neighbour being tried."""
        return round(min(TAU_HIGH, max(TAU_LOW, self.best + self.direction * TAU_STEP)), 1)

    def _reset(self) -> None:
        self.counts = {"best": [0, 0], "challenger": [0, 0]}  # accepted, trials

    def add(self, tau: float, accepted: int, trials: int, length: int) -> None:
        """Count, and judge when there is enough."""
        who = "best" if abs(tau - self.best) < 0.01 else "challenger" if abs(tau - self.challenger) < 0.01 else None
        if who is None:  # drawn before the last move
            return
        self.counts[who][0] += accepted
        self.counts[who][1] += trials
        (a, n), (b, m) = self.counts["best"], self.counts["challenger"]
        if m < length or n < length or m % 20:
            return
        pooled = (a + b) / (n + m)
        spread = math.sqrt(max(1e-12, pooled * (1.0 - pooled) * (1.0 / n + 1.0 / m)))
        z = (b / m - a / n) / spread
        if z > 2.5:
            self.best, self.patience = self.challenger, 1
            self._reset()
        elif z < -1.0 or m >= length * 4 * self.patience:
            self.direction = -self.direction
            self.patience = min(8, self.patience + 1)
            self._reset()
        if self.challenger == self.best:  # at the end of the range
            self.direction = -self.direction
