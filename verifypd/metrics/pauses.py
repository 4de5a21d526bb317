"""What holds up a step besides its work: kernels compiled, graphs captured, garbage collected. Counts of this process.

Whoever does such a thing notes it here. Kernels and the garbage collector are the process's own, so two engines in one
process count together. Knows numbers and names; nothing of kernels, graphs or steps.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple

KINDS = COMPILED, CAPTURED, COLLECTED = "compiled", "captured", "collected"
KEPT = 64  # pauses whose names are remembered
SHORT = 1e-3  # s: collections below it have no name


@dataclass(frozen=True, slots=True)
class Pauses:
    """How many of each kind there were, and the seconds they took. A capture's hold those of what it compiles."""

    compiled: int = 0  # kernels: each set of compile-time constants and properties of arguments is one
    captured: int = 0  # graphs
    collected: int = 0  # times garbage was
    compiled_seconds: float = 0.0
    captured_seconds: float = 0.0
    collected_seconds: float = 0.0

    def since(self, earlier: Pauses) -> Pauses:
        """What has come on top of it."""
        return Pauses(*(getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)))

    def summary(self) -> dict[str, float]:
        """The figures, times in ms."""
        times = {f"{kind}_ms": 1e3 * getattr(self, f"{kind}_seconds") for kind in KINDS}
        return {kind: getattr(self, kind) for kind in KINDS} | times


class Pause(NamedTuple):
    """One of them."""

    ended: float  # s of time.monotonic
    kind: str
    name: str
    seconds: float


class Watch:
    """Counts pauses, and remembers the names of the latest."""

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = {kind: [0, 0.0] for kind in KINDS}  # how many, and s
        self.latest: deque[Pause] = deque(maxlen=KEPT)
        self._collecting = 0.0  # s, when the collection under way began

    @property
    def total(self) -> Pauses:
        """All so far."""
        counts = [self._counts[kind] for kind in KINDS]
        return Pauses(*(int(count) for count, _ in counts), *(seconds for _, seconds in counts))

    @property
    def compiled(self) -> int:
        """Kernels so far; asked for in every step."""
        return int(self._counts[COMPILED][0])

    def note(self, kind: str, name: str, seconds: float) -> None:
        """One more of a kind. A collection may come in between: each kind has numbers of its own."""
        own = self._counts[kind]
        own[0] += 1
        own[1] += seconds
        if kind != COLLECTED or seconds >= SHORT:
            self.latest.append(Pause(time.monotonic(), kind, name, seconds))

    @contextmanager
    def timed(self, kind: str, name: str) -> Iterator[None]:
        """Note what runs within."""
        begun = time.monotonic()
        yield
        self.note(kind, name, time.monotonic() - begun)

    def between(self, begin: float, end: float) -> list[Pause]:
        """Those remembered of which a part lies in that time, s of time.monotonic."""
        return [each for each in list(self.latest) if each.ended > begin and each.ended - each.seconds < end]

    def collection(self, phase: str, info: dict[str, int]) -> None:
        """See gc.callbacks."""
        if phase == "start":
            self._collecting = time.monotonic()
        else:
            self.note(COLLECTED, f"generation {info['generation']}", time.monotonic() - self._collecting)


WATCH = Watch()


def watch_collections() -> None:
    """Note garbage collections from now on."""
    if WATCH.collection not in gc.callbacks:
        gc.callbacks.append(WATCH.collection)


def freeze_heap() -> None:
    """Collect garbage once, and leave what lives now out of later collections: with weights, code and graphs in them
    they stop the process for a tenth of a second."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The same for what runs within, without a collection first. Behind it all is collected again, so that a model is
    freed once nobody has it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
