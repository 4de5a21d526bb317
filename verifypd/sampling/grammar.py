"""Masks for constrained output, span by span. Knows matchers by their protocol; nothing of the languages of grammars.

The mask of row i of a span allows what may follow the confirmed tokens and the span's first i drafts. A draft that does
not fit ends the walk: it has probability zero and falls, so the rows after it are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Grammar(Protocol):
    """The state of one constrained output."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on, when it cannot; then it allows nothing."""
        ...

    def advance(self, tokens: Sequence[int]) -> int:
        """Take tokens as far as they fit; returns how many did."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def fill(self, row: np.ndarray[Any, Any]) -> None:
        """Write which tokens may come next: bit t % 32 of word t // 32, int32 [words]."""
        ...


class GrammarState:
    """The grammar of one request and how far it has read; stays with the request when it is preempted."""

    def __init__(self, grammar: Grammar, start: int) -> None:
        """`start` is the absolute position of the first output token."""
        self.grammar = grammar
        self.start = start
        self.taken = 0  # output tokens

    @property
    def position(self) -> int:
        """Absolute position of the first token it has not read."""
        return self.start + self.taken

    @property
    def error(self) -> str | None:
        """Why the output cannot be followed any further, when it cannot."""
        return self.grammar.error

    def fill(self, output: Sequence[int], drafts: Sequence[int], rows: np.ndarray[Any, Any]) -> None:
        """Write the masks of a span into rows int32 [>= drafts + 1, words].

        `output` holds the confirmed tokens from `position` on. Rows after a draft that does not fit allow nothing:
        either it falls and they are never looked at, or the grammar gave up on it and the request must not go on.
        """
        self.grammar.advance(output)
        self.taken += len(output)
        walked = 0
        self.grammar.fill(rows[0])
        for place, token in enumerate(drafts):
            if not self.grammar.advance([token]):
                rows[place + 1 :] = 0
                break
            walked += 1
            self.grammar.fill(rows[place + 1])
        self.grammar.rollback(walked)
