"""How attention is cut into programs: tiles of query rows, splits of the context. Pure; knows no tensors.

Everything follows from bounds the host knows before a launch, never from what the device holds, so that a captured
launch stays right when lengths change.
"""

from __future__ import annotations

from dataclasses import dataclass

from verifypd.kernels.tiles import power_of_two

LEAST_ROWS = 16  # of a matrix instruction
SHORT_ROWS = 16  # spans up to this many rows are plain tokens and verify spans; longer ones are prompt chunks
SPLIT_TOKENS = 512  # of context in a split, where the batch may not decide it
LEAST_SPLIT = 128  # tokens: shorter splits cost more in merging than they gain
MOST_SPLITS = 64
PROGRAMS_A_PROCESSOR = 2  # what fills the device
WORKSPACE_ELEMENTS = 1 << 24  # of partial results held at once, float32


@dataclass(frozen=True, slots=True)
class Tiling:
    """One launch over some spans. A program takes `block_q` rows of a span, with all query heads of one key head."""

    block_m: int  # rows of a tile, query rows times heads, padded to a power of two
    block_q: int  # query rows of a tile
    block_n: int  # tokens of context read at once
    tiles: int  # of the longest span
    splits: int  # programs that share the context of a tile
    split_tokens: int  # tokens of a split; 0: the context of each tile is divided evenly
    warps: int
    stages: int  # reads of the context under way at once

    def slices(self, spans: int, heads: int, width: int) -> list[tuple[int, int]]:
        """(first tile, tiles) of each launch, so that partial results fit the workspace."""
        if self.splits == 1:
            return [(0, self.tiles)]
        each = spans * self.block_q * heads * self.splits * width
        count = max(1, min(self.tiles, WORKSPACE_ELEMENTS // each))
        return [(first, min(count, self.tiles - first)) for first in range(0, self.tiles, count)]


def tiling(
    *,
    spans: int,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    width: int,
    itemsize: int,
    window: int | None,
    processors: int,
    fixed: bool = False,
) -> Tiling:
    """The cut for `spans` spans of at most `rows` rows and `context` tokens.

    fixed: tiles and splits do not depend on the batch, so a row's sums are taken in the same order in any company.
    """
    shared = heads // kv_heads
    wide = width > 128
    full = itemsize == 4  # no matrix instructions: float32 products live in registers
    long = rows > SHORT_ROWS
    most = (16 if wide else 32) if full else 64
    block_m = most if fixed else min(power_of_two(rows * shared), most)
    block_m = max(block_m, LEAST_ROWS, power_of_two(shared))
    block_q = block_m // shared
    block_n = 32 if wide or full else 128 if long and width <= 64 and not fixed else 64
    tiles = -(-rows // block_q)
    splits, split_tokens = 1, 0
    if fixed:
        splits, split_tokens = -(-max(context, 1) // SPLIT_TOKENS), SPLIT_TOKENS
    else:
        reach = context if window is None else min(context, window + rows + block_n)
        wanted = PROGRAMS_A_PROCESSOR * processors // (spans * tiles * kv_heads)
        splits = max(1, min(wanted, MOST_SPLITS, -(-reach // LEAST_SPLIT)))
    return Tiling(
        block_m=block_m,
        block_q=block_q,
        block_n=block_n,
        tiles=tiles,
        splits=splits,
        split_tokens=split_tokens,
        warps=8 if block_m * power_of_two(width) > (2048 if full else 8192) else 4,
        stages=2 if wide or full or (long and not fixed) else 3,
    )
