"""How attention is cut into programs: tiles of query rows, splits of the context. Pure; knows no tensors.

Everything here follows from bounds the host knows before a launch, never from what the device holds, so that a captured
launch stays right when lengths change. How many of the possible splits a context gets is decided on the device, by the
lengths there (triton_plans.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from verifypd.kernels.tiles import power_of_two

LEAST_ROWS = 16  # of a matrix instruction
SHORT_ROWS = 16  # spans up to this many rows are plain tokens and verify spans; longer ones are prompt chunks
TILE = 64  # rows of a tile at most, query rows times heads
CHUNK_TILE = 128  # of prompt chunks, where heads are wide and the device has the memory: a fifth faster on an H200
ROOMY = 160 * 1024  # bytes of shared memory that a program may have, for such tiles with three blocks of keys under way
SPLIT_TOKENS = 512  # of context in a split, where the batch may not decide it
LEAST_SPLIT = 256  # tokens: shorter splits cost more in merging than they gain
LEAST_CHUNK_SPLIT = 512  # the same for prompt chunks, whose partial results are large
MOST_SPLITS = 64
MOST_SORTED = 512  # tiles; where there are more, the order gains little
LEAST_SORTED = 64  # a kernel is compiled for each power of two from here on
PROGRAMS_A_PROCESSOR = 2  # what fills the device; of large tiles of prompt chunks one does
FINER = 2  # times that many, where plain tokens and verify spans fill it: programs that start last are to be short
WORKSPACE_ELEMENTS = 1 << 24  # of partial results of one launch, float32: 64 MiB


@dataclass(frozen=True, slots=True)
class Tiling:
    """One launch over some spans. A program takes `block_q` rows of a span, with all query heads of one key head."""

    block_m: int  # rows of a tile, query rows times heads, padded to a power of two
    block_q: int  # query rows of a tile
    block_n: int  # tokens of context read at once
    tiles: int  # of the longest span
    pairs: int  # of tile and split that there are at most, in each key head; 0: there is no list of them
    splits: int  # programs that share the context of a tile, at most
    workers: int  # the pass's context is shared out among that many programs of a key head
    sorted_tiles: int  # as many as there may be, to a power of two, most context first; 0: they are not sorted
    least: int  # tokens of a split
    split_tokens: int  # tokens of a split, fixed; 0: the context of each tile is divided evenly
    tile_rows: int  # query rows that a tile has at most
    shared_tiles: int  # that may have several splits
    warps: int
    stages: int  # reads of the context under way at once
    few: bool  # small tiles, times key heads, are at most half the processors: they are short.py's, where that runs

    @property
    def partials(self) -> int:
        """Partial results of a head, one for each row and split."""
        return self.shared_tiles * self.tile_rows * self.splits


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
    shared_memory: int,
    fixed: bool = False,
    fp8: bool = False,
) -> Tiling:
    """The cut for `spans` spans of at most `rows` rows and `context` tokens, in a pass of `pass_rows` rows.

    shared_memory: bytes that a program may have.
    fixed: tiles and splits do not depend on the batch, so a row's sums are taken in the same order in any company.
    fp8: keys and values are e4m3.
    """
    shared = heads // kv_heads
    wide = width > 128
    full = itemsize == 4  # no matrix instructions: float32 products live in registers
    long = rows > SHORT_ROWS
    large = long and not (fixed or full) and 64 < width <= 128 and shared_memory >= ROOMY
    most = (16 if wide else 32) if full else CHUNK_TILE if large else TILE
    block_m = most if fixed else min(power_of_two(rows * shared), most)
    block_m = max(block_m, LEAST_ROWS, power_of_two(shared))
    block_q = block_m // shared
    block_n = 32 if wide or full else 128 if long and width <= 64 and not fixed else 64
    stages = 2 if wide or full or (long and not (fixed or large)) else 3
    warps = 8 if block_m * power_of_two(width) > (2048 if full else 8192) else 4
    tiles = -(-rows // block_q)
    real_tiles = min(spans * tiles, pass_rows // block_q + spans)  # a padded pass has room for more chunks than it has
    tile_rows = min(rows, block_q)
    small = block_m == LEAST_ROWS and not (long or fixed or full or wide)
    few = small and 2 * real_tiles * kv_heads <= processors
    if small:
        if fp8 and shared_memory >= ROOMY:
            block_n = 128  # of half the bytes
        elif not few:
            block_n, warps = 32, 2  # while one waits for its reads others go on: they are to be small and many
    least = LEAST_CHUNK_SPLIT if long else LEAST_SPLIT
    filled = processors if large and block_m > TILE else PROGRAMS_A_PROCESSOR * processors
    if not long and real_tiles * kv_heads > filled:
        filled *= FINER
    workers = max(1, filled // kv_heads)
    sorts = not fixed and real_tiles <= MOST_SORTED and (long or real_tiles >= workers)
    if fixed:
        workers, shared_tiles, splits = 1, real_tiles, -(-max(context, 1) // SPLIT_TOKENS)
        pairs = real_tiles * splits
    else:
        reach = context if window is None else min(context, window + block_q)
        # where a tile gets its share of the whole pass, rounded down, one that is split has what two workers have
        shared_tiles = min(real_tiles, workers if sorts else workers // 2)
        if real_tiles > max(workers, MOST_SORTED):
            workers, shared_tiles = 1, 0  # a long context is little beside the whole pass
        room = WORKSPACE_ELEMENTS // max(shared_tiles * tile_rows * heads * width, 1)
        splits = max(1, min(workers, MOST_SPLITS, room, -(-reach // least)))
        pairs = min(real_tiles * splits, real_tiles + workers)
    by_list = (
        block_m == CHUNK_TILE and sorts and window is None
    )  # chunks.py's, where that runs; elsewhere one launch more
    listed = splits > 1 or spans * tiles > real_tiles or by_list
    return Tiling(
        block_m=block_m,
        block_q=block_q,
        block_n=block_n,
        tiles=tiles,
        pairs=pairs if listed else 0,
        splits=splits,
        workers=workers,
        sorted_tiles=max(power_of_two(real_tiles), LEAST_SORTED) if sorts else 0,
        least=least,
        split_tokens=SPLIT_TOKENS if fixed else 0,
        tile_rows=tile_rows,
        shared_tiles=shared_tiles if splits > 1 else 0,
        warps=warps,
        stages=stages,
        few=few,
    )


def head_slices(kv_heads: int, elements: int) -> list[tuple[int, int]]:
    """(first key head, key heads) of each launch, where one key head has that many elements of partial results."""
    count = kv_heads if not elements else max(1, min(kv_heads, 2 * WORKSPACE_ELEMENTS // elements))
    return [(first, min(count, kv_heads - first)) for first in range(0, kv_heads, count)]
