"""Calls whose output format is compiled beside the engine's loop. Knows messages and futures; compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verifypd.request import Request
from verifypd.server.messages import GrammarSpec, Submit

Compile = Callable[[GrammarSpec, int], "Future[Any]"]  # of a sequence of sampling.grammar.Grammar


@dataclass(frozen=True, slots=True)
class Joiner:
    """A call that is let in, and the matchers its requests wait for."""

    message: Submit
    requests: list[Request]
    grammars: Future[Any]


class Joining:
    """All of them, in the order they came."""

    def __init__(self, compile: Compile, ring: Callable[[], None]) -> None:
        """`ring` is called, from any thread, when one is ready."""
        self._compile = compile
        self._ring = ring
        self._waiting: dict[tuple[int, int], Joiner] = {}

    @property
    def requests(self) -> int:
        """Requests that wait here."""
        return sum(len(joiner.requests) for joiner in self._waiting.values())

    def add(self, message: Submit, requests: list[Request]) -> None:
        """Start compiling; returns at once."""
        assert message.grammar is not None
        grammars = self._compile(message.grammar, len(requests))
        self._waiting[message.worker, message.call] = Joiner(message, requests, grammars)
        grammars.add_done_callback(lambda _: self._ring())

    def ready(self) -> list[Joiner]:
        """Take out those that are compiled, or could not be."""
        done = [key for key, joiner in self._waiting.items() if joiner.grammars.done()]
        return [self._waiting.pop(key) for key in done]

    def drop(self, worker: int, call: int | None = None) -> list[Joiner]:
        """Take out a call, or all calls of a worker: nobody waits for them."""
        gone = [key for key in self._waiting if key[0] == worker and call in (None, key[1])]
        dropped = [self._waiting.pop(key) for key in gone]
        for joiner in dropped:
            joiner.grammars.cancel()
            joiner.grammars.add_done_callback(_close)
        return dropped


def _close(grammars: Future[Any]) -> None:
    """Nobody takes what was compiled."""
    if not grammars.cancelled() and grammars.exception() is None:
        for grammar in grammars.result():
            grammar.close()
