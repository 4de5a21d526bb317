"""Load that an operator changes while it runs, within limits: rate, kind of prompts, a burst of long ones.

What was sent is kept as a workload, so that every arm gets the same. Knows arrivals and a clock; nothing of pages.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifypd.bench.figures import Outcome
from verifypd.bench.play import Arm, Call, Limits, serve
from verifypd.bench.sources import source
from verifypd.bench.workload import Arrival, Workload
from verifypd.errors import ConfigError

STEP = 0.02  # s between two looks at what is due
LONG_OUTPUT = 16  # tokens that a long prompt of a burst is answered with
MIXES = ("chat", "mixed", "repetition")  # kinds of prompts beside the one that it began with


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the operator lets the page do."""

    rate: float  # requests/s at most
    burst: int  # prompts of one burst
    tokens: int  # of each of them

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1000 or not 1 <= self.burst <= 1000 or not 1 <= self.tokens <= 1_000_000:
            raise ConfigError(
                "a load has up to 1000 requests/s, and bursts of 1 to 1000 prompts of 1 to 1000000 tokens"
            )


class Load:
    """One thread changes it, another draws from it."""

    def __init__(self, first: str, rate: float, bounds: Bounds, output_tokens: int | None, plain_text: bool) -> None:
        self.rate, self.bounds, self.mix = rate, bounds, first
        self.plain_text = plain_text
        names = dict.fromkeys((first, *MIXES))
        self.sources = {name: source(name).limited(output_tokens) for name in names}
        self._bursts = 0

    def limits(self) -> dict[str, Any]:
        """For the page."""
        most = self.bounds
        burst = f"{most.burst} prompts of {most.tokens} tokens"
        return {"rate": [0, most.rate, self.rate], "mixes": list(self.sources), "burst": burst}

    def change(self, wanted: dict[str, Any]) -> str | None:
        """Take a change; says what is wrong with it, and then nothing is changed."""
        unknown = set(wanted) - {"rate", "mix", "burst"}
        rate, mix, burst = wanted.get("rate", self.rate), wanted.get("mix", self.mix), wanted.get("burst", False)
        if unknown:
            return f"unknown field {min(unknown)!r}; give rate, mix or burst"
        number = isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)
        if not number or not 0 <= rate <= self.bounds.rate:
            return f"rate must be a number in 0..{self.bounds.rate:g}"
        if mix not in self.sources:
            return f"mix must be one of {', '.join(self.sources)}"
        if not isinstance(burst, bool):
            return "burst must be true or false"
        self.rate, self.mix = float(rate), mix
        self._bursts += burst
        return None

    async def arrivals(self, seconds: float, noise: random.Random) -> AsyncIterator[Arrival]:
        """Poisson arrivals at the rate of the moment, for so long."""
        begun = last = time.perf_counter()
        wait = noise.expovariate(1.0)  # in mean gaps: a new rate counts at once
        while (now := time.perf_counter()) - begun < seconds:
            wait -= self.rate * (now - last)
            last = now
            while wait <= 0:
                yield self._one(noise, now - begun)
                wait += noise.expovariate(1.0)
            for _ in range(self.bounds.burst if self._bursts else 0):
                yield Arrival(round(now - begun, 4), self.bounds.tokens, LONG_OUTPUT)
            self._bursts = max(0, self._bursts - 1)
            await asyncio.sleep(STEP)

    def _one(self, noise: random.Random, at: float) -> Arrival:
        [drawn] = self.sources[self.mix].draw(noise, 1)
        return replace(drawn.as_text() if self.plain_text else drawn, at=round(at, 4))


async def steer(
    arms: Sequence[Arm], load: Load, seconds: float, seed: int, limits: Limits, mark: str, watch: Callable[[Call], None]
) -> tuple[Workload, list[Outcome]]:
    """Send arms the same requests as they come; what was sent, and what became of it at each."""
    begun = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begun

    sent: list[Arrival] = []
    first = (
        Workload("steered", 0.0, (), seed=seed).marked(mark).seed
    )  # of random tokens, as whoever plays it again has it
    calls: list[list[Call]] = [[] for _ in arms]
    tasks: list[asyncio.Task[None]] = []
    try:
        async for arrival in load.arrivals(seconds, random.Random(f"steered {seed}")):
            for arm, own in zip(arms, calls, strict=True):
                own.append(Call(arrival.marked(mark), first + len(sent), clock, arrival.at))
                tasks.append(asyncio.ensure_future(serve(arm, own[-1], limits, watch)))
            sent.append(arrival)
        if tasks:
            await asyncio.wait(tasks, timeout=max(1.0, limits.seconds - seconds))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not sent:
        raise ConfigError("no request was sent: the load stood at 0 all the time")
    workload = Workload("steered", 0.0, tuple(sent), seed=seed)
    return workload, [_outcome(own, clock()) for own in calls]


def _outcome(calls: Sequence[Call], over: float) -> Outcome:
    last = max((call.outputs[-1] for call in calls if call.outputs), default=over)
    return Outcome(tuple(call.record() for call in calls), len(calls), last)
