"""Temperature, min_p, top_k and top_p in torch: each cut sees what the one before it left. Excluded tokens are -inf."""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.sampling.rows import ELEMENTS_AT_ONCE, LARGEST, Rows
from verifypd.sampling.state import Needs, SamplingState

MASS_ONE = 2.0**40  # fixed-point mass of the likeliest token; 2**18 of them still fit int64
SORTED_VOCAB = 4096  # up to here a sort is the cheaper way to a top_p threshold
LOW_BITS = 15  # of the 30 bits of a float in [0, 1] below the sign, the second look-up resolves these


def cut_(x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
    """Temperature (times scale [N]), min_p, top_k and top_p of sampled rows of x [N, V], in place; others stay."""
    heated = needs.temperature if scale is None else needs.sampled
    if heated:
        temperature = state.temperature[heated.of(rows.slots)]
        if scale is not None:
            temperature = temperature * heated.of(scale)
        heated.update(x, lambda part: part.div_(temperature[:, None]))
    if needs.min_p:
        floor = state.log_min_p[needs.min_p.of(rows.slots)]
        needs.min_p.update(x, lambda part: keep_min_p_(part, floor))
    if needs.top_k:
        slots = needs.top_k.of(rows.slots)
        keep, mass = state.top_k[slots], state.top_p[slots] if needs.top_k_with_top_p else None
        needs.top_k.update(x, lambda part: keep_top_k_(part, keep, needs.widest_top_k, mass))
    if needs.top_p:
        share = state.top_p[needs.top_p.of(rows.slots)]
        needs.top_p.update(x, lambda part: keep_top_p_(part, share))


def keep_min_p_(x: Tensor, floor: Tensor) -> None:
    """Keep tokens of at least exp(floor [N]) times the likeliest one's probability."""
    x.masked_fill_(x < x.amax(-1, keepdim=True) + floor[:, None], -torch.inf)


def keep_top_k_(x: Tensor, k: Tensor, widest: int, share: Tensor | None = None) -> None:
    """Keep the k [N] likeliest tokens (1 <= k <= widest) and those level with the last; then top_p of them by share
    [N].
    """
    values = x.topk(widest, dim=-1).values  # [N, widest], falling
    last = values.gather(1, k[:, None] - 1)
    if share is not None:
        weight = (values - values[:, :1]).exp()
        weight.masked_fill_(torch.arange(widest, device=x.device) >= k[:, None], 0.0)
        level = (x >= last).sum(-1, keepdim=True) - k[:, None]  # tokens level with the k-th but not among the k
        total = weight.sum(-1, keepdim=True) + level * weight.gather(1, k[:, None] - 1)
        cut = (weight.cumsum(-1) < share[:, None] * total).sum(-1, keepdim=True).clamp_max(k[:, None] - 1)
        last = torch.where(share[:, None] < 1, values.gather(1, cut), last)
    x.masked_fill_(x < last, -torch.inf)


def keep_top_p_(x: Tensor, share: Tensor) -> None:
    """Keep the smallest set of likeliest tokens with mass >= share [N], and those level with the last of it.

    Probabilities are fixed-point, so that their sums do not depend on the order of adding.
    """
    find = sorted_threshold if x.shape[1] <= SORTED_VOCAB else histogram_threshold
    rows = max(1, ELEMENTS_AT_ONCE.get(x.device.type, 2**25) // max(x.shape[1], 1 << LOW_BITS))
    rows = x.shape[0] if find is sorted_threshold else rows
    for part, part_share in zip(torch.split(x, rows), torch.split(share, rows), strict=True):
        weight = (part - part.amax(-1, keepdim=True).clamp_min(-LARGEST)).exp_()  # 1 for the likeliest
        part.masked_fill_(weight < find(weight, part_share[:, None]), -torch.inf)


def sorted_threshold(weight: Tensor, share: Tensor) -> Tensor:
    """Largest t [N, 1] such that weights >= t sum to share [N, 1] of the row at least. weight [N, V] in [0, 1]."""
    ordered = weight.sort(dim=-1, descending=True).values
    mass = (ordered * MASS_ONE).long().cumsum(-1)
    cut = (mass < _needed(mass[:, -1:], share)).sum(-1, keepdim=True)
    return ordered.gather(1, cut.clamp_max(weight.shape[1] - 1))


def histogram_threshold(weight: Tensor, share: Tensor) -> Tensor:
    """The same without a sort: two histograms over the bits of the floats, high half then low half."""
    mass = (weight * MASS_ONE).long()
    total = mass.sum(-1, keepdim=True)
    spare = (total - _needed(total, share)).clamp_min(0)  # what may be dropped
    bits = weight.view(torch.int32).long()
    upper = bits >> LOW_BITS
    bucket, spare = _bucket(upper, mass, spare, (0x3F800000 >> LOW_BITS) + 1)
    mass.mul_(upper == bucket)
    lower, _ = _bucket(bits.bitwise_and_((1 << LOW_BITS) - 1), mass, spare, 1 << LOW_BITS)
    return (bucket << LOW_BITS | lower).int().view(torch.float32)


def _needed(total: Tensor, share: Tensor) -> Tensor:
    return (total.double() * share.double()).ceil().long().clamp_min(1)


def _bucket(keys: Tensor, mass: Tensor, spare: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """First bucket [N, 1] that cannot be dropped whole when all below it are, and what of `spare` is left for its
    inside.
    """
    held = mass.new_zeros(mass.shape[0], buckets).scatter_add_(1, keys, mass)
    below = held.cumsum(-1)
    bucket = torch.searchsorted(below, spare, right=True).clamp_max(buckets - 1)
    return bucket, spare - (below.gather(1, bucket) - held.gather(1, bucket))
