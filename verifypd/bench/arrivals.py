"""When requests arrive: closed loop, Poisson, gamma, a trace, or all at once. Knows times; nothing of prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from verifypd.bench.sources import Source
from verifypd.bench.workload import Workload
from verifypd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Process:
    """How requests come: by `clients` that wait for their answers, at a `rate`, or, with neither, all at once.

    cv: standard deviation of the time between two arrivals over its mean; 1 is a Poisson process, more is bursty.
    """

    clients: int | None = None
    rate: float | None = None
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.clients is not None and self.rate is not None:
            raise ConfigError("a closed loop has no rate: give --concurrency or --rate")
        if (self.clients or 1) < 1 or (self.rate is not None and not self.rate > 0) or not self.cv > 0:
            raise ConfigError("concurrency, rate and cv must be above 0")

    @property
    def name(self) -> str:
        """In words."""
        if self.clients is not None:
            return f"closed {self.clients}"
        if self.rate is None:
            return "at once"
        return f"poisson {self.rate:g}/s" if self.cv == 1.0 else f"gamma {self.rate:g}/s cv {self.cv:g}"

    @property
    def open(self) -> bool:
        """Whether requests come at times of their own, whatever became of those before."""
        return self.rate is not None

    def times(self, noise: random.Random, count: int, seconds: float | None) -> list[float]:
        """s of each arrival, the first after one gap: `count` of them, and none after `seconds`."""
        if self.rate is None:
            return [0.0] * count
        shape, scale = self.cv**-2, self.cv**2 / self.rate
        at = 0.0
        found: list[float] = []
        while len(found) < count:
            at += noise.gammavariate(shape, scale) if self.cv != 1.0 else noise.expovariate(self.rate)
            if seconds is not None and at > seconds:
                break
            found.append(round(at, 4))
        return found


MOST = 100_000  # requests of one workload


def make(source: Source, process: Process, seed: int, *, count: int | None, seconds: float | None = None) -> Workload:
    """A workload from its seed: the same arguments give the same requests at the same times.

    Times and prompts are drawn apart, so that the same prompts can come at another rate.
    """
    if count is None and (seconds is None or not process.open):
        raise ConfigError("give --num-requests; or --duration, in an open loop")
    times = process.times(random.Random(f"times {seed} {process.name}"), count or MOST, seconds)
    if not times:
        raise ConfigError(f"{process.name}: no request arrives in {seconds:g} s; raise --duration or --rate")
    drawn = source.draw(random.Random(f"prompts {seed} {source.name}"), len(times))
    arrivals = tuple(replace(each, at=at) for each, at in zip(drawn, times, strict=True))
    return Workload(f"{source.name} {process.name}", process.rate or 0.0, arrivals, process.clients, seed)
