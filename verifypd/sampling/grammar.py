"""Masks for constrained output, span by span. Knows matchers by their protocol; nothing of the languages of grammars.

The mask of row i of a span allows what may follow the confirmed tokens and the span's first i drafts. A draft that does
not fit ends the walk: it has probability zero and falls, so the rows after it are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Grammar(Protocol):
    """The state of one constrained output. Masks are asked for first and taken later: others are made meanwhile."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on, when it cannot; then it allows nothing."""
        ...

    def ask(self, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Begin the masks of a span: `output` was confirmed since the last one, `drafts` may follow it."""
        ...

    def fill(self, rows: np.ndarray[Any, Any]) -> None:
        """Write the masks asked for, int32 [>= drafts + 1, words]: token t may come next where bit t % 32 of word
        t // 32 is set. Rows after a draft that does not fit allow nothing: either it falls and they are never looked
        at, or the grammar gave up on it and the request must not go on.
        """
        ...

    def close(self) -> None:
        """The output has ended; nothing is asked any more."""
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

    def ask(self, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Begin the masks of a span. `output` holds the confirmed tokens from `position` on."""
        self.grammar.ask(output, drafts)
        self.taken += len(output)

    def fill(self, rows: np.ndarray[Any, Any]) -> None:
        """Write the masks asked for."""
        self.grammar.fill(rows)

    def close(self) -> None:
        """The request has ended."""
        self.grammar.close()
