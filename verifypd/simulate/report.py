"""What came of a simulated run: per request, and as the figures people compare. Knows times and counts only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """What one request saw. Times in seconds since the start of the run."""

    request_id: int
    arrival: float
    priority: int
    slo_tpot: float  # ms
    slo_ttft: float | None = None  # ms; None: the server's
    stopped: float | None = None  # at its deadline
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    finished: bool = False
    longest_gap: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def output(self, now: float, tokens: int) -> None:
        """Tokens reached the client."""
        if self.first is None or self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
            self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now
        self.tokens += tokens

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.finished or self.stopped is not None

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for a single token."""
        if self.first is None or self.last is None or self.tokens < 2:
            return 0.0
        return (self.last - self.first) / (self.tokens - 1)

    def met(self, slo_ttft: float) -> bool:
        """Whether it finished within its targets. slo_ttft: ms, the server's."""
        if not self.finished or self.first is None:
            return False
        target = slo_ttft if self.slo_ttft is None else self.slo_ttft
        return (self.first - self.arrival) * 1e3 <= target and self.tpot * 1e3 <= self.slo_tpot


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    outcomes: tuple[Outcome, ...]
    window: float  # s from the first arrival to the last
    seconds: float  # s until the last token
    steps: int
    drafted: int
    accepted: int
    slo_ttft: float  # ms

    @property
    def goodput(self) -> float:
        """Requests a second of arrivals that met their targets."""
        met = sum(outcome.met(self.slo_ttft) for outcome in self.outcomes)
        return met / self.window if self.window else met / self.seconds

    @property
    def throughput(self) -> float:
        """All tokens emitted, a second of the run."""
        return sum(outcome.tokens for outcome in self.outcomes) / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, float]:
        """The figures by name; latencies in ms. An unfinished request counts at the time it was stopped."""
        stops = [self.seconds if o.stopped is None else o.stopped for o in self.outcomes]
        both = list(zip(self.outcomes, stops, strict=True))
        ends = [o.last if o.finished and o.last is not None else stop for o, stop in both]
        ttft = [(stop if o.first is None else o.first) - o.arrival for o, stop in both]
        series = {
            "ttft": ttft,
            "tpot": [o.tpot for o in self.outcomes if o.tokens > 1],
            "gap": [gap for o in self.outcomes for gap in o.gaps],
            "e2e": [end - o.arrival for end, o in zip(ends, self.outcomes, strict=True)],
        }
        figures = {
            f"{name}_{label}": 1e3 * percentile(values, q)
            for name, values in series.items()
            for label, q in (("p50", 50), ("p95", 95), ("p99", 99))
        }
        return figures | {
            "gap_max": 1e3 * max((o.longest_gap for o in self.outcomes), default=0.0),
            "goodput": self.goodput,
            "attainment": sum(o.met(self.slo_ttft) for o in self.outcomes) / max(1, len(self.outcomes)),
            "throughput": self.throughput,
            "unfinished": sum(not o.finished for o in self.outcomes),
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "drafted": self.drafted,
            "steps": self.steps,
            "seconds": self.seconds,
        }


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, linear between neighbours; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
