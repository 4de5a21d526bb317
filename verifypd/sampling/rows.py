"""Rows of logits: where they stand, and what is usable of them. Knows nothing of settings, drafts or verdicts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifypd.sampling.state import Subset

LARGEST = 1e30  # stands for +inf, so that dividing by a temperature stays finite
ELEMENTS_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}  # of a vocabulary-wide temporary


@dataclass(frozen=True, slots=True)
class Rows:
    """Where N rows of logits stand. All int64 [N]."""

    slots: Tensor
    depths: Tensor  # draft tokens of the span before the row
    lengths: Tensor  # confirmed tokens before the span

    @property
    def positions(self) -> Tensor:
        """Absolute position of the token that each row decides."""
        return self.lengths + self.depths

    def take(self, subset: Subset) -> Rows:
        """The rows of a subset."""
        return Rows(subset.of(self.slots), subset.of(self.depths), subset.of(self.lengths))


def clean(logits: Tensor, vocab: int) -> Tensor:
    """A copy [N, vocab] without padding, NaN (now -inf) and +inf (now very large)."""
    return torch.nan_to_num(logits[:, :vocab], nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
