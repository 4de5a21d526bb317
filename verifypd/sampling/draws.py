"""One token of many: the likeliest, with keyed noise or without, or one drawn by weight. Knows rows and their noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.sampling.philox import gumbel
from verifypd.sampling.rows import ELEMENTS_AT_ONCE, Rows
from verifypd.sampling.state import SamplingState

BLOCK = 256  # vocabulary is searched in blocks of this many tokens
FEW = 2**15  # values up to which one operation on a CPU is quicker than several cheaper ones


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Token ids [R] by inverse CDF from weights [R, V] >= 0, not necessarily normalised, with uniforms u [R, 2] in [0,
    1).

    First a block of tokens, then a token in it, each with its own uniform: fp32 sums stay exact enough for any
    vocabulary. A token of weight zero is never drawn (a row without any weight gives 0).
    """
    blocks = _blocks(weights, 0.0)  # [R, B, C]
    block = _pick(blocks.sum(-1), u[:, :1])
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, blocks.shape[2])).squeeze(1)
    return (block * blocks.shape[2] + _pick(inside, u[:, 1:2])).squeeze(1)


def best(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [N] and its lowest index [N] in x [N, V] (no NaN)."""
    if x.device.type != "cpu" or x.numel() <= FEW:
        value, index = x.max(-1)
        return value, index
    # An index-carrying maximum is scalar code on the CPU (7 to 20 times slower), the maximum alone is not.
    blocks = _blocks(x, -torch.inf)
    tops = blocks.amax(-1)
    value, block = tops.max(-1, keepdim=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, blocks.shape[2])).squeeze(1)
    return value.squeeze(1), (block * blocks.shape[2] + inside.max(-1, keepdim=True).indices).squeeze(1)


def best_with_noise(x: Tensor, rows: Rows, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Coupled draw: `best` of x [N, V] + Gumbel noise keyed by seed, choice, output index and token."""
    at_once = max(1, ELEMENTS_AT_ONCE.get(x.device.type, 2**25) // x.shape[1])
    seeds, choices, indices = noise_keys(rows.slots, rows.positions, state)
    parts = zip(*(torch.split(each, at_once) for each in (x, seeds, choices, indices)), strict=True)
    found = [best(gumbel(seed, choice, index, x.shape[1]).add_(part)) for part, seed, choice, index in parts]
    return torch.cat([value for value, _ in found]), torch.cat([index for _, index in found])


def noise_keys(slots: Tensor, positions: Tensor, state: SamplingState) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, choice and output index of the tokens at absolute positions [N]."""
    return state.seed[slots], state.choice[slots], positions - state.prompt_len[slots]


def block_of(vocab: int) -> int:
    """Tokens of a block that `draw` picks first: one that divides the vocabulary, where there is one."""
    return next((size for size in (min(BLOCK, vocab), BLOCK // 2, BLOCK // 4) if vocab % size == 0), BLOCK)


def _blocks(x: Tensor, fill: float) -> Tensor:
    """x [N, V] as [N, blocks, block]; a view where the vocabulary divides evenly."""
    vocab, size = x.shape[1], block_of(x.shape[1])
    if vocab % size:
        x = F.pad(x, (0, -vocab % size), value=fill)
    return x.view(x.shape[0], -1, size)


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """Index [N, 1] into weights [N, C] by inverse CDF at u [N, 1]. Holds up to sums that are not quite monotonic."""
    held = weights > 0
    sums = weights.cumsum(-1)
    total = torch.where(held, sums, 0.0).amax(-1, keepdim=True)
    goal = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return (held & (sums > goal)).int().argmax(-1, keepdim=True)
