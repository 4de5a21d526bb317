"""How likely a draft token is to stand: per request, by kind of request, calibrated online. Sees counts, never a token.

The chance of position i, given that all before it stood, is taken in odds:

    odds(i) = odds(kind) · (odds(request) / odds(kind)) ^ trust · offset(i)

odds(request) is a running mean pulled to that of its kind (temperature class, acceptance mode, drafter); `trust` and
the offsets of the kind are learnt so that what is foretold is what comes. Survival of a position: the running product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import log, sqrt

from verifypd.control.observe import Observation

Kind = tuple[str, int, str | None]  # acceptance mode, temperature class, drafter

MEMORY = 24.0  # trials a request's mean looks back
POPULATION = 400.0  # trials a kind's mean looks back
STRENGTH = 4.0  # trials that the kind's mean counts for in a request's
FADE = 0.985  # what is left of a request's evidence after a step without drafts
RATE, TRUST_RATE = 0.03, 0.06  # of calibration: of the offsets, and of `trust`
TRUST = 0.5  # in what a request's own trials say of it, until it is known how far they can be trusted
BINS = 10
LOW, HIGH = 0.005, 0.995


def kind_of(greedy: bool, coupled: bool, temperature: float, drafter: str | None) -> Kind:
    """The class whose requests are taken to be alike."""
    if greedy:
        return ("greedy", 0, drafter)
    level = 1 if temperature < 0.5 else 2 if temperature < 0.9 else 3 if temperature < 1.2 else 4
    return ("coupled" if coupled else "rejection", level, drafter)


@dataclass(slots=True)
class _Running:
    """Accepted tokens and trials, old ones fading."""

    accepted: float = 0.0
    trials: float = 0.0

    def learn(self, accepted: float, trials: float, memory: float) -> None:
        """Add a draft's trials."""
        keep = 1.0 - trials / memory if trials < memory else 0.0
        self.accepted = self.accepted * keep + accepted
        self.trials = self.trials * keep + trials


@dataclass(slots=True)
class _Population(_Running):
    """What is known of one kind of request."""

    offsets: list[float] = field(default_factory=lambda: [1.0])  # factors of the odds, by position
    reached: int = 0  # positions that were ever looked at
    trust: float = TRUST

    @property
    def mean(self) -> float:
        """Conditional acceptance, kept off 0 and 1."""
        return min(HIGH, max(LOW, self.accepted / self.trials))


class _Trace(_Running):
    """What is known of one request."""

    __slots__ = ("curve", "kind")

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.curve: list[float] | None = None  # survivals, until something is learnt


@dataclass(slots=True)
class Reliability:
    """Foretold chances against what came, in bins, old evidence fading. `error` is the calibration error."""

    foretold: list[float] = field(default_factory=lambda: [0.0] * BINS)
    came: list[float] = field(default_factory=lambda: [0.0] * BINS)
    trials: list[float] = field(default_factory=lambda: [0.0] * BINS)

    def add(self, chance: float, stood: bool) -> None:
        """One trial. A bin that has seen enough counts its past half."""
        b = min(BINS - 1, int(chance * BINS))
        self.foretold[b] += chance
        self.came[b] += stood
        self.trials[b] += 1.0
        if self.trials[b] >= 1000.0:
            self.foretold[b] *= 0.5
            self.came[b] *= 0.5
            self.trials[b] *= 0.5

    @property
    def error(self) -> float:
        """Mean distance between foretold and observed frequency, weighted by trials; 0 without any."""
        total = sum(self.trials)
        return sum(abs(f - c) for f, c in zip(self.foretold, self.came, strict=True)) / total if total else 0.0

    def rows(self) -> list[tuple[float, float, float]]:
        """(foretold, came, trials) of each bin that was met."""
        parts = zip(self.foretold, self.came, self.trials, strict=True)
        return [(f / n, c / n, n) for f, c, n in parts if n]


class Survival:
    """Foretells how far a draft will stand. One curve per request, learnt from its verdicts."""

    def __init__(self, depth: int, prior: float = 0.6) -> None:
        self.depth = depth  # positions of a curve
        self.reliability = Reliability()
        self._everyone = _Population(prior * 8.0, 8.0)
        self._kinds: dict[Kind, _Population] = {}
        self._requests: dict[int, dict[Kind, _Trace]] = {}  # by order; a request may change drafters
        self._turn = 0

    def curve(self, order: int, kind: Kind) -> list[float]:
        """Survival of positions 0..depth−1: the chance that the draft stands up to and including each."""
        trace = self._trace(order, kind)
        if trace.curve is None:
            trace.curve = self._curve(trace)
        return trace.curve

    def chance(self, order: int, kind: Kind) -> float:
        """Chance of the first draft token."""
        return self.curve(order, kind)[0] if self.depth else 0.0

    def mean(self, kind: Kind | None = None) -> float:
        """Mean conditional acceptance of a kind, or of everyone."""
        return (self._kinds.get(kind, self._everyone) if kind else self._everyone).mean

    def typical(self, most: int = 8) -> list[float]:
        """The mean curve of some requests that are known now; empty without any. Learns nothing."""
        traces = [next(reversed(traces.values())) for traces in islice(self._requests.values(), most) if traces]
        curves = [trace.curve or self._curve(trace) for trace in traces]
        return [sum(values) / len(curves) for values in zip(*curves, strict=True)]

    @property
    def calibration_error(self) -> float:
        """How far foretold chances lie from what came, lately."""
        return self.reliability.error

    @property
    def doubt(self) -> float:
        """Standard error of the mean acceptance, by the trials that still count."""
        mean = self._everyone.mean
        return sqrt(mean * (1.0 - mean) / max(1.0, self._everyone.trials))

    def observe(self, seen: Observation) -> None:
        """Learn from one verdict."""
        if not seen.drafted:
            self.rest(seen.order)
            return
        kind = kind_of(seen.greedy, seen.coupled, seen.temperature, seen.drafter)
        trace = self._trace(seen.order, kind)
        population = self._kinds.get(kind) or self._population(kind)
        accepted = seen.accepted
        trials = accepted + 1 if accepted < seen.drafted else accepted
        self._turn += 1
        position = self._turn % seen.drafted  # one a draft, picked before its outcome is looked at
        if position < trials:
            self._calibrate(trace, population, min(position, self.depth - 1), position < accepted)
        trace.learn(accepted, trials, MEMORY)
        population.learn(accepted, trials, POPULATION)
        self._everyone.learn(accepted, trials, POPULATION)
        trace.curve = None

    def rest(self, order: int, tokens: int = 1) -> None:
        """So many tokens of a request came without drafts: what is known of it has grown old."""
        for trace in self._requests.get(order, {}).values():
            if trace.trials:
                left = FADE**tokens
                trace.accepted *= left
                trace.trials *= left
                trace.curve = None

    def overhear(self, order: int, kind: Kind, stood: int, trials: int) -> None:
        """Learn from tokens that nobody drafted: of so many that might have been, so many came. First positions all."""
        trace = self._trace(order, kind)
        for running, memory in ((trace, MEMORY), (self._population(kind), POPULATION)):
            part = min(1.0, memory / trials)  # what was heard over a long rest counts for no more than is remembered
            running.learn(part * stood, part * trials, memory)
        trace.curve = None

    def fade(self, keep: float, kind: Kind) -> None:
        """Trust the evidence about a kind less, and that about everyone, down to a few trials."""
        for population in (self._population(kind), self._everyone):
            if population.trials > 16.0:
                population.accepted *= keep
                population.trials *= keep

    def forget(self, order: int) -> None:
        """The request has left."""
        self._requests.pop(order, None)

    def _trace(self, order: int, kind: Kind) -> _Trace:
        traces = self._requests.get(order)
        if traces is None:
            traces = self._requests[order] = {}
        found = traces.get(kind)
        if found is None:
            found = traces[kind] = _Trace(kind)
        return found

    def _population(self, kind: Kind) -> _Population:
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Population(self._everyone.mean * 8.0, 8.0, [1.0] * max(1, self.depth))
        return found

    def _calibrate(self, trace: _Trace, population: _Population, position: int, stood: bool) -> None:
        """Compare what was foretold for a position with what came, and move towards it."""
        offsets = population.offsets
        if position >= population.reached:
            if population.reached:  # a first look this far: start from what is known of the last position
                offsets[population.reached :] = [offsets[population.reached - 1]] * (len(offsets) - population.reached)
            population.reached = position + 1
        odds, lean = self._odds(trace, population)
        there = odds * offsets[position]
        chance = there / (1.0 + there)
        self.reliability.add(chance, stood)
        miss = stood - chance
        offsets[position] = min(8.0, max(0.125, offsets[position] * (1.0 + RATE * miss)))
        if lean:
            population.trust = min(1.5, max(0.2, population.trust + TRUST_RATE * miss * log(lean)))

    def _odds(self, trace: _Trace, population: _Population) -> tuple[float, float]:
        """Odds of the request before the position counts, and the factor by which its own differ from its kind's."""
        mean = population.accepted / population.trials
        mean = HIGH if mean > HIGH else LOW if mean < LOW else mean
        own = (trace.accepted + STRENGTH * mean) / (trace.trials + STRENGTH)
        own = HIGH if own > HIGH else LOW if own < LOW else own
        usual = mean / (1.0 - mean)
        lean = own / (1.0 - own) / usual
        return usual * lean**population.trust, lean

    def _curve(self, trace: _Trace) -> list[float]:
        population = self._kinds.get(trace.kind) or self._population(trace.kind)
        odds, _ = self._odds(trace, population)
        alive, survivals = 1.0, []
        for offset in population.offsets:
            there = odds * offset
            alive *= there / (1.0 + there)
            survivals.append(alive)
        return survivals
