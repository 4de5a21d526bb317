"""What a draft model proposes: the same transforms as the verifier's, its own temperature scale, and the q it really
drew from.

Knows nothing of how the logits came about, and nothing of verification but the noise it shares with it in coupled mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.sampling.draws import best, best_with_noise, draw, noise_keys
from verifypd.sampling.philox import Role, uniforms
from verifypd.sampling.rows import Rows, clean
from verifypd.sampling.state import Needs, SamplingState
from verifypd.sampling.transforms import shaped, transform


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
) -> Tensor:
    """Draw draft token `depth` of R slots, [R] int64. It is written to drafts[slots, depth], and what it was drawn from
    to draft_q[slots, depth] of those under rejection; the others need no q.

    logits fp32 [R, draft vocab]; slots [R] int64 = slot_ids; tokens [S, T], lengths [S], drafts [S, Lmax] int64;
    draft_q fp32 [S, Lmax, vocab]; temperature_scale [S] acts on q only; vocab_map [draft vocab] int64 gives the
    verifier's ids (None: the same ids); noise: draft_noise(...)[:, depth], made here when absent; mask and context as
    in `transform`.
    """
    needs = state.needs(slot_ids)
    if state.kernels == "native" and (draft_q is not None or not needs.rejection):
        from verifypd.sampling import native

        x = logits
        if not needs.plain or mask is not None:
            rows = Rows(slots, torch.full_like(slots, depth), lengths[slots])
            x = shaped(widen(x, vocab_map, state.vocab), rows, state, tokens, drafts, needs, mask, context)
            vocab_map = None
        native.propose_(x, slots, depth, state, lengths, drafts, draft_q, temperature_scale, vocab_map)
        return drafts[slots, depth]
    if needs.plain and mask is None and not needs.sampled and (state.kernels != "triton" or draft_q is None):
        chosen = best(clean(logits, state.vocab if vocab_map is None else vocab_map.shape[0]))[1]
        drafts[slots, depth] = chosen = chosen if vocab_map is None else vocab_map[chosen]
        return chosen
    rows = Rows(slots, torch.full_like(slots, depth), lengths[slots])
    x = widen(logits, vocab_map, state.vocab)
    scale = None if temperature_scale is None else temperature_scale[slots]
    x = transform(x, rows, state, tokens, drafts, needs, temperature_scale=scale, mask=mask, context=context)
    if state.kernels == "triton" and draft_q is not None:
        from verifypd.sampling import triton

        triton.propose_(x, slots, depth, state, lengths, drafts, draft_q)
        return drafts[slots, depth]
    chosen, q = _draw(x, rows, needs, state, noise)
    drafts[slots, depth] = chosen
    if draft_q is not None and q is not None:
        draft_q[needs.rejection.of(slots), depth, : state.vocab] = q
    return chosen


def widen(logits: Tensor, vocab_map: Tensor | None, vocab: int) -> Tensor:
    """Draft logits [R, draft vocab] in the verifier's ids, [R, >= vocab]; unknown tokens are -inf."""
    if vocab_map is not None:
        wide = logits.new_full((logits.shape[0], vocab), -torch.inf)
        return wide.index_copy_(1, vocab_map, logits[:, : vocab_map.shape[0]])
    missing = vocab - logits.shape[1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits


def _draw(
    x: Tensor, rows: Rows, needs: Needs, state: SamplingState, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A token of each row, and q of the rows under rejection."""
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
    return tokens, q
