"""From a model's logits to the distribution a request asked for, row by row along a span.

Order: logit_bias and allowed ids, bad words, min_tokens, penalties, grammar mask, temperature, min_p, top_k, top_p
(vLLM's order; each cut sees what the one before it left, renormalised). Excluded tokens are -inf. Stateless: what a
penalty counts is read from the confirmed tokens and the draft prefix of the row. Knows nothing of drafts standing or
falling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.sampling.choose import implementation
from verifypd.sampling.rows import Rows, clean
from verifypd.sampling.state import Needs, SamplingState


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
    """Transformed logits, fp32 [N, state.vocab]; a new tensor. temperature_scale [N] multiplies the temperature of
    sampled rows; the rest as in `shaped`.
    """
    x = shaped(logits, rows, state, tokens, drafts, needs, mask, context)
    implementation(state.kernels).cut_(x, rows, state, needs, temperature_scale)
    return x


def shaped(
    logits: Tensor,
    rows: Rows,
    state: SamplingState,
    tokens: Tensor,
    drafts: Tensor,
    needs: Needs,
    mask: Tensor | None,
    context: int | None,
) -> Tensor:
    """What comes before the temperature, fp32 [N, state.vocab]; a new tensor.

    logits [N, >= vocab] fp32; tokens [S, T] and drafts [S, Lmax] int64; mask is bool [N, >= vocab] or int32 [N, words]
    with bit t % 32 of word t // 32 set when token t is allowed; context is a host upper bound of the confirmed lengths
    (it bounds the work of penalties).
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
