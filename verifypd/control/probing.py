"""When a draft of one token is tried although nothing is drafted: a purse of time for each drafter. Knows seconds."""

from __future__ import annotations

from dataclasses import dataclass

PATIENT = 16  # probes in a row that changed nothing, after which they come half as often; then half of that, …
RAREST = 0.125  # … down to this part of their share
BANK = 32.0  # probes that may be earned back at once
FULL = 0.75  # of the batch: from there on, or while requests wait for a slot, others want the time of a probe …
SCARCE = 0.25  # … and this part of its share is saved up for one
REST = 8  # steps for which nobody looks into the purse of a drafter that had nothing to propose


@dataclass(slots=True)
class Purse:
    """Time saved up for probes of one drafter. Probes that stand earn theirs back, within limits."""

    credit: float = 1.0  # s that may be spent; at first enough for a few
    asked: float = 0.0  # s, what the next probe will cost, as far as is known
    refunds: float = 1.0  # s that probes which stand may earn back, so that a change is soon believed
    price: float = 0.0  # s of the last probe, for each request in it
    fruitless: int = 0  # probes in a row that changed nothing
    turn: int = 0  # number of its last probe among all: who was tried longest ago goes first
    rest: int = 0  # steps until it is looked into again

    @property
    def full(self) -> bool:
        """Whether it may pay for a probe now."""
        return not self.rest and self.credit >= self.asked

    def save(self, seconds: float) -> None:
        """A step without drafts has passed: this much of its time may go to probes, less where they change nothing."""
        self.rest = max(0, self.rest - 1)
        earned = seconds * max(RAREST, 0.5 ** (self.fruitless // PATIENT))
        self.credit += earned
        self.refunds += earned

    def pay(self, price: float, requests: int, worth: float) -> bool:
        """Take the price of a probe of so many requests, if there is enough; it is saved up for if not.

        worth: 0 to 1; where little can be won, little is kept ready for it.
        """
        self.asked = price
        self.credit, self.refunds = min(self.credit, 2.0 * price), min(self.refunds, BANK * price * worth)
        if self.credit < price:
            return False
        self.credit -= price
        self.price = price / requests
        self.fruitless += 1
        return True

    def stood(self) -> None:
        """A probe that stands has earned its keep: the next may follow at once, and a change is soon believed."""
        earned = min(self.price, self.refunds)
        self.credit += earned
        self.refunds -= earned
