"""The verifier's own log-probabilities: of raw logits, before every transform, as the OpenAI API has it. Knows nothing
of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Leading shape [...]: [M] rows, or [R, W] padded spans in a verdict."""

    chosen: Tensor  # fp32 [...], of the token itself
    ranks: Tensor  # int64 [...], 1 is the likeliest
    top_ids: Tensor  # int64 [..., K], falling
    top: Tensor  # fp32 [..., K]


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probability and rank of tokens [M] under logits fp32 [M, V], and the k likeliest tokens of each row."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    value = logits.gather(1, tokens[:, None])
    ranks = (logits > value).sum(-1) + 1
    values, ids = logits.topk(k, dim=-1)
    return Logprobs((value - normaliser).squeeze(1), ranks, ids, values - normaliser)


def padded(logprobs: Logprobs, index: Tensor, shape: tuple[int, int]) -> Logprobs:
    """Spread the logprobs of M rows over a [R, W] table; index [M] is the place in the flattened table."""
    places = shape[0] * shape[1]

    def spread(x: Tensor) -> Tensor:
        table = torch.zeros(places, *x.shape[1:], dtype=x.dtype, device=x.device)
        return table.index_copy_(0, index, x).view(*shape, *x.shape[1:])

    return Logprobs(spread(logprobs.chosen), spread(logprobs.ranks), spread(logprobs.top_ids), spread(logprobs.top))
