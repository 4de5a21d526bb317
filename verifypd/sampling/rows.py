"""Rows of logits: where they stand, and what is usable of them. Knows nothing of settings, drafts or verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


class DraftVocabulary(NamedTuple):
    """Which of a verifier's tokens a drafter knows."""

    names: Tensor  # int64 [draft vocab], the verifier's ids; a vocab_map
    places: Tensor  # int32 [vocab], where among those each of the verifier's is; -1: nowhere

    @classmethod
    def of(cls, vocab_map: Tensor, vocab: int) -> DraftVocabulary:
        """Of a vocab_map, with its inverse."""
        places = torch.full((vocab,), -1, dtype=torch.int32, device=vocab_map.device)
        own = torch.arange(len(vocab_map), dtype=torch.int32, device=vocab_map.device)
        return cls(vocab_map, places.index_copy_(0, vocab_map, own))


def clean(logits: Tensor, vocab: int) -> Tensor:
    """A copy [N, vocab] without padding, NaN (now -inf) and +inf (now very large).

    Rows lie side by side: torch would give a single row the stride of the wider one, for which kernels compile anew.
    """
    known = logits[:, :vocab]
    out = known.new_empty(known.shape)
    return torch.nan_to_num(known, nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf, out=out)
