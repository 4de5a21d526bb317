"""Sizes that passes are padded to, so that few shapes are captured. Numbers only."""

from __future__ import annotations

CHUNKS = 8  # prompt chunks a padded pass may carry


def bucket(n: int) -> int:
    """The smallest bucket that holds n: powers of two, and from 8 on the middle between two of them."""
    power = 1 << max(n - 1, 0).bit_length()
    return power // 4 * 3 if power >= 16 and n <= power // 4 * 3 else power


def row_bucket(n: int) -> int:
    """Rows of a pass without chunks: the buckets, and from 128 on, where each costs, steps of an eighth of a power."""
    if n <= 128:
        return bucket(n)
    step = (1 << (n - 1).bit_length()) // 8
    return -(-n // step) * step


def chunk_bucket(n: int) -> int:
    """Rows of a pass with chunks: steps of 64 up to 384, then of 128, then of a sixteenth of the next power of two.

    Large products take 128 rows at a time: on an H200 a pass of 832 rows takes as long as one of 896.
    """
    step = 64 if n <= 384 else max(128, (1 << (n - 1).bit_length()) // 16)
    return -(-n // step) * step


def span_bucket(n: int) -> int:
    """Short spans beside chunks: 8, 32, 128 and so on, for the rows are what costs there."""
    found = 8
    while found < n:
        found *= 4
    return found
