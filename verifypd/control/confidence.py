"""What a drafter's own confidence says of its tokens: calibrated online, and kept as samples of how drafts go.

Sees peaks (the largest probability of a distribution) and verdicts, never a token. No torch, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from verifypd.batch import Gate, logit
from verifypd.control.allocation import Columns
from verifypd.control.observe import Observation
from verifypd.control.survival import Kind, Reliability

SAMPLES = 96  # drafts of a kind that are remembered
ENOUGH = 16  # drafts, and tokens judged, from which a kind is known
STALE = 8  # new drafts after which the samples are worked out anew
RATE, LAST_RATE = 0.3, 0.02  # of calibration: at first, and in the end
STEEPEST = 2.0  # of the slope


class Calibration:
    """The chance that a token stands, by its peak: odds = e^shift · odds(peak)^slope, fitted as verdicts come."""

    def __init__(self) -> None:
        self.shift, self.slope = 0.0, 1.0
        self.trials = 0

    def learn(self, peak: float, stood: bool) -> None:
        """One token was judged."""
        self.trials += 1
        x = logit(peak)
        miss = stood - self.chance(peak)
        rate = max(LAST_RATE, RATE / math.sqrt(self.trials))
        self.shift = min(4.0, max(-4.0, self.shift + rate * miss))
        self.slope = min(STEEPEST, max(0.0, self.slope + rate * miss * x / (1.0 + x * x)))

    def chance(self, peak: float) -> float:
        """That a token with this peak stands."""
        return Gate(0.0, 0.0, shift=self.shift, slope=self.slope).chance(peak)


class _Kind:
    """What is known of one kind of request."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.drafts: deque[tuple[float, ...]] = deque(maxlen=SAMPLES)  # peaks along each
        self.fresh = 0  # drafts since the samples were worked out
        self.samples: list[list[float]] = []  # survivals along each draft, as long as the longest there may be
        self.columns: Columns | None = None
        self.typical = 0.5  # mean chance of a token behind the first

    @property
    def known(self) -> bool:
        """Whether there is enough to go by."""
        return len(self.drafts) >= ENOUGH and self.calibration.trials >= ENOUGH


class Confidence:
    """Calibrations and samples by kind of request."""

    def __init__(self, depth: int, reliability: Reliability) -> None:
        self.depth = depth
        self.reliability = reliability  # told of every token that is judged
        self._kinds: dict[Kind, _Kind] = {}

    def known(self, kind: Kind) -> bool:
        """Whether drafts of this kind may be cut by confidence, and foretold so."""
        found = self._kinds.get(kind)
        return found is not None and found.known

    def calibration(self, kind: Kind) -> Calibration:
        """How peaks of this kind are to be read."""
        return self._kinds.setdefault(kind, _Kind()).calibration

    def typical(self, kind: Kind) -> float:
        """Mean chance of a token behind the first of a draft, given that those before it stand."""
        self._refresh(found := self._kinds.setdefault(kind, _Kind()))
        return found.typical

    def observe(self, kind: Kind, seen: Observation) -> float | None:
        """Learn from a draft whose peaks are known. Returns the chance of the first token that was withheld; None where
        none was, or where it would not have mattered."""
        found = self._kinds.setdefault(kind, _Kind())
        found.drafts.append(seen.peaks)
        found.fresh += 1
        for position in range(min(seen.drafted, seen.accepted + 1)):
            peak, stood = seen.peaks[position], position < seen.accepted
            self.reliability.add(found.calibration.chance(peak), stood)
            found.calibration.learn(peak, stood)
        if seen.accepted < seen.drafted or len(seen.peaks) <= seen.drafted:
            return None
        return found.calibration.chance(seen.peaks[seen.drafted])

    def columns(self, requests: Mapping[Kind, int], deepest: int, free: int) -> Columns | None:
        """How drafts of so many requests of each kind would go, as far as `deepest`, the first `free` tokens of each
        without a row's cost; None where a kind is not known."""
        if not requests or not all(map(self.known, requests)):
            return None
        kinds = [self._kinds[kind] for kind in requests]
        for kind in kinds:
            self._refresh(kind)
        total = sum(requests.values())
        if len(kinds) == 1 and kinds[0].columns is not None:
            return kinds[0].columns.standing_for(total, deepest, free)
        samples = [
            kind.samples[-1 - i % len(kind.samples)]
            for kind, count in zip(kinds, requests.values(), strict=True)
            for i in range(max(1, round(SAMPLES * count / total)))
        ]
        return Columns(samples).standing_for(total, deepest, free)

    def _refresh(self, kind: _Kind) -> None:
        """Work the samples out, once enough has changed. Where a draft was not made any longer, it is taken to go on
        as others have."""
        if kind.columns is not None and kind.fresh < STALE:
            return
        kind.fresh = 0
        chance = kind.calibration.chance
        drafts = [[chance(peak) for peak in peaks] for peaks in kind.drafts]
        later = [value for chances in drafts for value in chances[1:]]
        usual = later if len(later) >= ENOUGH else later + [value for chances in drafts for value in chances[:1]]
        kind.typical = sum(usual) / len(usual) if usual else 0.5
        kind.samples = []
        for i, chances in enumerate(drafts):
            alive, survivals = 1.0, []
            for position in range(self.depth):
                known = position < len(chances)
                alive *= chances[position] if known else usual[(31 * i + 17 * position) % len(usual)]
                survivals.append(alive)
            kind.samples.append(survivals)
        kind.columns = Columns(kind.samples)
