"""How attention is cut into programs: tiles of query rows, splits of the context. Pure; knows no tensors.

Everything here follows from bounds the host knows before a launch, never from what the device holds, so that a captured
launch stays right when lengths change. How many of the possible splits a context gets is decided on the device, by the
lengths there (`shares_of` in triton_kernels.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from verifypd.kernels.tiles import power_of_two

LEAST_ROWS = 16  # of a matrix instruction
SHORT_ROWS = 16  # spans up to this many rows are plain tokens and verify spans; longer ones are prompt chunks
CHUNK_TILE = 64  # rows of a tile of prompt chunks, query rows times heads
SPLIT_TOKENS = 512  # of context in a split, where the batch may not decide it
LEAST_SPLIT = 128  # tokens: shorter splits cost more in merging than they gain
LEAST_CHUNK_SPLIT = 512  # the same for prompt chunks, whose partial results are large
MOST_SPLITS = 64
PROGRAMS_A_PROCESSOR = 2  # what fills the device
FINER = 2  # times that many, where the batch fills the device by itself: programs that start last are to be short
CROWDED = 8  # times what fills the device: nothing is split, for a long context is little beside the whole pass
WORKSPACE_ELEMENTS = 1 << 24  # of partial results of one launch, float32: 64 MiB


@dataclass(frozen=True, slots=True)
class Tiling:
    """One launch over some spans. A program takes `block_q` rows of a span, with all query heads of one key head."""

    block_m: int  # rows of a tile, query rows times heads, padded to a power of two
    block_q: int  # query rows of a tile
    block_n: int  # tokens of context read at once
    tiles: int  # of the longest span
    items: int  # pairs of tile and split that there are at most, in each key head
    splits: int  # programs that share the context of a tile, at most
    workers: int  # the pass's context is shared out among that many programs of a key head
    least: int  # tokens of a split
    split_tokens: int  # tokens of a split, fixed; 0: the context of each tile is divided evenly
    held_rows: int  # rows of partial results
    member_rows: int  # of a span, in partial results; 0: they lie as the rows of the pass
    warps: int
    stages: int  # reads of the context under way at once

    @property
    def partials(self) -> int:
        """Partial results of a head, one for each row and split."""
        return self.held_rows * self.splits if self.splits > 1 else 0


def tiling(
    *,
    spans: int,
    rows: int,
    pass_rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    width: int,
    itemsize: int,
    window: int | None,
    processors: int,
    fixed: bool = False,
) -> Tiling:
    """The cut for `spans` spans of at most `rows` rows and `context` tokens, in a pass of `pass_rows` rows.

    fixed: tiles and splits do not depend on the batch, so a row's sums are taken in the same order in any company.
    """
    shared = heads // kv_heads
    wide = width > 128
    full = itemsize == 4  # no matrix instructions: float32 products live in registers
    long = rows > SHORT_ROWS
    most = (16 if wide else 32) if full else CHUNK_TILE if long and not (wide or fixed) else 64
    block_m = most if fixed else min(power_of_two(rows * shared), most)
    block_m = max(block_m, LEAST_ROWS, power_of_two(shared))
    block_q = block_m // shared
    block_n = 32 if wide or full else 128 if long and width <= 64 and not fixed else 64
    tiles = -(-rows // block_q)
    real_tiles = min(spans * tiles, pass_rows // block_q + spans)  # a padded pass has room for more chunks than it has
    together = spans * rows <= pass_rows
    held_rows = spans * rows if together else pass_rows
    least = LEAST_CHUNK_SPLIT if long else LEAST_SPLIT
    if fixed:
        workers, splits = 1, -(-max(context, 1) // SPLIT_TOKENS)
        items = real_tiles * splits
    else:
        reach = context if window is None else min(context, window + block_q)
        workers = _workers(real_tiles, kv_heads, processors, long)
        room = WORKSPACE_ELEMENTS // (held_rows * heads * width)
        splits = max(1, min(workers, MOST_SPLITS, room, -(-reach // least)))
        items = min(real_tiles * splits, real_tiles + workers)
    return Tiling(
        block_m=block_m,
        block_q=block_q,
        block_n=block_n,
        tiles=tiles,
        items=items,
        splits=splits,
        workers=workers,
        least=least,
        split_tokens=SPLIT_TOKENS if fixed else 0,
        held_rows=held_rows,
        member_rows=rows if together else 0,
        warps=8 if block_m * power_of_two(width) > (2048 if full else 8192) else 4,
        stages=2 if wide or full or (long and not fixed) else 3,
    )


def _workers(tiles: int, kv_heads: int, processors: int, long: bool) -> int:
    """Programs of a key head that a pass's context is shared out among.

    A context that is longer than the share of one of them is split; in a batch of equal contexts that fills the device
    none is. On an H200 (32 key heads of width 128) one program takes 24 ns a token, so that one context of 4,000 tokens
    among ten short ones held up each layer by 95 us, where all of them together need 30.
    """
    filled = PROGRAMS_A_PROCESSOR * processors
    if tiles * kv_heads > CROWDED * filled:
        return 1
    finer = FINER if tiles * kv_heads > filled and not long else 1
    return max(1, finer * filled // kv_heads)


def head_slices(kv_heads: int, elements: int) -> list[tuple[int, int]]:
    """(first key head, key heads) of each launch, where one key head has that many elements of partial results."""
    count = kv_heads if not elements else max(1, min(kv_heads, 2 * WORKSPACE_ELEMENTS // elements))
    return [(first, min(count, kv_heads - first)) for first in range(0, kv_heads, count)]
