"""Sizes of tiles. Pure; knows no tensors."""

from __future__ import annotations


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
