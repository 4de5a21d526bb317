"""The Triton kernels that plan a pass of attention: which programs share which tile. Know lengths; read no keys.

Names in capitals are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCANNED: tl.constexpr = tl.constexpr(32)  # spans whose lengths are read at once
PLANNED: tl.constexpr = tl.constexpr(128)  # pairs that one program of plan_pairs writes
PAIR: tl.constexpr = tl.constexpr(8)  # numbers of a pair


@triton.jit
def shares_of(
    start,  # of a span
    rows,
    lowest,  # key that may be seen
    total,  # tokens of context that all tiles of the launch have
    workers,  # among which it is shared out
    splits,  # most there may be
    least,  # tokens of a split
    BLOCK_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
):
    """Programs that share the context of each tile of a span: as many as it has times the share of a worker."""
    if SPLIT_TOKENS > 0:
        wanted = tl.cdiv(tl.maximum(start + rows, 1), SPLIT_TOKENS)
    else:
        reach = reach_of(start, rows, lowest, BLOCK_Q, WINDOW)
        even = (reach.to(tl.int64) * workers // total).to(tl.int32)
        wanted = tl.maximum(tl.minimum(tl.cdiv(reach, least), even), 1)
    return tl.minimum(wanted, splits)


@triton.jit
def reach_of(start, rows, lowest, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr):
    """Tokens of context that a tile of a span reads, about."""
    reach = tl.maximum(start + rows - lowest, 1)
    if WINDOW > 0:
        reach = tl.minimum(reach, WINDOW + BLOCK_Q)
    return reach


@triton.jit
def _extents(
    begin, count, members, row_offsets, slots, starts, begins, BEGINS: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """Start, rows and lowest key of SCANNED members from `begin` on; members that are not there have no rows."""
    span = begin + tl.arange(0, SCANNED)
    there = span < count
    if LISTED:
        span = tl.load(members + span, mask=there, other=0)
    first = tl.load(row_offsets + span, mask=there, other=0)
    rows = (tl.load(row_offsets + span + 1, mask=there, other=0) - first).to(tl.int32)
    start = tl.load(starts + span, mask=there, other=0).to(tl.int32)
    lowest = tl.zeros_like(rows)
    if BEGINS:
        slot = tl.load(slots + span, mask=there, other=0)
        lowest = tl.load(begins + slot, mask=there, other=0).to(tl.int32)
    return start, rows, lowest


@triton.jit
def _total(
    count, members, row_offsets, slots, starts, begins,
    BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr, BEGINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Tokens of context that all tiles of the launch have."""
    total = 0
    for begin in range(0, count, SCANNED):
        start, rows, lowest = _extents(begin, count, members, row_offsets, slots, starts, begins, BEGINS, LISTED)
        total += tl.sum(tl.cdiv(rows, BLOCK_Q) * reach_of(start, rows, lowest, BLOCK_Q, WINDOW), 0)
    return tl.maximum(total, 1)


@triton.jit
def _find(
    item, count, total, workers, splits, least, members, row_offsets, slots, starts, begins,
    BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr, BEGINS: tl.constexpr, LISTED: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """The member that holds each item (`count` or more: none), the items before that member's, and the tiles with
    several splits before it."""
    member = tl.zeros_like(item)
    passed = tl.zeros_like(item)
    shared = tl.zeros_like(item)
    all_items = 0
    all_shared = 0
    for begin in range(0, count, SCANNED):
        start, rows, lowest = _extents(begin, count, members, row_offsets, slots, starts, begins, BEGINS, LISTED)
        tiles = tl.cdiv(rows, BLOCK_Q)
        items = tiles
        several = tl.zeros_like(tiles)
        if SPLIT:
            shares = shares_of(start, rows, lowest, total, workers, splits, least, BLOCK_Q, WINDOW, SPLIT_TOKENS)
            items = tiles * shares
            several = tl.where(shares > 1, tiles, 0)
        ends = all_items + tl.cumsum(items, 0)
        shared_ends = all_shared + tl.cumsum(several, 0)
        before = ends[None, :] <= item[:, None]
        member += tl.sum(before.to(tl.int32), 1)
        passed = tl.maximum(passed, tl.max(tl.where(before, ends[None, :], 0), 1))
        shared = tl.maximum(shared, tl.max(tl.where(before, shared_ends[None, :], 0), 1))
        all_items += tl.sum(items, 0)
        all_shared += tl.sum(several, 0)
    return member, passed, shared


@triton.jit
def _span(
    member, there, members, row_offsets, slots, starts, begins, BEGINS: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """First row, rows, slot, start and lowest key of each member; zeros where there is none."""
    span = member
    if LISTED:
        span = tl.load(members + member, mask=there, other=0)
    first_row = tl.load(row_offsets + span, mask=there, other=0).to(tl.int32)
    rows = tl.load(row_offsets + span + 1, mask=there, other=0).to(tl.int32) - first_row
    slot = tl.load(slots + span, mask=there, other=0)
    start = tl.load(starts + span, mask=there, other=0).to(tl.int32)
    lowest = tl.zeros_like(rows)
    if BEGINS:
        lowest = tl.load(begins + slot, mask=there, other=0).to(tl.int32)
    return first_row, rows, slot, start, lowest


@triton.jit
def _tiles(
    item, count, members, row_offsets, slots, starts, begins,
    BLOCK_Q: tl.constexpr, BEGINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """First row, rows, start, slot and lowest key of tiles, counted through all members; no rows: there is no tile."""
    member, passed, _ = _find(
        item, count, 1, 1, 1, 1, members, row_offsets, slots, starts, begins, BLOCK_Q, 0, BEGINS, LISTED, False, 0
    )  # fmt: skip
    first_row, rows, slot, start, lowest = _span(
        member, member < count, members, row_offsets, slots, starts, begins, BEGINS, LISTED
    )  # fmt: skip
    tile_row = (item - passed) * BLOCK_Q
    return first_row + tile_row, tl.minimum(rows - tile_row, BLOCK_Q), start + tile_row, slot, lowest


@triton.jit
def _write(pair, known, first_row, held, start, slot, lowest, split, shares, shared):
    """Pairs of tile and split, as `attend_tile` reads them."""
    tl.store(pair, first_row, mask=known)
    tl.store(pair + 1, held, mask=known)
    tl.store(pair + 2, start, mask=known)
    tl.store(pair + 3, slot.to(tl.int32), mask=known)
    tl.store(pair + 4, lowest, mask=known)
    tl.store(pair + 5, split, mask=known)
    tl.store(pair + 6, shares, mask=known)
    tl.store(pair + 7, shared, mask=known)


@triton.jit(
    do_not_specialize=["count", "pair_count", "counter_count", "splits", "workers", "least"],
    do_not_specialize_on_alignment=["members", "row_offsets", "slots", "starts", "begins"],  # parts of one tensor
)
def plan_pairs(
    pairs,  # int32 [pair_count, PAIR]: see `attend_tile`
    counters,  # int32 [counter_count]: likewise
    members,  # [count] int32, spans of this launch; not read unless LISTED
    row_offsets,  # [R + 1] int64
    slots,  # [R] int64
    starts,  # [R] int64
    begins,  # [S] int64, first position of a slot that holds a key; not read unless BEGINS
    count,  # members
    pair_count,
    counter_count,
    splits,  # most that share a context
    workers,  # programs of a key head among which the context of the pass is shared out
    least,  # tokens of a split
    BLOCK_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    BEGINS: tl.constexpr,
    LISTED: tl.constexpr,
    SPLIT: tl.constexpr,  # whether splits > 1
    SPLIT_TOKENS: tl.constexpr,
):
    """What programs of `attend_tile` do in all layers of a pass. Grid: pairs, PLANNED for each program."""
    total = 1
    if SPLIT and SPLIT_TOKENS == 0:
        total = _total(count, members, row_offsets, slots, starts, begins, BLOCK_Q, WINDOW, BEGINS, LISTED)
    item = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    member, passed, shared = _find(
        item, count, total, workers, splits, least, members, row_offsets, slots, starts, begins,
        BLOCK_Q, WINDOW, BEGINS, LISTED, SPLIT, SPLIT_TOKENS,
    )  # fmt: skip
    there = member < count
    first_row, rows, slot, start, lowest = _span(
        member, there, members, row_offsets, slots, starts, begins, BEGINS, LISTED
    )  # fmt: skip
    tiles = tl.maximum(tl.cdiv(rows, BLOCK_Q), 1)
    tile = (item - passed) % tiles  # tiles of one split lie in a run: they read the same keys
    split = (item - passed) // tiles
    tile_row = tile * BLOCK_Q
    held = tl.minimum(rows - tile_row, BLOCK_Q)
    shares = tl.full([PLANNED], 1, tl.int32)
    if SPLIT:
        shares = shares_of(start, rows, lowest, total, workers, splits, least, BLOCK_Q, WINDOW, SPLIT_TOKENS)
    if SPLIT and SPLIT_TOKENS > 0:  # the span's last tile may have more than others
        shares = tl.cdiv(tl.maximum(start + tile_row + held, 1), SPLIT_TOKENS)
        shares = tl.where(split < shares, shares, 0)
    shares = tl.where(there, shares, 0)

    known = item < pair_count
    _write(
        pairs + item * PAIR, known, first_row + tile_row, held, start + tile_row, slot, lowest, split, shares,
        shared + tile,
    )  # fmt: skip
    if SPLIT:
        for begin in range(tl.program_id(0) * PLANNED, counter_count, tl.num_programs(0) * PLANNED):
            counter = begin + tl.arange(0, PLANNED)
            tl.store(counters + counter, tl.zeros_like(counter), mask=counter < counter_count)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b)


@triton.jit(
    do_not_specialize=["count", "pair_count", "counter_count", "shared_tiles", "splits", "workers", "least"],
    do_not_specialize_on_alignment=["members", "row_offsets", "slots", "starts", "begins"],  # parts of one tensor
)
def plan_sorted(
    pairs,  # these seven: as of `plan_pairs`
    counters,
    members,
    row_offsets,
    slots,
    starts,
    begins,
    count,  # members
    pair_count,
    counter_count,
    shared_tiles,  # that may have several splits
    splits,  # most that share a context
    workers,  # programs of a key head that run at once
    least,  # tokens of a split
    BLOCK_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    BEGINS: tl.constexpr,
    LISTED: tl.constexpr,
    TILES: tl.constexpr,  # at least as many as there are, a power of two
):
    """As `plan_pairs`, for prompt chunks and for short spans that fill the device twice. Grid: one program.

    Tiles are sorted, most context first, and begin in rounds of one tile a worker. What is left when a round begins is
    shared out evenly among the workers; a tile of n such shares gets n programs. In full rounds that is one program a
    tile, in the last round it may be more, and so it is for a tile that is longer than its share of the whole pass.
    """
    item = tl.arange(0, TILES)
    rank = item
    _, held, start, _, lowest = _tiles(
        item, count, members, row_offsets, slots, starts, begins, BLOCK_Q, BEGINS, LISTED
    )  # fmt: skip
    reach = tl.where(held > 0, reach_of(start, held, lowest, BLOCK_Q, WINDOW), 0)
    order = tl.sort(reach.to(tl.int64) * TILES + (TILES - 1 - item), descending=True)
    item = (TILES - 1 - order % TILES).to(tl.int32)
    reach = (order // TILES).to(tl.int32)
    first_row, held, start, slot, lowest = _tiles(
        item, count, members, row_offsets, slots, starts, begins, BLOCK_Q, BEGINS, LISTED
    )  # fmt: skip

    tokens = reach.to(tl.int64)
    done = tl.cumsum(tokens, 0) - tokens
    left = tl.sum(tokens, 0) - tl.associative_scan(tl.where(rank % workers == 0, done, 0), 0, _higher)
    left = tl.maximum(left, 1)
    even = ((2 * tokens * workers + left) // (2 * left)).to(tl.int32)  # rounded
    shares = tl.maximum(tl.minimum(tl.minimum(even, tl.cdiv(reach, least)), splits), 1)
    # the host's bounds leave room for what is wanted but in rare passes, where the lightest tiles stay whole
    fits = tl.cumsum((shares > 1).to(tl.int32), 0) <= shared_tiles
    fits = fits & (tl.cumsum(shares - 1, 0) <= pair_count - tl.sum((reach > 0).to(tl.int32), 0))
    shares = tl.where(reach > 0, tl.where(fits, shares, 1), 0)

    ends = tl.cumsum(shares, 0)
    shared = tl.cumsum((shares > 1).to(tl.int32), 0) - 1
    for split in range(tl.max(shares, 0)):
        pair = pairs + (ends - shares + split) * PAIR
        _write(pair, split < shares, first_row, held, start, slot, lowest, split, shares, shared)
    for begin in range(tl.sum(shares, 0), pair_count, TILES):
        tl.store(pairs + (begin + rank) * PAIR + 6, tl.zeros_like(rank), mask=begin + rank < pair_count)
    for begin in range(0, counter_count, TILES):
        tl.store(counters + begin + rank, tl.zeros_like(rank), mask=begin + rank < counter_count)
