"""From a model's logits to the distribution a request asked for, row by row along a span.

Order: logit_bias and allowed ids, bad words, min_tokens, penalties, grammar mask, temperature, min_p, top_k, top_p
(vLLM's order; each cut sees what the one before it left, renormalised). Excluded tokens are -inf. Stateless: what a
penalty counts is read from the confirmed tokens and the draft prefix of the row. Knows nothing of drafts standing or
falling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifypd.sampling.state import Needs, SamplingState, Subset

LARGEST = 1e30  # stands for +inf, so that dividing by a temperature stays finite
MASS_ONE = 2.0**40  # fixed-point mass of the likeliest token; 2**18 of them still fit int64
SORTED_VOCAB = 4096  # up to here a sort is the cheaper way to a top_p threshold
LOW_BITS = 15  # of the 30 bits of a float in [0, 1] below the sign, the second look-up resolves these
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


def transform(
    logits: Tensor,
    rows: Rows,
    state: SamplingState,
    tokens: Tensor,
    drafts: Tensor,
    needs: Needs,
    *,
    temperature_scale: Tensor | None = None,
    mask: Tensor | None = None,
    context: int | None = None,
) -> Tensor:
    """Transformed logits, fp32 [N, state.vocab]; a new tensor.

    logits [N, >= vocab] fp32; tokens [S, T] and drafts [S, Lmax] int64; temperature_scale [N] multiplies the
    temperature of sampled rows; mask is bool [N, >= vocab] or int32 [N, words] with bit t % 32 of word t // 32 set when
    token t is allowed; context is a host upper bound of the confirmed lengths (it bounds the work of penalties).
    """
    x = clean(logits, state.vocab)
    if needs.bias:
        bias = state.bias.index_select(0, state.bias_row[needs.bias.of(rows.slots)])
        needs.bias.update(x, lambda part: part.add_(bias))
    if needs.bad_words:
        some = rows.take(needs.bad_words)
        needs.bad_words.update(x, lambda part: forbid_bad_words_(part, some, state, tokens, drafts))
    if needs.min_tokens:
        early = rows.take(needs.min_tokens)
        needs.min_tokens.update(x, lambda part: forbid_early_stop_(part, early, state))
    if needs.penalties:
        penalised = rows.take(needs.penalties)
        seen = tokens[:, :context]
        needs.penalties.update(x, lambda part: penalise_(part, penalised, state, seen, drafts, needs.counts))
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else unpack_mask(mask)
        x.masked_fill_(allowed[:, : state.vocab].logical_not(), -torch.inf)
    _scale_and_cut_(x, rows, state, needs, temperature_scale)
    return x


def shape_(x: Tensor, rows: Rows, state: SamplingState, tokens: Tensor, drafts: Tensor) -> None:
    """Bias, bad words, min_tokens and penalties of all rows of x [N, vocab], in place.

    As in `transform`, but nothing is left out for want of need: settings that a request did not give change nothing. So
    it may be captured.
    """
    if len(state.bias):
        own = state.bias_row[rows.slots]
        x.add_(state.bias[own.clamp_min(0)].masked_fill_((own < 0)[:, None], 0.0))
    if state.bad_words.shape[1]:
        forbid_bad_words_(x, rows, state, tokens, drafts)
    forbid_early_stop_(x, rows, state)
    penalise_(x, rows, state, tokens, drafts, counts=True)


def _scale_and_cut_(x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
    if state.kernels == "triton":
        if needs.sampled:
            from verifypd.sampling.triton import cut_

            cut_(x, rows.slots, state, scale)
        return
    heated = needs.temperature if scale is None else needs.sampled
    if heated:
        temperature = state.temperature[heated.of(rows.slots)]
        if scale is not None:
            temperature = temperature * heated.of(scale)
        heated.update(x, lambda part: part.div_(temperature[:, None]))
    if needs.min_p:
        floor = state.min_p[needs.min_p.of(rows.slots)]
        needs.min_p.update(x, lambda part: keep_min_p_(part, floor))
    if needs.top_k:
        slots = needs.top_k.of(rows.slots)
        keep, mass = state.top_k[slots], state.top_p[slots] if needs.top_k_with_top_p else None
        needs.top_k.update(x, lambda part: keep_top_k_(part, keep, needs.widest_top_k, mass))
    if needs.top_p:
        share = state.top_p[needs.top_p.of(rows.slots)]
        needs.top_p.update(x, lambda part: keep_top_p_(part, share))


def forbid_(x: Tensor, ids: Tensor, when: Tensor) -> None:
    """Exclude tokens ids [N, K] of x [N, V] where `when` [N, K] says so; ids may repeat, negative ones are ignored."""
    value = torch.where(when & (ids >= 0) & (ids < x.shape[1]), -torch.inf, torch.inf)
    x.scatter_reduce_(1, ids.clamp(0, x.shape[1] - 1), value, "amin")


def forbid_bad_words_(x: Tensor, rows: Rows, state: SamplingState, tokens: Tensor, drafts: Tensor) -> None:
    """Exclude the last token of each bad word whose other tokens are the last ones of the output."""
    words = state.bad_words[rows.slots]  # [N, W, M], right-aligned
    before = words.shape[2] - 1
    position = rows.positions[:, None] - before + torch.arange(before, device=x.device)  # [N, M - 1]
    drafted = position - rows.lengths[:, None]
    confirmed = tokens[rows.slots[:, None], position.clamp(0, tokens.shape[1] - 1)]
    proposed = drafts[rows.slots[:, None], drafted.clamp(0, drafts.shape[1] - 1)] if drafts.shape[1] else confirmed
    recent = torch.where(drafted < 0, confirmed, proposed)
    recent = torch.where(position >= state.prompt_len[rows.slots][:, None], recent, -2)  # matches no word
    matches = ((words[:, :, :-1] == recent[:, None]) | (words[:, :, :-1] < 0)).all(-1)
    forbid_(x, words[:, :, -1], matches)


def forbid_early_stop_(x: Tensor, rows: Rows, state: SamplingState) -> None:
    """Exclude EOS and stop ids while the token would stand before min_len."""
    early = rows.positions < state.min_len[rows.slots]
    ids = state.guarded_ids[rows.slots]
    forbid_(x, ids, early[:, None].expand_as(ids))


def penalise_(x: Tensor, rows: Rows, state: SamplingState, tokens: Tensor, drafts: Tensor, counts: bool) -> None:
    """Repetition penalty over prompt and output, presence and frequency over the output; the row's draft prefix counts.

    Only the tokens that occurred are touched: no pass over the vocabulary but clearing the counts.
    """
    slots, lengths, depths = rows.slots, rows.lengths[:, None], rows.depths[:, None]
    place = torch.arange(tokens.shape[1], device=x.device)
    draft_place = torch.arange(drafts.shape[1], device=x.device)
    ids = torch.cat([tokens.index_select(0, slots), drafts.index_select(0, slots)], dim=1)  # [N, T + Lmax]
    valid = torch.cat([place < lengths, draft_place < depths], dim=1)
    # What lies beyond the row repeats its first token, and so writes what is written there anyway.
    ids = torch.where(valid, ids, ids[:, :1]).clamp_(0, x.shape[1] - 1)
    value = x.gather(1, ids)
    repetition = state.repetition[slots][:, None]
    value = torch.where(value > 0, value / repetition, value * repetition)
    if counts:
        output = torch.cat(
            [place >= state.prompt_len[slots][:, None], (draft_place >= 0).expand_as(depths + draft_place)], 1
        )
        count = torch.zeros_like(x).scatter_add_(1, ids, (valid & output).to(x.dtype)).gather(1, ids)
        value -= state.frequency[slots][:, None] * count + state.presence[slots][:, None] * (count > 0)
    x.scatter_(1, ids, value)


def unpack_mask(mask: Tensor) -> Tensor:
    """int32 [N, words] to bool [N, 32 * words], lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> bits) & 1).to(torch.bool).flatten(1)


def keep_min_p_(x: Tensor, floor: Tensor) -> None:
    """Keep tokens of at least floor [N] times the likeliest one's probability."""
    x.masked_fill_(x < x.amax(-1, keepdim=True) + floor[:, None].log(), -torch.inf)


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
