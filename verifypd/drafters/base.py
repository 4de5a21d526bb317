"""What the engine asks of a drafter. Knows slots and requests; nothing of scheduling or of other drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verifypd.attention.base import Reader
from verifypd.batch import DraftBatch, DraftSpan
from verifypd.request import Request


class Drafter(Protocol):
    """Proposes tokens for slots.

    Launching is asynchronous: `launch` reads token ids and lengths from the slots' device tensors and writes `drafts`,
    `draft_lens` and, unless `point_mass`, the distribution each token was drawn from. What may depend on a drawn token
    is decided there and nowhere else; `expected` sees confirmed tokens only.
    """

    name: str
    has_cache: bool  # keeps KV of its own, which may lag behind the verifier's
    point_mass: bool  # proposes with certainty: q is one at the token and needs no tensor
    reader: Reader | None  # of the verifier's hidden states, for a drafter that needs them
    keeps_drafts: bool  # what its cache holds of a drafted token is as good as of a confirmed one
    routine: int  # tokens its cache lacks after a draft and its verdict, at most; 0 where it has none
    one_pass: bool  # proposes all tokens of a draft in one pass, whatever their number; else it loops over them
    follows: bool  # reads each prompt chunk right behind the verifier, at a small part of its cost

    def launch(self, batch: DraftBatch) -> None:
        """Write the drafts of these spans."""
        ...

    def follow(self, spans: Sequence[DraftSpan]) -> None:
        """Read prompt chunks whose verifier pass has been launched."""
        ...

    def admitted(self, request: Request) -> None:
        """The request has a slot; its prompt will be read."""
        ...

    def expected(self, request: Request) -> int:
        """How many tokens it expects to be able to propose for a request next, by what it was told last; 0: not worth
        asking. Changes nothing."""
        ...

    def observe(self, requests: Sequence[Request]) -> None:
        """Before a plan that may draft for these: take in what was confirmed of them since the last, and other news."""
        ...

    def forget(self, request: Request) -> None:
        """The request has left."""
        ...

    def close(self) -> None:
        """No more drafts are wanted."""
        ...
