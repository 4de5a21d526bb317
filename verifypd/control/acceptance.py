"""How likely a draft token is to stand, learnt from verdicts. Sees counts, never a token.

Requests of one kind (acceptance rule, temperature class, drafter) are taken to be alike: a running mean for each draft
position, given that all before it stood. A request adds its own excess over its kind, pulled to zero by
`PRIOR_TRIALS` trials. Survival of a position is the running product of the chances.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from math import sqrt

from verifypd.control.observe import Observation
from verifypd.control.tuning import KIND_TRIALS, PRIOR, PRIOR_TRIALS, REQUEST_TRIALS
from verifypd.metrics.reliability import Reliability

Kind = tuple[str, int, str | None]  # acceptance rule, temperature class, drafter

LOW, HIGH = 0.005, 0.995  # chances are kept off 0 and 1


def kind_of(greedy: bool, coupled: bool, temperature: float, drafter: str | None) -> Kind:
    """The class whose requests are taken to be alike."""
    if greedy:
        return ("greedy", 0, drafter)
    return ("coupled" if coupled else "rejection", 1 + round(2 * temperature), drafter)


@dataclass(slots=True)
class Mean:
    """Successes of trials, old ones fading."""

    stood: float
    trials: float
    reached: bool = False  # whether any trial was more than the prior's

    @property
    def value(self) -> float:
        """The mean, kept off 0 and 1."""
        mean = self.stood / self.trials
        return HIGH if mean > HIGH else LOW if mean < LOW else mean

    def learn(self, stood: float, trials: float, memory: float) -> None:
        """Add trials; what lies further back than `memory` of them fades."""
        keep, most = 1.0 - trials / memory, memory / self.trials
        keep = most if most < keep else keep if keep > 0.0 else 0.0
        self.stood = self.stood * keep + stood
        self.trials = self.trials * keep + trials
        self.reached = True


@dataclass(slots=True)
class _Own:
    """What one request's drafts of one kind came to, beyond what its kind led to expect."""

    excess: float = 0.0  # tokens
    trials: float = 0.0


class Acceptance:
    """Predicts how far a draft will stand. One curve for each request, learnt from verdicts."""

    def __init__(self, depth: int) -> None:
        self.depth = depth  # positions of a curve
        self.reliability = Reliability()
        self._everyone = Mean(PRIOR * PRIOR_TRIALS, PRIOR_TRIALS)
        self._kinds: dict[Kind, list[Mean]] = {}  # by position
        self._requests = defaultdict[int, defaultdict[Kind, _Own]](partial(defaultdict, _Own))  # it may change drafters
        self._drafts = 0  # observed

    def curve(self, request: int, kind: Kind) -> list[float]:
        """Survival of positions 0..depth−1: the chance that the draft stands up to and including each."""
        own = self._requests[request][kind]
        excess = own.excess / (own.trials + PRIOR_TRIALS)
        curve, alive = [], 1.0
        for mean in self._means(kind)[: self.depth]:
            chance = mean.stood / mean.trials + excess
            alive *= HIGH if chance > HIGH else LOW if chance < LOW else chance
            curve.append(alive)
        return curve

    def mean(self) -> float:
        """Mean acceptance of everyone's drafts."""
        return self._everyone.value

    @property
    def doubt(self) -> float:
        """Standard error of that mean, by the trials that still count."""
        mean = self._everyone.value
        return sqrt(mean * (1.0 - mean) / max(1.0, self._everyone.trials))

    @property
    def known(self) -> list[tuple[int, Kind]]:
        """The requests that are known now, with each kind of draft they had."""
        return [(request, kind) for request, kinds in self._requests.items() for kind in kinds]

    def observe(self, seen: Observation, probed: bool = False) -> None:
        """Learn from a draft's verdict. What only probes tell must be believed sooner: there are few of them."""
        if not seen.drafted or not self.depth:
            return
        memory = KIND_TRIALS / 2 if probed else KIND_TRIALS
        kind = kind_of(seen.greedy, seen.coupled, seen.temperature, seen.drafter)
        own = self._requests[seen.request_id][kind]
        accepted = min(seen.accepted, seen.drafted)
        trials = min(accepted + 1, seen.drafted)
        means, last = self._means(kind), self.depth - 1
        self._drafts += 1
        looked_at = self._drafts % seen.drafted  # one position a draft, picked before its outcome is known
        expected = 0.0
        for position in range(trials):
            mean = means[position if position < last else last]
            value, stood = mean.value, position < accepted
            if position == looked_at:
                chance = value + own.excess / (own.trials + PRIOR_TRIALS)
                self.reliability.add(min(HIGH, max(LOW, chance)), stood)
            expected += value
            mean.learn(stood, 1.0, memory)
        if trials < len(means) and not means[trials].reached:
            for later in means[trials:]:
                later.stood = means[trials - 1].value * later.trials
        keep = max(0.0, 1.0 - trials / REQUEST_TRIALS)
        own.excess = own.excess * keep + accepted - expected
        own.trials = own.trials * keep + trials
        self._everyone.learn(accepted, trials, memory)

    def overhear(self, request: int, kind: Kind, stood: int, trials: int) -> None:
        """Learn from tokens that nobody drafted: of so many that might have been, so many came. First positions all."""
        own = self._requests[request][kind]
        mean = self._means(kind)[0]
        part = min(1.0, REQUEST_TRIALS / trials)  # a long rest counts for no more than is remembered
        own.excess += part * (stood - trials * mean.value)
        own.trials += part * trials
        mean.learn(part * stood, part * trials, KIND_TRIALS)

    def forget(self, request: int) -> None:
        """The request has left."""
        self._requests.pop(request, None)

    def _means(self, kind: Kind) -> list[Mean]:
        """By position; one that nobody has reached is as the last that somebody has, and the first as everyone's."""
        means = self._kinds.get(kind)
        if means is None:
            first = self._everyone.value
            means = self._kinds[kind] = [Mean(first * PRIOR_TRIALS, PRIOR_TRIALS) for _ in range(max(1, self.depth))]
        return means
