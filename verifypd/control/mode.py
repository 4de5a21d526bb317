"""Whether anything is drafted: one mode, one function that changes it, and the time that may go to probes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from verifypd.control.tuning import PROBE_SHARE


class Mode(Enum):
    """What a step drafts."""

    PLAIN = "plain"  # nothing
    PROBING = "probing"  # one token for a few requests, to learn whether drafts would stand
    DRAFTING = "drafting"  # what pays


def next_mode(mode: Mode, gain: float, doubt: float, probe: bool) -> Mode:
    """The mode of the next step.

    gain: predicted, tokens a second over those of plain decoding. Drafting begins where it exceeds `doubt` (a standard
    error of the acceptance), and ends where it is lost.
    probe: whether a probe can be paid for.
    """
    if gain > 1.0 + (0.0 if mode is Mode.DRAFTING else doubt):
        return Mode.DRAFTING
    return Mode.PROBING if probe else Mode.PLAIN


@dataclass(slots=True)
class ProbeBudget:
    """Seconds that may go to probes: a share of the time without drafts."""

    saved: float = 0.0  # s
    probes: int = 0

    def save(self, seconds: float) -> None:
        """A step without drafts has passed."""
        self.saved += PROBE_SHARE * seconds

    def affords(self, price: float) -> bool:
        """Whether a probe of that price (s) can be paid for."""
        return self.saved >= price > 0.0

    def pay(self, price: float) -> None:
        """A probe is launched. However long nothing was drafted, no more is left than another one costs."""
        self.saved = min(self.saved, 2.0 * price) - price
        self.probes += 1
