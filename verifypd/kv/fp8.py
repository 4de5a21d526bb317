"""Keys and values in eight bits: e4m3 with a scale for each head. Knows numbers; nothing of blocks or models.

A scale is a power of two, so that dividing by it and multiplying with it round nothing: what an entry loses, it loses
once, when it becomes e4m3. That has three bits behind the leading one whatever its size, so a scale decides only what
is too large, and saturates, or too small. The largest entry that was seen comes to lie in [64, 128): what is 3.5 times
as large still fits (the range ends at 448), and what is a 4096th of it still has all its bits (down to 2^-6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.kernels.weights import FP8, FP8_MAX

SEEN = 7  # the largest entry that was seen lies in [2^(SEEN - 1), 2^SEEN)


def fitting(largest: Tensor) -> Tensor:
    """Scales for heads whose largest entries are so large; 1 where there is none but zero."""
    exponent = torch.frexp(largest.float()).exponent - SEEN
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent), 1.0)


def narrowed(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., heads, D] over scale [heads], as e4m3; what lies beyond its range saturates."""
    return (x.float() / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def widened(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `narrowed` made, [..., heads, D], in another dtype."""
    return x.to(dtype) * scale.to(dtype)[:, None]
