"""Who may come in: queue length, calls a key, deadlines. Pure: numbers in, a refusal or None out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

LONGEST_WAIT = 60  # s, of a Retry-After


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is turned away."""

    status: int
    code: str
    message: str
    retry_after: int = 0  # s
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What stands before a new call."""

    waiting: int  # requests without a slot
    free: int  # slots nobody holds
    rate: float  # requests that leave a second; 0: not known yet

    def wait(self) -> float:
        """Expected wait for a slot, s; 0 when nothing is known."""
        ahead = self.waiting - self.free
        return max(0, ahead) / self.rate if self.rate > 0 else 0.0


@dataclass(slots=True)
class Admission:
    """The limits, and how many calls each key has open."""

    max_queue: int
    max_per_key: int | None
    slots: int
    open: Counter[int] = field(default_factory=Counter)

    def refuse(self, count: int, key: int, load: Load, deadline_ms: float | None, spent_ms: float) -> Refusal | None:
        """None when a call of `count` requests may come in. `spent_ms` have passed since it arrived."""
        retry = min(LONGEST_WAIT, max(1, math.ceil(load.wait())))
        if self.max_per_key is not None and self.open[key] >= self.max_per_key:
            return Refusal(
                429, "too_many_streams", f"this key has {self.open[key]} calls open, as many as it may have", retry
            )
        if count > self.slots + self.max_queue:
            return Refusal(
                400,
                "too_many_choices",
                f"{count} choices at once can never be queued here; the limit is {self.slots + self.max_queue}",
                param="n",
            )
        if load.waiting + count > load.free + self.max_queue:
            return Refusal(429, "queue_full", f"{load.waiting} requests are waiting already; try again later", retry)
        if deadline_ms is not None and spent_ms + load.wait() * 1e3 >= deadline_ms:
            return Refusal(
                429,
                "deadline_unreachable",
                f"deadline_ms={deadline_ms:g} cannot be met: the queue alone takes about {load.wait() * 1e3:.0f} ms",
                retry,
                "deadline_ms",
            )
        return None

    def enter(self, key: int) -> None:
        """A call of this key came in."""
        self.open[key] += 1

    def leave(self, key: int) -> None:
        """A call of this key has ended."""
        self.open[key] -= 1
        if not self.open[key]:
            del self.open[key]


class LeaveRate:
    """Requests that leave a second, over the last `window` seconds of work."""

    def __init__(self, window: float = 10.0) -> None:
        self.window = window
        self._times: list[float] = []

    def add(self, now: float) -> None:
        """A request has left."""
        self._times.append(now)
        if len(self._times) > 4096:
            del self._times[:2048]

    def rate(self, now: float) -> float:
        """0 when fewer than two have left."""
        recent = [t for t in self._times if t > now - self.window]
        self._times = recent
        return len(recent) / max(1e-3, now - recent[0]) if len(recent) > 1 else 0.0
