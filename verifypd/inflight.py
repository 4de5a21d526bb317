"""What the host knows of a request while the device is ahead of it: bounds on its length, and how far its draft lags.

The engine and the simulator keep the same books with it. Knows counts; nothing of tokens, tensors or plans.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

CAUGHT_UP = 2  # tokens: the verdict's next one and, if all drafts stood, the last of them


class Draft(NamedTuple):  # a tuple, because one is made for every request in every step
    """A draft on its way: first it waits for the verify lane, then its verdict is out."""

    length: int  # tokens
    drafter: str | None = None
    temperature: float = 1.0  # of the drafter, relative to the request's own


NO_DRAFT = Draft(0)


class Progress:
    """The books of one request. Each method is an event; what is true in between, the properties say.

    `draft_lag` allows for every draft in flight that it might stand. A verdict then says how many did, and the rest is
    taken off again; but not where the draft's cache has caught up since, for the device started from the true length.
    """

    __slots__ = ("_drafts_out", "_settled", "computed", "confirmed", "draft", "draft_lag", "inflight", "max_length")

    def __init__(self, confirmed: int, max_length: int) -> None:
        self.confirmed = confirmed  # tokens whose verdicts were absorbed, the prompt included
        self.max_length = max_length  # prompt + output tokens at which it ends for length
        self.computed = 0  # tokens in the verifier's cache, while prefilling
        self.draft = NO_DRAFT  # waits for the verify lane
        self.draft_lag = 0  # upper bound of confirmed tokens missing in the draft's cache
        self.inflight: deque[Draft] = deque()  # of each launched span whose verdict is still out, oldest first
        self._drafts_out = 0  # Σ of their lengths
        self._settled = 0  # of the oldest in flight: how many `draft_lag` allows nothing for

    @property
    def pending(self) -> int:
        """Draft tokens launched and waiting for the verify lane."""
        return self.draft.length

    @property
    def length_bound(self) -> int:
        """Upper bound of the length on the device: every draft in flight might stand."""
        return self.confirmed + len(self.inflight) + self._drafts_out

    @property
    def length_floor(self) -> int:
        """Lower bound of the length on the device: each verdict in flight emits one token at least."""
        return self.confirmed + len(self.inflight)

    @property
    def lag_slack(self) -> int:
        """Tokens by which `draft_lag` may be too high, if no draft in flight stands."""
        return sum(draft.length for draft in list(self.inflight)[self._settled :])

    def admitted(self, computed: int, draft_lag: int) -> None:
        """It has a slot; so many tokens are in the verifier's cache, and so many are missing in the draft's."""
        self.computed, self.draft_lag = computed, draft_lag

    def caught_up(self, rows: int) -> None:
        """The draft's cache was fed `rows` tokens, counted back from the length that the device knows."""
        if rows:
            self.draft_lag -= rows
            self._settled = len(self.inflight)

    def followed(self, rows: int) -> None:
        """The draft's cache was fed `rows` tokens of the prompt, at positions that the host knows."""
        self.draft_lag -= rows

    def begun(self, draft_lag: int) -> None:
        """The draft's cache begins anew, at a length that the device knows."""
        self.draft_lag, self._settled = draft_lag, len(self.inflight)

    def drafted(self, draft: Draft) -> None:
        """A draft was launched; it waits for the verify lane."""
        self.draft = draft

    def dropped(self) -> None:
        """The draft that waited will not be verified."""
        self.draft = NO_DRAFT

    def read(self, rows: int) -> None:
        """A pass over `rows` tokens of the prompt was launched."""
        self.computed += rows

    def launched(self, drafts: int, kept: bool) -> None:
        """A pass was launched that emits tokens. drafts: of the draft that waited, all or none.

        kept: the draft's cache holds the drafted tokens. It then lacks no more than after any draft, however long ago
        that was written: nothing moves a request between its draft and its verdict.
        """
        draft = self.draft if drafts else NO_DRAFT
        assert draft.length == drafts, "drafts are verified as they stand"
        self.inflight.append(draft)
        self._drafts_out += drafts
        self.draft = NO_DRAFT
        if kept:
            self.begun(CAUGHT_UP)
        else:
            self.draft_lag += drafts + 1

    def absorbed(self, emitted: int) -> Draft:
        """The oldest verdict in flight arrived with so many tokens; 0 for one who had ended. Returns its draft."""
        draft = self.inflight.popleft()
        self.confirmed += emitted
        self._drafts_out -= draft.length
        if self._settled:
            self._settled -= 1
        else:
            self.draft_lag -= max(0, draft.length + 1 - emitted)
        return draft
