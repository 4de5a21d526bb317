"""Constrained output through llguidance: compiles JSON schemas, regular expressions and grammars into matchers.

Knows llguidance and bit masks; nothing of slots or of how masks are applied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from verifypd.errors import RequestError
from verifypd.server.messages import GrammarSpec

MOST_BYTES = 32 << 10  # of a constraint: larger ones take the engine's time, or the compiler's stack
MOST_RULES = 500  # of a Lark grammar


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
    if spec.kind not in ("json", "regex", "choice") and spec.text.count(":") > MOST_RULES:
        raise ValueError(f"it has more than {MOST_RULES} rules")
    failed, messages = LLMatcher.validate_grammar_with_warnings(source(spec), None)
    if failed:
        raise ValueError(" ".join(" ".join(messages).split())[:300])


class GrammarCompiler:
    """Matchers for one tokenizer."""

    def __init__(self, folder: str, vocab: int, eos_ids: Sequence[int]) -> None:
        self.folder = folder
        self.vocab = vocab
        self.eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """A fresh matcher; raises RequestError when the constraint cannot be compiled."""
        if self._tokenizer is None:
            text = (Path(self.folder) / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self.vocab, eos_token=self.eos_ids)
        try:
            inner = LLMatcher(self._tokenizer, source(spec), log_level=0)
        except ValueError as error:
            raise RequestError(" ".join(str(error).split())[:300], param="response_format") from None
        if inner.is_error():
            raise RequestError(" ".join(inner.get_error().split())[:300], param="response_format")
        return Matcher(inner, self.vocab, self.eos_ids)


class Matcher:
    """A sampling.grammar.Grammar over llguidance."""

    def __init__(self, inner: LLMatcher, vocab: int, eos_ids: Sequence[int]) -> None:
        self._inner = inner
        self._vocab = vocab
        self._eos = frozenset(eos_ids)
        self._buffer = llguidance.numpy.allocate_token_bitmask(1, vocab)

    def advance(self, tokens: Sequence[int]) -> int:
        """Take tokens as far as they fit; returns how many did."""
        taken: int = self._inner.try_consume_tokens(list(tokens))
        return taken

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if count:
            self._inner.rollback(count)

    def fill(self, row: np.ndarray) -> None:
        """Write which tokens may come next into int32 [words]; a text that is complete allows its end only."""
        if self._inner.is_stopped():
            row[:] = 0
            for token in self._eos:
                row[token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))
            return
        llguidance.numpy.fill_next_token_bitmask(self._inner, self._buffer, 0)
        row[: self._buffer.shape[1]] = self._buffer[0]
