"""What a draft model proposes: the same transforms as the verifier's, its own temperature scale, and the q it really
drew from.

Knows nothing of how the logits came about, and nothing of verification but the noise it shares with it in coupled mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.sampling.draws import best, best_with_noise, draw, noise_keys
from verifypd.sampling.philox import Role, uniforms
from verifypd.sampling.rows import Rows, clean
from verifypd.sampling.state import Needs, SamplingState, Subset
from verifypd.sampling.transforms import transform


@dataclass(frozen=True, slots=True)
class Proposal:
    """One draft token for each of R slots, and the distributions of those that were drawn."""

    tokens: Tensor  # [R] int64, verifier ids
    q: Tensor | None  # fp32 [M, vocab], exactly what the tokens of `drawn` were drawn from; None: M = 0
    drawn: Subset  # the M of the R rows that were drawn (rejection); the others need no q


def draft_noise(slots: Tensor, lengths: Tensor, depth: int, state: SamplingState) -> Tensor:
    """Noise fp32 [R, depth, 2] for drafting `depth` tokens after lengths [S]: one call for a whole draft loop."""
    positions = lengths[slots][:, None] + torch.arange(depth, device=slots.device)
    return uniforms(*noise_keys(slots[:, None], positions, state), Role.DRAFT)[..., :2]


def propose(
    logits: Tensor,
    slots: Tensor,
    slot_ids: Sequence[int],
    depth: int,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_q: Tensor | None = None,
    *,
    temperature_scale: Tensor | None = None,
    vocab_map: Tensor | None = None,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
    context: int | None = None,
) -> Proposal:
    """Draw draft token `depth` of R slots, and write it to drafts[slots, depth] and its q to draft_q[slots, depth].

    logits fp32 [R, draft vocab]; slots [R] int64 = slot_ids; tokens [S, T], lengths [S], drafts [S, Lmax] int64;
    draft_q fp32 [S, Lmax, vocab]; temperature_scale [S] acts on q only; vocab_map [draft vocab] int64 gives the
    verifier's ids (None: the same ids); noise: draft_noise(...)[:, depth], made here when absent; mask and context as
    in `transform`.
    """
    needs = state.needs(slot_ids)
    if state.kernels == "triton" and draft_q is not None:
        from verifypd.sampling.triton import propose_

        rows = Rows(slots, torch.full_like(slots, depth), lengths[slots])
        scale = None if temperature_scale is None else temperature_scale[slots]
        x = widen(logits, vocab_map, state.vocab)
        x = transform(x, rows, state, tokens, drafts, needs, temperature_scale=scale, mask=mask, context=context)
        propose_(x, slots, depth, state, lengths, drafts, draft_q)
        q = draft_q[needs.rejection.of(slots), depth, : state.vocab] if needs.rejection else None
        return Proposal(drafts[slots, depth], q, needs.rejection)
    if needs.plain and mask is None and not needs.sampled:
        chosen = best(clean(logits, state.vocab if vocab_map is None else vocab_map.shape[0]))[1]
        proposal = Proposal(chosen if vocab_map is None else vocab_map[chosen], None, needs.rejection)
    else:
        rows = Rows(slots, torch.full_like(slots, depth), lengths[slots])
        x = widen(logits, vocab_map, state.vocab)
        scale = None if temperature_scale is None else temperature_scale[slots]
        x = transform(x, rows, state, tokens, drafts, needs, temperature_scale=scale, mask=mask, context=context)
        proposal = _draw(x, rows, needs, state, noise)
    drafts[slots, depth] = proposal.tokens
    if draft_q is not None and proposal.q is not None:
        draft_q[proposal.drawn.of(slots), depth, : state.vocab] = proposal.q
    return proposal


def widen(logits: Tensor, vocab_map: Tensor | None, vocab: int) -> Tensor:
    """Draft logits [R, draft vocab] in the verifier's ids, [R, >= vocab]; unknown tokens are -inf."""
    if vocab_map is not None:
        wide = logits.new_full((logits.shape[0], vocab), -torch.inf)
        return wide.index_copy_(1, vocab_map, logits[:, : vocab_map.shape[0]])
    missing = vocab - logits.shape[1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits


def _draw(x: Tensor, rows: Rows, needs: Needs, state: SamplingState, noise: Tensor | None) -> Proposal:
    tokens, q = torch.zeros_like(rows.slots), None
    if needs.settled:
        needs.settled.put(tokens, best(needs.settled.of(x))[1])
    if needs.coupled:
        needs.coupled.put(tokens, best_with_noise(needs.coupled.of(x), rows.take(needs.coupled), state)[1])
    if needs.rejection:
        part, drawn = needs.rejection.of(x), rows.take(needs.rejection)
        # Where no token is left (NaN, a mask), q is a point mass on token 0: any q is exact as long as it is the true
        # one.
        part[:, 0].masked_fill_(part.amax(-1) == -torch.inf, 0.0)
        q = part.softmax(-1)
        if noise is None:
            u = uniforms(*noise_keys(drawn.slots, drawn.positions, state), Role.DRAFT)[..., :2]
        else:
            u = needs.rejection.of(noise)
        needs.rejection.put(tokens, draw(q, u))
    return Proposal(tokens, q, needs.rejection)
