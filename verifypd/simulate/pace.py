"""How fast an engine goes, by what it has to do: learnt from its twin, for those who cannot take every request's steps.

A step is told by three numbers: how long it takes, what it writes for each request that decodes, how much it reads of
prompts. They depend on how many requests decode and how many prompt tokens wait. `learn` has the twin of the engine
plan and pay for traffic from hardly any to more than it can take, and keeps the means. Knows no cluster.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verifypd.control.snapshot import Plan, Snapshot
from verifypd.simulate.engine import Simulation
from verifypd.simulate.world import Settings

UNREAD = (0, 64, 256, 512, 1024, 2048, 4096)  # prompt tokens that wait; what lies between two is one kind of step
FEW = 6  # requests up to which every number is a load of its own
NEARLY = 0.9
LEAST = 3  # steps of a kind, for their mean to count


class Step(NamedTuple):
    """A step of the mean."""

    seconds: float
    written: float  # tokens, for each request that decodes
    read: float  # prompt tokens


NO_STEP = Step(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps by load."""

    slots: int
    late: bool  # a step is planned while the one before it runs
    host_seconds: float  # s before a planned step begins, where nothing runs
    places: tuple[float, ...]  # prompt tokens that wait, the mean of each kind; the first is 0
    steps: tuple[tuple[Step, ...], ...]  # [requests that decode][kind]
    spread: float = 0.0  # of the tokens that one request gets of a step: deviation² / mean

    def step(self, decoding: int, unread: int) -> Step:
        """What a step comes to. It reads no more than there is."""
        kinds = self.steps[min(decoding, len(self.steps) - 1)]
        if not unread:
            return kinds[0]
        upper = min(bisect_right(self.places, unread), len(self.places) - 1)
        low, high = self.places[upper - 1], self.places[upper]
        part = min(1.0, (unread - low) / (high - low))
        below, above = kinds[upper - 1], kinds[upper]
        read = below[2] + (above[2] - below[2]) * part
        return Step(below[0] + (above[0] - below[0]) * part, below[1] + (above[1] - below[1]) * part, min(read, unread))

    def luck(self, tokens: int, noise: float) -> float:
        """Tokens that the mean request writes while one writes so many; `noise` has deviation 1."""
        return max(0.5 * tokens, tokens + noise * math.sqrt(self.spread * tokens))


def unpacked(data: Mapping[str, Any]) -> Pace:
    """What `asdict` made of one, read from JSON."""
    steps = tuple(tuple(Step(*step) for step in row) for row in data["steps"])
    return Pace(**{**data, "places": tuple(data["places"]), "steps": steps})


def even_pace(seconds: float, slots: int) -> Pace:
    """Of an engine that takes as long for every step, reads any prompt in one and writes one token for everybody."""
    return Pace(slots, False, 0.0, (0.0, 1e9), ((Step(seconds, 1.0, 0.0), Step(seconds, 1.0, 1e9)),))


@dataclass(slots=True)
class _Sum:
    """Steps of one kind, added up."""

    count: int = 0
    decoding: float = 0.0
    unread: float = 0.0
    step: Step = NO_STEP

    def add(self, decoding: int, unread: int, step: Step) -> None:
        self.count += 1
        self.decoding += decoding
        self.unread += unread
        self.step = Step(*(a + b for a, b in zip(self.step, step, strict=True)))

    @property
    def mean(self) -> Step:
        return Step(*(each / self.count for each in self.step))

    @property
    def share(self) -> float:
        """Of the tokens that wait, those that are read; nearly all are all."""
        found = self.step.read / max(1.0, self.unread)
        return 1.0 if found > NEARLY else found


class _Seen(NamedTuple):
    """A step that was planned."""

    begun: float  # s
    decoding: int
    unread: int
    read: int
    written: tuple[tuple[Any, int], ...]  # requests that decode, and how long each is


@dataclass
class Watch:
    """Sees every step of simulations; give its `see` as `on_step`."""

    sums: dict[tuple[int, int], _Sum] = field(default_factory=dict)  # level of decoding, kind
    given: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # turns, tokens, their squares
    _last: _Seen | None = None
    _busy: bool = False  # whether there was anything to do when it last looked

    def see(self, simulation: Simulation, snapshot: Snapshot, plan: Plan) -> None:
        """Note what the step before came to, and what this one begins with."""
        self._note(simulation.device_free)
        running = [each for each in simulation.running.values() if not each.outcome.finished]
        if not plan.empty:
            decoding = [each for each in running if each.decoding]
            unread = sum(each.confirmed - each.computed for each in running if not each.decoding)
            begun = simulation.device_free if self._busy else max(simulation.now, simulation.device_free)
            written = tuple((each, each.device_length) for each in decoding if each.alive)
            self._last = _Seen(begun, len(decoding), unread, plan.work().chunk_rows, written)
        self._busy = bool(running)

    def _note(self, ended: float) -> None:
        if self._last is None:
            return
        begun, decoding, unread, read, alive = self._last
        gains = [each.device_length - before for each, before in alive]
        for place, more in enumerate((len(gains), sum(gains), sum(each * each for each in gains))):
            self.given[place] += more
        step = Step(ended - begun, sum(gains) / max(1, len(gains)), read)
        kind = next((k for k, most in enumerate(UNREAD) if unread <= most), len(UNREAD))
        self.sums.setdefault((level(decoding), kind), _Sum()).add(decoding, unread, step)
        self._last = None

    def pace(self, settings: Settings) -> Pace:
        """The table of what was seen, straight between the loads that were.

        Of a step that reads prompts it is what they add that is kept: loads at which none was seen have it too.
        """
        kept = {key: each for key, each in self.sums.items() if each.count >= LEAST}
        plain = _line(each for (_, kind), each in kept.items() if kind == 0)
        loads = range(settings.slots + 1)
        places, columns = [0.0], [[between(plain, load) for load in loads]]
        for kind in sorted({kind for _, kind in kept} - {0}):
            own = [each for (_, k), each in kept.items() if k == kind]
            place = sum(each.unread for each in own) / sum(each.count for each in own)
            places.append(place)
            shares = {each.decoding / each.count: each.share for each in own}
            added = [(load, _added(mean, between(plain, load), shares[load] * place)) for load, mean in _line(own)]
            columns.append([_with(between(added, load), columns[0][load]) for load in loads])
        steps = tuple(tuple(column[load] for column in columns) for load in loads)
        turns, tokens, squares = self.given
        spread = squares / tokens - tokens / turns if tokens else 0.0
        return Pace(settings.slots, settings.late, settings.host_seconds, tuple(places), steps, max(0.0, spread))


def _line(sums: Iterable[_Sum]) -> list[tuple[float, Step]]:
    return sorted((each.decoding / each.count, each.mean) for each in sums)


def _added(step: Step, plain: Step, read: float) -> Step:
    """Seconds that prompts add, and the share of its tokens that a request still gets."""
    share = step.written / plain.written if step.written else 1.0  # nobody decoded
    return Step(step.seconds - plain.seconds, share, read)


def _with(added: Step, plain: Step) -> Step:
    seconds = max(plain.seconds + added.seconds, 0.5 * plain.seconds)
    return Step(seconds, added.written * plain.written, added.read)


def level(decoding: int) -> int:
    """Loads that are alike: beyond a few, each is up to a fifth more than the one before."""
    return decoding if decoding < FEW else FEW + int(math.log(decoding / FEW) / math.log(1.2))


def between(points: Sequence[tuple[float, Step]], at: float) -> Step:
    """On the line through the points; beyond the ends, the last."""
    places = [place for place, _ in points]
    upper = bisect_right(places, at)
    if upper == 0 or upper == len(points):
        return points[max(0, upper - 1)][1]
    (low, below), (high, above) = points[upper - 1], points[upper]
    part = (at - low) / (high - low)
    return Step(*(a + (b - a) * part for a, b in zip(below, above, strict=True)))
