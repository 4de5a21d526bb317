"""When a draft of one token is tried although nothing is drafted, and for whom: a purse of time.

Knows seconds and who is cheapest to try. Whether to draft, and what a probe's verdict means, is the controller's.
Look-ups beside a model are never probed: the text tells how they would have fared.
"""

from __future__ import annotations

from dataclasses import dataclass

from verifypd.control.allocation import Allocation, Load
from verifypd.control.cost import CostModel
from verifypd.control.snapshot import RequestView, Snapshot

PATIENT = 16  # probes in a row that changed nothing, after which they come half as often; then half of that, …
RAREST = 0.125  # … down to this part of their share
BANK = 32.0  # probes that may be earned back at once
FULL = 0.75  # of the batch: from there on, or while requests wait for a slot, others want the time of a probe …
SCARCE = 0.25  # … and this part of its share is saved up for one
PROBED = 16  # requests in one probe at most
HOPED = 0.9  # chance that a draft token stands, at best: what probes are held against
REST, LONG_REST = 8, 64  # steps for which nobody looks into the purse after there was nobody to probe; the second where
# others want the time


@dataclass(slots=True)
class Purse:
    """Time saved up for probes. Those that stand earn theirs back, within limits."""

    credit: float = 1.0  # s that may be spent; at first enough for a few
    asked: float = 0.0  # s, what the next probe will cost, as far as is known
    refunds: float = 1.0  # s that probes which stand may earn back, so that a change is soon believed
    price: float = 0.0  # s of the last probe, for each request in it
    fruitless: int = 0  # probes in a row that changed nothing
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


class Prober:
    """Spends a share of the time on probes; the requests that are cheapest to try go first."""

    def __init__(self, cost: CostModel, max_draft: int, share: float) -> None:
        self.cost = cost
        self.max_draft = max_draft
        self.share = share  # of the time, at most
        self.worth = 1.0  # of a probe: what would be gained if nearly all drafts stood, at most 1
        self.probes = 0
        self.seconds = 0.0  # spent, foretold
        self.purse = Purse()
        self._full = False  # whether others want the time that a probe would take

    @property
    def ready(self) -> bool:
        """Whether a probe could be paid for."""
        return bool(self.share) and self.purse.full

    def meet(self, snapshot: Snapshot) -> None:
        """See whether anyone else wants the time."""
        running = len(snapshot.requests)  # one alone takes time from nobody
        self._full = snapshot.waiting > 0 or running >= max(2.0, FULL * snapshot.batch_size)
        if not self._full:
            self.purse.rest = min(self.purse.rest, REST)

    def save_up(self, seconds: float) -> None:
        """A step without drafts has passed: a share of its time may go to probes."""
        self.purse.save(seconds * self.share * self.worth * (SCARCE if self._full else 1.0))

    def stood(self) -> None:
        """A probe stands."""
        self.purse.stood()

    def bear_fruit(self) -> None:
        """Drafting begins: the probes that led to it were not in vain."""
        self.purse.fruitless = 0

    def probe(self, candidates: list[tuple[RequestView, int]], load: Load, snapshot: Snapshot) -> dict[int, int]:
        """A draft of one token for a few, once enough time has been saved up for it."""
        views = [view for view, _ in candidates if view.proposer is None]
        if not views:
            self.purse.rest = LONG_REST if self._full else REST
            return {}
        slots, price = self._few(views, load, snapshot)
        if not self.share or not self.purse.pay(price, len(slots), self.worth):
            return {}
        self.probes += 1
        self.seconds += price
        return slots

    def appraise(self, candidates: list[tuple[RequestView, int]], load: Load, plain: Allocation, overlap: bool) -> None:
        """What a probe may teach is worth at most what drafts would gain if nearly all stood and no cache lagged."""
        c = self.cost.coefficients
        probed = [view for view, _ in candidates if view.proposer is None]
        n, context = len(probed), sum([view.length_bound for view in probed])
        alone, best = plain.seconds - plain.aside, 0.0
        tokens, alive = float(load.requests), 1.0
        for longest in range(1, self.max_draft + 1):
            alive *= HOPED
            tokens += n * alive
            draft = self.cost.draft_seconds(longest, 0.0, context) if context else 0.0
            rows = max(c.floor, c.row * (load.rows + n * longest)) - max(c.floor, c.row * load.rows)
            seconds = max(alone + rows, draft) if overlap else alone + rows + draft
            best = max(best, tokens / seconds)
        self.worth = max(0.05, min(1.0, best / plain.rate - 1.0)) if plain.rate else 1.0

    def _few(self, views: list[RequestView], load: Load, snapshot: Snapshot) -> tuple[dict[int, int], float]:
        """Those who are cheapest to try, and what it costs in seconds."""
        c = self.cost.coefficients
        lags = [(view.draft_lag if snapshot.drafter_has_cache else 0, view.slot) for view in views]
        lags.sort(key=lambda pair: pair[0])
        launch = c.draft_start + c.draft_step
        free, price = c.knee - load.rows, launch
        slots: dict[int, int] = {}
        for lag, slot in lags[:PROBED]:  # the launch is paid once: several together tell more for the same time
            more = c.draft_row * lag + (c.row if len(slots) >= free else 0.0)
            if slots and more > 0.5 * launch:
                break
            price += more
            slots[slot] = 1
        return slots, price
