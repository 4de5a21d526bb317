"""What cuts distributions and judges drafts, whoever does it. Knows rows and spans; nothing of models."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from verifypd.sampling.case import Case, Spans, Verdicts
from verifypd.sampling.rows import Rows
from verifypd.sampling.state import Needs, SamplingState


class SamplingKernels(Protocol):
    """One implementation; all of them agree with TorchSampling."""

    name: str

    def cut_(self, x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
        """Temperature (times scale [N]), min_p, top_k and top_p of sampled rows of x [N, V], in place; others stay."""
        ...

    def judge(self, case: Case, tokens: Tensor, lengths: Tensor, drafts: Tensor, draft_lens: Tensor) -> Verdicts:
        """The verdicts of all spans, without logprobs; tokens, lengths and state.alive are written."""
        ...

    def judge_greedy(
        self,
        logits: Tensor,
        spans: Spans,
        needs: Needs,
        state: SamplingState,
        tokens: Tensor,
        lengths: Tensor,
        drafts: Tensor,
        draft_lens: Tensor,
    ) -> Verdicts | None:
        """The same from raw logits, where all rows take what is likeliest there; None: make a case of it."""
        ...
