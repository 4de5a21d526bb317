"""What an arm was doing while it ran: counters over a run, and samples in between. Knows names and numbers only.

An arm that can be read (`Metered`) gives counters that only grow (`…_s`, `…_n`) and gauges (all others). A run keeps
the counters' growth, the gauges' means and peaks, and a timeline of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

PERIOD = 0.01  # s between two samples, at first
SAMPLES = 240  # at most: then every other one goes, and the period doubles
DRIVERS = ("gpu_utilization", "sm_activity")  # what the GPU's driver counts
SETTLES = 1.0  # s; what NVML reads is of up to so long before: in a shorter run, of what came before it


@runtime_checkable
class Metered(Protocol):
    """An arm that says what it is doing."""

    def reading(self) -> dict[str, float]:
        """Counters and gauges, now; any thread may ask."""
        ...


def is_counter(name: str) -> bool:
    """Whether it only grows."""
    return name.endswith(("_s", "_n"))


@dataclass(frozen=True, slots=True)
class Parts:
    """What was read of one run."""

    totals: dict[str, float] = field(default_factory=dict)  # growth of counters
    means: dict[str, float] = field(default_factory=dict)  # of gauges
    peaks: dict[str, float] = field(default_factory=dict)
    timeline: dict[str, list[float]] = field(default_factory=dict)  # "at", and every name, sample by sample

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        line = {name: [float(f"{value:.5g}") for value in values] for name, values in self.timeline.items()}
        return {"totals": self.totals, "means": self.means, "peaks": self.peaks, "timeline": line}

    @classmethod
    def unpacked(cls, data: dict[str, Any] | None) -> Self | None:
        """What `packed` made."""
        return None if data is None else cls(**data)


class Meter:
    """Samples an arm while a run goes on."""

    def __init__(self, arm: Metered) -> None:
        self.arm = arm
        self.rows: list[tuple[float, dict[str, float]]] = []
        self._began = time.perf_counter()
        self._period = PERIOD

    def sample(self) -> None:
        """Take one reading."""
        self.rows.append((time.perf_counter() - self._began, self.arm.reading()))
        if len(self.rows) > SAMPLES:
            del self.rows[1::2]
            self._period *= 2

    async def watch(self) -> None:
        """Take readings until cancelled."""
        while True:
            await asyncio.sleep(self._period)
            self.sample()

    def parts(self) -> Parts:
        """What came of it; of a run that was too short for the driver's counters, without them."""
        first, last = self.rows[0][1], self.rows[-1][1]
        short = self.rows[-1][0] - self.rows[0][0] < SETTLES
        names = [name for name in first if not (short and name in DRIVERS)]
        gauges = {name: [row[name] for _, row in self.rows] for name in names if not is_counter(name)}
        line = {name: [row[name] - first[name] * is_counter(name) for _, row in self.rows] for name in names}
        return Parts(
            totals={name: last[name] - first[name] for name in names if is_counter(name)},
            means={name: sum(values) / len(values) for name, values in gauges.items()},
            peaks={name: max(values) for name, values in gauges.items()},
            timeline={"at": [at for at, _ in self.rows], **line},
        )


@contextlib.asynccontextmanager
async def metered(arm: object) -> AsyncIterator[list[Parts]]:
    """Read an arm while the body runs; afterwards the list holds what was read, where the arm can be."""
    found: list[Parts] = []
    if not isinstance(arm, Metered):
        yield found
        return
    meter = Meter(arm)
    meter.sample()
    task = asyncio.ensure_future(meter.watch())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        meter.sample()
        found.append(meter.parts())


def pooled(parts: Sequence[Parts], seconds: float) -> dict[str, Any] | None:
    """Runs of one arm taken together: totals summed, means averaged, the highest peaks, and shares of the time.

    `chunks_s` are those of `verify_s` that prompts took: they count as prefill.
    """
    if not parts:
        return None
    names = dict.fromkeys(name for each in parts for name in each.totals)
    totals = {name: sum(each.totals.get(name, 0.0) for each in parts) for name in names}
    means, peaks = (
        {
            name: combine([getattr(each, kind)[name] for each in parts if name in getattr(each, kind)])
            for name in dict.fromkeys(name for each in parts for name in getattr(each, kind))
        }
        for kind, combine in (("means", lambda values: sum(values) / len(values)), ("peaks", max))
    )
    device = sum(totals.get(name, 0.0) for name in ("prefill_s", "draft_s", "verify_s"))
    shares = {name: totals.get(f"{name}_s", 0.0) / max(seconds, 1e-9) for name in ("prefill", "draft", "verify")}
    ridden = min(shares["verify"], totals.get("chunks_s", 0.0) / max(seconds, 1e-9))
    shares |= {"prefill": shares["prefill"] + ridden, "verify": shares["verify"] - ridden}
    host = max(0.0, totals.get("step_s", 0.0) - device) / max(seconds, 1e-9)
    shares |= {"host": host, "idle": max(0.0, 1.0 - sum(shares.values()) - host)}
    return {"totals": totals, "means": means, "peaks": peaks, "shares": shares, "busy": device / max(seconds, 1e-9)}
