"""Constrained output through llguidance: compiles JSON schemas, regular expressions and grammars into matchers.

Knows llguidance and bit masks; nothing of slots or of how masks are applied.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from verifypd.errors import RequestError
from verifypd.server.messages import GrammarSpec

MOST_BYTES = 32 << 10  # of a constraint: larger ones take the engine's time, or the compiler's stack
MOST_RULES = 500  # of a Lark grammar
STACK = 64 << 20  # bytes, of the thread that compiles


@lru_cache(maxsize=256)
def source(spec: GrammarSpec) -> str:
    """llguidance's own form of a constraint; ValueError when it is none."""
    if spec.kind == "json":
        return LLMatcher.grammar_from_json_schema(spec.text)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in json.loads(spec.text)))
    return LLMatcher.grammar_from_lark(spec.text)


@lru_cache(maxsize=256)
def check(spec: GrammarSpec) -> None:
    """Raise ValueError, in one line, for a constraint that cannot be compiled, or not in a reasonable time."""
    if len(spec.text.encode()) > MOST_BYTES:
        raise ValueError(f"it has {len(spec.text.encode())} bytes; at most {MOST_BYTES} are compiled")
    if spec.kind == "lark" and spec.text.count(":") > MOST_RULES:
        raise ValueError(f"it has more than {MOST_RULES} rules")
    failed, messages = LLMatcher.validate_grammar_with_warnings(source(spec), None)
    if failed:
        raise ValueError(" ".join(" ".join(messages).split())[:300])


class GrammarCompiler:
    """Makes matchers for one tokenizer in a thread of its own, which leaves the interpreter to others meanwhile."""

    def __init__(self, folder: str, vocab: int, eos_ids: Sequence[int]) -> None:
        text = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
        self.vocab = vocab
        self.eos_ids = list(eos_ids)
        self._tokenizer = LLTokenizer(text, n_vocab=vocab, eos_token=self.eos_ids)
        self._fresh = lru_cache(maxsize=64)(self._compile)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        usual = threading.stack_size(STACK)  # compiling recurses along the constraint
        self._thread.submit(int).result()  # starts the thread
        threading.stack_size(usual)

    def start(self, spec: GrammarSpec, count: int) -> Future[Sequence[Matcher]]:
        """As many matchers, once they are compiled; RequestError when the constraint cannot be."""
        return self._thread.submit(self._matchers, spec, count)

    def _matchers(self, spec: GrammarSpec, count: int) -> Sequence[Matcher]:
        fresh = self._fresh(spec)
        return [Matcher(fresh, self.vocab, self.eos_ids) for _ in range(count)]

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        try:
            fresh = LLMatcher(self._tokenizer, source(spec), log_level=0)
        except ValueError as error:
            raise RequestError(" ".join(str(error).split())[:300], param="response_format") from None
        if fresh.is_error():
            raise RequestError(" ".join(fresh.get_error().split())[:300], param="response_format")
        return fresh


class Matcher:
    """A sampling.grammar.Grammar over llguidance.

    llguidance gives up on a text that takes too much work, and never recovers. Where that happens on a draft that is
    taken back again, the matcher is made anew and reads what stands once more.
    """

    def __init__(self, fresh: LLMatcher, vocab: int, eos_ids: Sequence[int]) -> None:
        """`fresh` has read nothing; it stays so."""
        self._fresh = fresh
        self._inner = fresh.deep_copy()
        self._vocab = vocab
        self._eos = frozenset(eos_ids)
        self._read: list[int] = []
        self._buffer = llguidance.numpy.allocate_token_bitmask(1, vocab)
        self.error: str | None = None

    def advance(self, tokens: Sequence[int]) -> int:
        """Take tokens as far as they fit; returns how many did."""
        taken: int = self._inner.try_consume_tokens(list(tokens))
        self._read += tokens[:taken]
        return taken

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if count:
            del self._read[-count:]
        if self._broken():
            self._inner = self._fresh.deep_copy()
            self._inner.try_consume_tokens(self._read)
        elif count:
            self._inner.rollback(count)

    def fill(self, row: np.ndarray) -> None:
        """Write which tokens may come next into int32 [words]: only the end of a whole text, nothing after an error."""
        if self._inner.is_stopped():
            row[:] = 0
            for token in () if self._broken() else self._eos:
                row[token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))
            return
        llguidance.numpy.fill_next_token_bitmask(self._inner, self._buffer, 0)
        if self._broken():
            row[:] = 0
            return
        row[: self._buffer.shape[1]] = self._buffer[0]

    def _broken(self) -> bool:
        """Whether llguidance has given up; keeps the reason."""
        broken: bool = self._inner.is_error()
        if broken:
            self.error = " ".join(self._inner.get_error().partition("<state>")[0].split())[:300]
        return broken
