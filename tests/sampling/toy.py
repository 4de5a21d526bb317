"""Many requests with a toy verifier and a toy drafter: what a token may be depends on the token before it only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from tests.sampling.reference import probabilities, transformed
from verifypd.request import SamplingParams
from verifypd.sampling.case import Spans, Verdicts
from verifypd.sampling.sampler import propose
from verifypd.sampling.state import SamplingState
from verifypd.sampling.verify import judge

PROMPT = (1, 3, 3)
Rule = Callable[["Toy", int], Tensor]  # which requests [S] draft the token just proposed


class Toy:
    """S requests, all with the same prompt and parameters, each with its own seed."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        requests: int = 8192,
        vocab: int = 6,
        depth: int = 2,
        acceptance: str = "rejection",
        spread: float = 1.5,
        eos_ids: tuple[int, ...] = (),
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
        first_seed: int = 1000,
        max_len: int = 1000,
        drafter: Tensor | None = None,
        kernels: str = "torch",
    ) -> None:
        generator = torch.Generator().manual_seed(17)
        self.verifier = torch.randn(vocab, vocab, generator=generator) * spread
        far = torch.randn(vocab, vocab, generator=generator) * spread
        self.drafter = far if drafter is None else drafter
        self.params, self.vocab, self.depth, self.requests = params, vocab, depth, requests
        self.eos_ids, self.bad_words_ids = eos_ids, bad_words_ids
        self.state = SamplingState(requests, vocab, max(depth, 1), kernels=kernels)
        self.state.assign(
            0,
            params,
            seed=0,
            prompt_len=len(PROMPT),
            max_len=max_len,
            eos_ids=eos_ids,
            bad_words_ids=bad_words_ids,
            acceptance=acceptance,
        )
        self._clone()
        self.state.seed.copy_(torch.arange(requests) + first_seed)
        self.tokens = torch.zeros(requests, 64, dtype=torch.int64)
        self.tokens[:, : len(PROMPT)] = torch.tensor(PROMPT)
        self.lengths = torch.full((requests,), len(PROMPT))
        self.drafts = torch.zeros(requests, max(depth, 1), dtype=torch.int64)
        self.draft_lens = torch.zeros(requests, dtype=torch.int64)
        self.draft_q = torch.full((requests, max(depth, 1), vocab), torch.nan)
        self.slots = torch.arange(requests)
        self.slot_ids = tuple(range(requests))
        self.spans = Spans.of(self.slot_ids, (depth,) * requests, "cpu")

    def _clone(self) -> None:
        """Give every slot what slot 0 has; assigning thousands one by one would take the test's time."""
        state = self.state
        for table in (state.floats, state.integers, state.alive, state.stop_ids, state.guarded_ids, state.bad_words):
            table.copy_(table[:1].expand_as(table).clone())
        state._slots[:] = state._slots[:1] * self.requests
        state._needs.clear()

    def last(self, depth: int) -> Tensor:
        """The token [S] before draft `depth`."""
        return self.drafts[:, depth - 1] if depth else self.tokens[self.slots, self.lengths - 1]

    def draft(self, rule: Rule | None = None, scale: float | None = None) -> None:
        """Draft with the toy drafter; `rule` may leave positions out."""
        self.draft_lens.fill_(self.depth)
        scales = None if scale is None else torch.full((self.requests,), scale)
        wanted = torch.ones(self.requests, dtype=torch.bool)
        for depth in range(self.depth):
            propose(
                self.drafter[self.last(depth)],
                self.slots,
                self.slot_ids,
                depth,
                self.state,
                self.tokens,
                self.lengths,
                self.drafts,
                self.draft_q,
                temperature_scale=scales,
            )
            if rule is not None:
                wanted &= rule(self, depth)
                self.draft_lens = torch.where(wanted, self.draft_lens, self.draft_lens.clamp_max(depth))

    def draft_fixed(self, drafts: Tensor) -> None:
        """Propose given tokens [S, depth] or [depth], as an n-gram drafter would."""
        self.drafts[:, : self.depth] = drafts
        self.draft_lens.fill_(self.depth)

    def logits(self) -> Tensor:
        """The verifier's logits for all rows."""
        return torch.stack([self.verifier[self.last(depth)] for depth in range(self.depth + 1)], 1).flatten(0, 1)

    def judge(self, point_mass: bool = False) -> Verdicts:
        """One verifier pass."""
        return judge(
            self.logits(),
            self.spans,
            self.state,
            self.tokens,
            self.lengths,
            self.drafts,
            self.draft_lens,
            None if point_mass else self.draft_q,
        )

    def run(self, count: int, step: Callable[[Toy], object]) -> np.ndarray:
        """Step until every request has `count` output tokens; those, [S, count]."""
        for _ in range(count):
            if int((self.lengths - len(PROMPT)).min()) >= count:
                break
            step(self)
        return self.tokens[:, len(PROMPT) : len(PROMPT) + count].numpy()

    def law(self, output: tuple[int, ...]) -> np.ndarray:
        """The reference distribution [V] of the token after PROMPT + output."""
        last = (*PROMPT, *output)[-1]
        x, _ = transformed(
            self.verifier[last].numpy(),
            self.params,
            PROMPT,
            output,
            eos_ids=self.eos_ids,
            bad_words_ids=self.bad_words_ids,
        )
        return probabilities(x)

    def joint_law(self, count: int) -> np.ndarray:
        """Reference probabilities of all outputs of `count` tokens, [V ** count]."""
        law = np.ones(1)
        for length in range(count):
            rows = [self.law(prefix) for prefix in product(range(self.vocab), repeat=length)]
            law = (law[:, None] * np.stack(rows)).reshape(-1)
        return law

    def deviation(self, output: np.ndarray) -> tuple[float, float]:
        """χ² excess of a sample [S, count] in units of its allowance (fails above 1), and the p-value."""
        count = output.shape[1]
        cells = output @ self.vocab ** np.arange(count)[::-1]
        return chi_square(np.bincount(cells, minlength=self.vocab**count), self.joint_law(count))


def chi_square(observed: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """(χ² − df) / (10 √(2 df)) and the p-value; cells of expectation < 5 are pooled, impossible cells must be empty."""
    if observed[law == 0].any():
        return np.inf, 0.0
    expected = law * observed.sum()
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    rare = max(int((expected < 5).sum()), int((np.cumsum(expected) < 5).sum()) + 1)
    observed = np.append(observed[rare:], observed[:rare].sum())
    expected = np.append(expected[rare:], expected[:rare].sum())
    df = len(observed) - 1
    if df == 0:
        return -1.0, 1.0
    value = ((observed - expected) ** 2 / expected).sum()
    return float((value - df) / (10 * np.sqrt(2 * df))), float(stats.chi2.sf(value, df))
