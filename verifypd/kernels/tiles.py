"""Sizes of tiles. Pure; knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

H200 = 132  # multiprocessors of what tiles were timed on
SKINNY_ROWS = 32  # most rows of a skinny product; from 33 on cuBLAS is as fast with its norms and gates apart

WIDE_ROW = 2048  # elements from which a row takes eight warps
SKINNY_MEMORY = 210 * 1024  # bytes of shared memory that its largest tile takes


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


def row_warps(width: int) -> int:
    """Warps of a program that takes a row."""
    return 8 if width >= WIDE_ROW else 4


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """How a skinny product is cut: see `skinny_product`."""

    outputs: int  # of a program
    depth: int  # of a round
    stages: int
    parts: int


def skinny_tile(rows: int, outputs: int, depth: int, gated: bool, fp8: bool = False) -> SkinnyTile | None:
    """The fastest of some 700 measured on an H200 with a cold cache; None: no tile fits the matrix or so many rows.

    From 4,096 outputs on, tiles of 64 fill the processors and are multiplied by `wgmma`. Where there are fewer, tiles
    of 16 do, and each warp sums a part of the depth. fp8: a round is twice as deep, which makes it the bytes of one in
    bfloat16; these were chosen by that alone.
    """
    if not 0 < rows <= SKINNY_ROWS:
        return None
    if outputs >= 4096:
        if depth % 64:
            return None
        pair = H200 < -(-outputs // 64) <= 2 * H200  # two programs on some processors
        if fp8:
            return SkinnyTile(
                64, 64 if depth % 128 else 128 if depth % 256 else 256, 4 if gated else 3 if pair else 6, 1
            )
        if gated:
            return SkinnyTile(64, 64 if depth <= 2048 else 128, 5, 1)
        return SkinnyTile(64, 128, 3 if pair else 7, 1)
    if outputs % 16 or depth % 256:
        return None
    return SkinnyTile(16, 128, 5, 4) if depth % 512 == 0 and not gated else SkinnyTile(16, 64, 5 if gated else 7, 4)
