"""What a plan hands to the lanes: slots and upper bounds, never token ids or lengths. Pure data.

Spans and verdicts are tuples: some are made for every request in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class DraftSpan(NamedTuple):
    """Draft work of one slot: feed the model the last `lag` confirmed tokens (or the first `rows` of them), then draft.

    The span starts at device length − lag, or where the host says. `drafts` > 0 needs rows == lag: the model must have
    caught up to draft.
    """

    slot: int
    lag: int
    rows: int
    drafts: int
    context: int  # upper bound of the context at the end, tokens
    temperature: float = 1.0  # of the drafter, relative to the request's own
    drafter: str | None = None  # who drafts, where it is not the batch's
    start: int | None = None  # absolute position of the first row; None: device length − lag


class VerifySpan(NamedTuple):
    """Verifier rows of one slot: a prefill chunk (start given) or the last token and its drafts (start None)."""

    slot: int
    rows: int
    drafts: int  # rows − 1 for a decode span, 0 for a chunk
    start: int | None  # absolute position of a chunk's first row; None: device length − 1
    emits: bool  # whether a token follows from the last row
    context: int  # upper bound of the context at the end, tokens
    drafter: str | None = None  # which drafter proposed
    prompt_logprobs: int = -1  # most likely tokens wanted for every row of a chunk; -1: none, not even its own


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One launch of the decode lane: spans of one drafter, or each of its own."""

    drafter: str
    spans: tuple[DraftSpan, ...]


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """One launch of the verify lane: a ragged pass that may carry prefill chunks."""

    spans: tuple[VerifySpan, ...]

    @property
    def rows(self) -> int:
        """Tokens in the pass."""
        return sum(span.rows for span in self.spans)


class Verdict(NamedTuple):
    """What a verify span came to: how many drafted tokens stand, and every token it emits."""

    slot: int
    accepted: int
    drafted: int  # tokens the drafter really proposed, at most the span's drafts
    tokens: tuple[int, ...]
    finish: str | None  # "stop", "length", "error" or None
    logprobs: tuple[
        tuple[float, int, tuple[tuple[int, float], ...]], ...
    ] = ()  # per token: own, rank, top (id, logprob)
    drafts: tuple[int, ...] = ()  # what was proposed, where somebody asks for it
