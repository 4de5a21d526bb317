"""What a plan hands to the lanes: slots and upper bounds, never token ids or lengths. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass

SUREST = 1e-4  # how close to 0 and 1 a peak is taken


@dataclass(frozen=True, slots=True)
class Gate:
    """Which tokens of a draft are worth a row of the verifier, by how sure the drafter was.

    A token's peak is the largest probability of the distribution it comes from, whatever was drawn: a choice by it
    cannot bias what is written. The chance that a token stands is sigmoid(shift + slope · logit(peak)), that a draft
    stands as far as it is the product.
    """

    floor: float  # chance up to which a token is withheld from the verifier, and all after it
    enough: float  # chance up to which no token is drafted that would need another row
    free: int = 0  # tokens whose rows cost nothing: none of them is withheld …
    worth: float = 0.0  # … and the next of them is drafted above this chance
    shift: float = 0.0
    slope: float = 1.0

    def chance(self, peak: float) -> float:
        """That a token with this peak stands."""
        return 1.0 / (1.0 + math.exp(-self.shift - self.slope * logit(peak)))


def logit(peak: float) -> float:
    """Logarithm of the odds, kept finite."""
    peak = min(1.0 - SUREST, max(SUREST, peak))
    return math.log(peak / (1.0 - peak))


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Draft work of one slot: feed the model the last `lag` confirmed tokens (or the first `rows` of them), then draft.

    The span starts at device length − lag. `drafts` > 0 needs rows == lag: the model must have caught up to draft.
    """

    slot: int
    lag: int
    rows: int
    drafts: int
    context: int  # upper bound of the context at the end, tokens
    temperature: float = 1.0  # of the drafter, relative to the request's own
    drafter: str | None = None  # who drafts, where it is not the batch's
    gate: Gate | None = None  # None: all of it is verified, and nobody asks how sure the drafter was


@dataclass(frozen=True, slots=True)
class VerifySpan:
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
class Drafted:
    """What came of gated spans, by slot: known as soon as they are launched, so only where a launch is the work."""

    steps: int  # of the loop
    kept: dict[int, int]  # tokens that are worth a row
    peaks: dict[int, tuple[float, ...]]  # of every token that was drafted


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """One launch of the verify lane: a ragged pass that may carry prefill chunks."""

    spans: tuple[VerifySpan, ...]

    @property
    def rows(self) -> int:
        """Tokens in the pass."""
        return sum(span.rows for span in self.spans)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verify span came to: how many drafted tokens stand, and every token it emits."""

    slot: int
    accepted: int
    drafted: int  # tokens the drafter really proposed, at most the span's drafts
    tokens: tuple[int, ...]
    finish: str | None  # "stop", "length", "error" or None
    logprobs: tuple[
        tuple[float, int, tuple[tuple[int, float], ...]], ...
    ] = ()  # per token: own, rank, top (id, logprob)
