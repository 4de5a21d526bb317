"""Running totals of one engine and of its lanes. Plain numbers; knows nothing of how they are shown."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RECENT = 1000  # waits a lane remembers


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, by nearest rank; 0 without any."""
    return rank(sorted(values), share)


def rank(ordered: Sequence[float], share: float) -> float:
    """The same of values in order."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(slots=True)
class LaneStats:
    """One lane: how many are in it now, how many passed, and how long the last of them waited."""

    depth: int = 0
    deepest: int = 0
    passed: int = 0
    batches: int = 0
    largest: int = 0  # requests in one batch
    seconds: float = 0.0  # device time of its batches, where it is measured
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # s

    def enter(self) -> None:
        """A request joins the queue."""
        self.depth += 1
        if self.depth > self.deepest:
            self.deepest = self.depth

    def leave(self, waited: float) -> None:
        """A request leaves the queue, served or not."""
        self.depth -= 1
        self.passed += 1
        self.waits.append(waited)

    def ran(self, requests: int) -> None:
        """A batch was launched."""
        self.batches += 1
        self.largest = max(self.largest, requests)

    def wait(self, share: float) -> float:
        """A percentile of the recent waits, s."""
        return percentile(self.waits, share)

    def summary(self) -> dict[str, float]:
        """The figures, waits in ms."""
        waits = sorted(self.waits)
        return {
            "depth": self.depth,
            "deepest": self.deepest,
            "passed": self.passed,
            "batches": self.batches,
            "largest": self.largest,
            "seconds": self.seconds,
            **{f"wait_p{share}_ms": rank(waits, share / 100) * 1e3 for share in (50, 95, 99)},
        }


def lane_table(names: Sequence[str]) -> dict[str, LaneStats]:
    """Fresh statistics for each lane."""
    return {name: LaneStats() for name in names}


@dataclass(slots=True)
class EngineStats:
    """Totals since start. A token counts when the host has absorbed it."""

    steps: int = 0
    plans: int = 0  # steps that ran something
    plans_left: int = 0  # of those, steps that left a draft for a later verify
    step_seconds: float = 0.0  # s of all steps on the host, waiting for the device included
    chunk_seconds: float = 0.0  # s of the verify lane's that its prompt chunks took, by their share of the rows
    passes: int = 0  # verifier passes
    rows: int = 0  # tokens through the verifier
    prompt_tokens: int = 0  # of those, prompt tokens
    emitted: int = 0
    verdicts: int = 0  # of requests that had a token already
    continued: int = 0  # tokens that those brought
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finished: int = 0
    answered: int = 0  # of those, with any output
    finished_tokens: int = 0  # output tokens of those
    switches: int = 0  # changes of architecture
    lanes: dict[str, LaneStats] = field(default_factory=lambda: lane_table(("prefill", "decode", "verify")))

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0
