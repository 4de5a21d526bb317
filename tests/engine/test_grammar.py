"""Constrained output through the whole engine: what is allowed, exactly, with drafts that know nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.engine.pairs import preempt_every
from tests.models.checkpoints import reference_logits
from verifypd import LLM, SamplingParams
from verifypd.sampling.grammar import GrammarState

PROMPT = [*range(3, 11), *range(3, 11)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_draft": 3, "max_model_len": 128, "kv_memory": "32MB"}
OPTIONS |= {"controller": "fixed", "measure_costs": False}
WORDS = 12  # 384 tokens, 32 a word


class Steps:
    """After token t only t + 1 … t + 4 may follow, in a ring of eight; the first may be any of them."""

    ring = tuple(range(3, 11))
    error = None

    def __init__(self) -> None:
        self.read: list[int] = []

    def allowed(self) -> list[int]:
        if not self.read:
            return list(self.ring)
        place = self.ring.index(self.read[-1])
        return [self.ring[(place + step) % 8] for step in range(1, 5)]

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token not in self.allowed():
                return count
            self.read.append(token)
        return len(tokens)

    def ask(self, output: Sequence[int], drafts: Sequence[int]) -> None:
        self.advance(output)
        self.drafts = list(drafts)

    def fill(self, rows: np.ndarray[Any, Any]) -> None:
        stands = len(self.read)
        rows[:] = 0
        for row, token in zip(rows, [*self.drafts, None], strict=False):
            for each in self.allowed():
                row[each // 32] |= 1 << (each % 32)
            if token is None or not self.advance([token]):
                break
        del self.read[stands:]

    def close(self) -> None:
        pass


def constrained(llm: LLM, count: int, **params: Any) -> list[list[int]]:
    jobs = llm._submit([PROMPT] * count, [SamplingParams(**params)] * count)
    for job in jobs:
        job.texts[0].request.grammar = GrammarState(Steps(), len(PROMPT))
    while not all(job.finished for job in jobs):
        llm._step()
    return [job.output().outputs[0].token_ids for job in jobs]


def fits(tokens: Sequence[int]) -> bool:
    return Steps().advance(tokens) == len(tokens)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("arch", ["unified", "pdv", "pd"])
def test_greedy_and_seeded_texts_do_not_depend_on_drafts(pair: tuple[Path, Path], arch: str, late: bool) -> None:
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "temperature": 0.6, "top_p": 0.9}]
    with LLM(str(pair[0]), draft=None, arch="plain", **OPTIONS) as llm:
        expected = [constrained(llm, 1, max_tokens=30, ignore_eos=True, **each) for each in params]
    for draft in (str(pair[1]), "ngram"):
        with LLM(str(pair[0]), draft=draft, arch=arch, late_tickets=late, **OPTIONS) as llm:
            preempt_every(llm, 7)
            found = [constrained(llm, 3, max_tokens=30, ignore_eos=True, **each) for each in params]
            assert found == [each * 3 for each in expected]
            assert all(fits(tokens) for each in found for tokens in each)
            assert llm.engine.stats.drafted and llm.engine.stats.accepted
            assert not llm.engine.verify.grammars
            llm.engine.check()


def test_sampling_follows_the_constrained_law(pair: tuple[Path, Path]) -> None:
    """Rejection sampling with drafts, against the verifier's own law over what is allowed."""
    with LLM(str(pair[0]), draft=str(pair[1]), seed=11, batch_size=400, prefill_chunk=4096, **OPTIONS) as llm:
        found = constrained(llm, 1600, max_tokens=3, ignore_eos=True, acceptance="rejection", temperature=0.8)
        assert llm.engine.stats.accepted
    assert all(fits(tokens) for tokens in found)
    for position in range(3):
        prefix, count = Counter(tuple(text[:position]) for text in found).most_common(1)[0]
        grammar = Steps()
        grammar.advance(prefix)
        allowed = grammar.allowed()
        logits = reference_logits(pair[0], [*PROMPT, *prefix])[-1, allowed].double() / 0.8
        expected = logits.softmax(-1).numpy() * count
        drawn = Counter(text[position] for text in found if tuple(text[:position]) == prefix)
        seen = np.array([drawn[token] for token in allowed])
        assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-5, (position, seen, expected)
