"""Whether predicted chances come true as often as they say. Knows numbers only, not what they are chances of."""

from __future__ import annotations

from dataclasses import dataclass, field

BINS = 10


@dataclass(slots=True)
class Reliability:
    """Predicted chances against what came, in bins. `error` is the calibration error."""

    bins: list[tuple[float, float, float]] = field(default_factory=lambda: [(0.0, 0.0, 0.0)] * BINS)  # sums

    def add(self, chance: float, stood: bool) -> None:
        """One trial."""
        b = min(BINS - 1, int(chance * BINS))
        predicted, came, trials = self.bins[b]
        self.bins[b] = predicted + chance, came + stood, trials + 1.0

    @property
    def error(self) -> float:
        """Mean distance between predicted and observed frequency, weighted by trials; 0 without any."""
        return sum(abs(p - c) for p, c, _ in self.bins) / max(1.0, sum(n for *_, n in self.bins))

    def rows(self) -> list[tuple[float, float, float]]:
        """(predicted, came, trials) of each bin that was met."""
        return [(p / n, c / n, n) for p, c, n in self.bins if n]
