"""Drafting with a head that reads the verifier's states. Knows slots and the head's runner; nothing of scheduling.

Confirmed tokens are read with what the verifier made of the position before them, drafted ones with the head's own
output in its place. So what the cache holds of a drafted token is second best: once the verdict is in, those rows are
read again, with the verifier's features.
"""

from __future__ import annotations

from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.drafters.model import ModelDrafter
from verifypd.runtime.inputs import Slots
from verifypd.runtime.runner import HeadRunner
from verifypd.sampling.state import SamplingState


class HeadDrafter(ModelDrafter):
    """The draft loop of a model, with features beside the tokens."""

    name = "head"
    keeps_drafts = False

    def __init__(
        self, runner: HeadRunner, slots: Slots, sampling: SamplingState, draft_q: Tensor, temperatures: Tensor
    ) -> None:
        super().__init__(runner, slots, sampling, draft_q, runner.model.vocab_map, temperatures)
        self.head = runner
        self.reader = runner.features  # keeps every row: confirmed ones are read later, rejected ones written over

    def _catch_up(self, ids: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        return self.head.catch_up(ids, layout)

    def _step(self, ids: Tensor, carried: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        return self.head.draft(ids, carried, layout)
