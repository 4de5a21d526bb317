"""What cuts distributions and judges drafts, whoever does it. Knows rows and spans; nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from verifypd.sampling.case import Case, Outcome, Spans, Verdicts
from verifypd.sampling.rows import Rows
from verifypd.sampling.state import Needs, SamplingState

# `judge` without a case: from logits that no cut has seen, spans, needs, state, tokens, lengths, drafts, their number,
# what they were drawn from, of which spans they were, and what torch makes of some spans; None: make a case of it
Again = Callable[[Sequence[int]], Outcome]
Direct = Callable[
    [Tensor, Spans, Needs, SamplingState, Tensor, Tensor, Tensor, Tensor, Tensor | None, Sequence[bool], Again],
    Verdicts | None,
]


class SamplingKernels(Protocol):
    """One implementation; all of them agree with TorchSampling."""

    name: str
    direct: Direct | None  # in place of transform and `judge`, where it can

    def cut_(self, x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
        """Temperature (times scale [N]), min_p, top_k and top_p of sampled rows of x [N, V], in place; others stay."""
        ...

    def judge(self, case: Case, tokens: Tensor, lengths: Tensor, drafts: Tensor, draft_lens: Tensor) -> Verdicts:
        """The verdicts of all spans, without logprobs; tokens, lengths and state.alive are written."""
        ...
