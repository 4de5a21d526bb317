"""Counter-based noise: Philox4x32-10, the same numbers on every device.

Noise is a pure function of (seed, choice, output index, role, token), so a request that is preempted, resumed, drafted
twice or moved to another batch meets the same noise again. Knows nothing of logits, slots or requests.

Words are 32-bit values held in int64. key = (low, high) word of the seed; counter = (output index, choice, token // 4,
role); the four output words belong to tokens 4i .. 4i + 3.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

Words = TypeVar("Words", Tensor, NDArray[np.int64])


class Role(IntEnum):
    """What noise is for. Two roles never share a number: sharing them would bias the verdict."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    GUMBEL = 3
    SYNTHETIC = 4


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for each counter. int64 arrays (torch, or numpy of at least one dimension) that broadcast
    together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(ROUNDS):
        if round_:
            k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
        # 32 x 32 -> 64 bits. int64 wraps, which leaves both halves of the unsigned product right.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((high >> 32) ^ c1 ^ k0) & MASK, ((low >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = high & MASK, low & MASK
    return c0, c1, c2, c3


def _words(seeds: Tensor, choices: Tensor, indices: Tensor, groups: Tensor, role: Tensor) -> tuple[Tensor, ...]:
    arguments = (indices & MASK, choices & MASK, groups, role, seeds & MASK, (seeds >> 32) & MASK)
    if seeds.device.type != "cpu":
        c0, c1, c2, c3, k0, k1 = arguments
        return philox((c0, c1, c2, c3), (k0, k1))
    # On the CPU a hundred tiny torch operations cost a millisecond, numpy's an eighth of it. The memory is shared.
    a0, a1, a2, a3, b0, b1 = (np.atleast_1d(word.numpy()) for word in arguments)
    shape = np.broadcast_shapes(*(word.shape for word in arguments))
    return tuple(torch.from_numpy(word).expand(shape) for word in philox((a0, a1, a2, a3), (b0, b1)))


def _constant(value: int, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.int64, device=device)


def uniforms(seeds: Tensor, choices: Tensor, indices: Tensor, role: Role | Tensor) -> Tensor:
    """fp32 [..., 4]: four independent uniforms in [0, 1), multiples of 2**-24 (int64 arguments broadcast)."""
    roles = role if isinstance(role, Tensor) else _constant(int(role), seeds.device)
    words = torch.stack(_words(seeds, choices, indices, _constant(0, seeds.device), roles), dim=-1)
    return (words >> 8).float().mul_(2.0**-24)


def uniform(seeds: Tensor, choices: Tensor, indices: Tensor, role: Role | Tensor) -> Tensor:
    """fp32 in [0, 1), one number per element of the broadcast shape."""
    return uniforms(seeds, choices, indices, role)[..., 0]


def gumbel(seeds: Tensor, choices: Tensor, indices: Tensor, vocab: int) -> Tensor:
    """fp32 [N, vocab] standard Gumbel noise for int64 [N] arguments; finite always (-2.9 .. 22.9).

    -log(-log(1 - w)) with w = (word + 0.5) / 2**32: the upper tail, which decides who wins, is where w is small and
    fp32 exact.
    """
    device = seeds.device
    groups = torch.arange((vocab + 3) // 4, device=device)  # [G]
    words = _words(seeds[:, None], choices[:, None], indices[:, None], groups, _constant(int(Role.GUMBEL), device))
    noise = torch.empty(seeds.shape[0], groups.shape[0], 4, dtype=torch.float32, device=device)
    for lane, word in enumerate(words):
        noise[..., lane] = word
    noise.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-(1.0 - 2.0**-24))
    return noise.log1p_().neg_().log_().neg_().flatten(1)[:, :vocab]
