"""The Triton kernels of paged attention. Know pointers, strides and tiles; nothing of who launches them.

Names in capitals are compile-time constants. Scores are in base 2: exp2 is the instruction the device has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verifypd.attention.triton_plans import PAIR
from verifypd.kernels.triton_kernels import after_the_kernel_before, as_stored

FLOOR: tl.constexpr = tl.constexpr(-1e30)  # stands for -inf where a difference is taken
MERGED_ELEMENTS: tl.constexpr = tl.constexpr(4096)  # of partial results, merged at once
MOST_BLOCKS: tl.constexpr = tl.constexpr(8)  # of the pool, that are read one by one for a block of keys


@triton.jit
def write_cache(
    k,  # [N, KV_HEADS * WIDTH], rows k_row apart
    v,
    cache_k,  # [places, KV_HEADS * WIDTH]
    cache_v,
    scales,  # float32 [2, KV_HEADS], of keys and values; not read unless SCALED
    write_index,  # [N] int64
    k_row,
    v_row,
    ELEMENTS: tl.constexpr,  # KV_HEADS * WIDTH
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of a row go to the place its index names. Grid: rows, parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(write_index + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ELEMENTS
    key = tl.load(k + row * k_row + column, mask=inside)
    value = tl.load(v + row * v_row + column, mask=inside)
    head = tl.minimum(column // WIDTH, ELEMENTS // WIDTH - 1)
    key = as_stored(key, scales, head, cache_k.dtype.element_ty, SCALED)
    value = as_stored(value, scales, ELEMENTS // WIDTH + head, cache_v.dtype.element_ty, SCALED)
    tl.store(cache_k + place * ELEMENTS + column, key, mask=inside)
    tl.store(cache_v + place * ELEMENTS + column, value, mask=inside)


@triton.jit
def rotate_and_write(
    q,  # [N, Q_HEADS, WIDTH], rows q_row apart; rotated in place
    k,  # [N, KV_HEADS, WIDTH], rows k_row apart
    v,
    cache_k,  # [places, KV_HEADS, WIDTH]
    cache_v,
    scales,  # float32 [2, KV_HEADS], of keys and values; not read unless SCALED
    write_index,  # [N] int64
    positions,  # [N] int64
    cos,  # float32 [T, HALF]
    sin,
    q_row,
    k_row,
    v_row,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,  # dimensions past 2 HALF are not rotated
    SCALED: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads of a program
    BLOCK_D: tl.constexpr,  # HALF padded to a power of two
    BLOCK_W: tl.constexpr,  # WIDTH padded
    PDL: tl.constexpr,
):
    """Queries rotate in place, keys on their way to the cache. Grid: rows, parts of the query, key and value heads."""
    q_parts: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    kv_parts: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        after_the_kernel_before()
    target = tl.load(write_index + row) * KV_HEADS * WIDTH
    if part >= q_parts + kv_parts:
        head = (part - q_parts - kv_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        w = tl.arange(0, BLOCK_W)
        held = (head < KV_HEADS)[:, None] & (w < WIDTH)[None, :]
        place = head[:, None] * WIDTH + w[None, :]
        value = tl.load(v + row * v_row + place, mask=held)
        by = KV_HEADS + tl.minimum(head, KV_HEADS - 1)[:, None]
        tl.store(cache_v + target + place, as_stored(value, scales, by, cache_v.dtype.element_ty, SCALED), mask=held)
        return
    d = tl.arange(0, BLOCK_D)
    position = tl.load(positions + row)
    c = tl.load(cos + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
    if part < q_parts:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        held = (head < Q_HEADS)[:, None] & (d < HALF)[None, :]
        place = head[:, None] * WIDTH + d[None, :]
        source = q + row * q_row + place
        low = tl.load(source, mask=held, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=held, other=0.0).to(tl.float32)
        tl.store(source, (low * c - high * s).to(q.dtype.element_ty), mask=held)
        tl.store(source + HALF, (high * c + low * s).to(q.dtype.element_ty), mask=held)
    else:
        head = (part - q_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        held = (head < KV_HEADS)[:, None] & (d < HALF)[None, :]
        place = head[:, None] * WIDTH + d[None, :]
        source = k + row * k_row + place
        low = tl.load(source, mask=held, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=held, other=0.0).to(tl.float32)
        # rounded to the queries' type first: the cache may be wider
        kind = k.dtype.element_ty
        narrow = cache_k.dtype.element_ty
        by = tl.minimum(head, KV_HEADS - 1)[:, None]
        below, above = (low * c - high * s).to(kind), (high * c + low * s).to(kind)
        tl.store(cache_k + target + place, as_stored(below, scales, by, narrow, SCALED), mask=held)
        tl.store(cache_k + target + place + HALF, as_stored(above, scales, by, narrow, SCALED), mask=held)
        if WIDTH > 2 * HALF:
            w = tl.arange(0, BLOCK_W)
            rest = (head < KV_HEADS)[:, None] & ((w >= 2 * HALF) & (w < WIDTH))[None, :]
            tail = head[:, None] * WIDTH + w[None, :]
            kept = tl.load(k + row * k_row + tail, mask=rest)
            tl.store(cache_k + target + tail, as_stored(kept, scales, by, narrow, SCALED), mask=rest)


# two pairs of e4m3, of which the first or the second become two float16
EVEN: tl.constexpr = tl.constexpr(
    "{.reg .b16 a, b; .reg .b32 g; prmt.b32 g, $1, 0, 0x20; mov.b32 {a, b}, g; cvt.rn.f16x2.e4m3x2 $0, a;}"
)
ODD: tl.constexpr = tl.constexpr(EVEN.value.replace("0x20", "0x31"))


@triton.jit
def _widened(pair, odd: tl.constexpr, kind: tl.constexpr):
    """The first or second e4m3 of each pair that was read as an int16."""
    if kind == tl.float16:
        return tl.inline_asm_elementwise(ODD if odd else EVEN, "=r,r", [pair], tl.float16, is_pure=True, pack=2)
    else:
        byte = (pair >> 8 if odd else pair).to(tl.int8)
        return byte.to(tl.float8e4nv, bitcast=True).to(kind)


@triton.jit
def _absorb(
    begin,  # first key of the block
    high,  # keys from here on are nobody's
    query,  # [BLOCK_M, BLOCK_D]
    top,  # [BLOCK_M] highest score so far
    total,  # [BLOCK_M] sum of weights, relative to it
    mixed,  # [BLOCK_M, BLOCK_D] weighted values, likewise; where PAIRS, of even dimensions
    other,  # those of odd dimensions; not read unless PAIRS
    position,  # [BLOCK_M]
    lowest,  # key that may be seen; not read unless BEGINS
    cache_k,
    cache_v,
    block,  # [BLOCK_N] of the pool, that hold the keys
    head,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BEGINS: tl.constexpr,
    CAPPED: tl.constexpr,
    kind: tl.constexpr,  # in which keys and values are multiplied
    PAIRS: tl.constexpr,  # see `attend_tile`
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # some row may not see some key of the block
):
    """One block of keys and values into the running softmax of a tile."""
    d = tl.arange(0, BLOCK_D)
    key = begin + tl.arange(0, BLOCK_N)
    held = key < high
    place = ((block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + head) * WIDTH
    if MASKED:
        keys = tl.load(cache_k + place[None, :] + d[:, None], mask=held[None, :] & (d < WIDTH)[:, None], other=0.0)
    elif WIDTH < BLOCK_D:
        keys = tl.load(cache_k + place[None, :] + d[:, None], mask=(d < WIDTH)[:, None], other=0.0)
    else:
        keys = tl.load(cache_k + place[None, :] + d[:, None])
    keys = keys.to(kind)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if CAPPED:
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * cap  # tanh, see `_scales`
    if MASKED:
        seen = held[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        if BEGINS:
            seen = seen & (key >= lowest)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(weights, 1)
    if PAIRS:
        d = tl.arange(0, BLOCK_D // 2)
        pairs = cache_v.to(tl.pointer_type(tl.int16)) + place[:, None] // 2 + d[None, :]
        values = tl.load(pairs, mask=held[:, None] & (d < WIDTH // 2)[None, :], other=0)
        weights = weights.to(kind)
        mixed = tl.dot(weights, _widened(values, False, kind), mixed * fade[:, None], input_precision="ieee")
        other = tl.dot(weights, _widened(values, True, kind), other * fade[:, None], input_precision="ieee")
        return higher, total, mixed, other
    if MASKED:
        values = tl.load(cache_v + place[:, None] + d[None, :], mask=held[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif WIDTH < BLOCK_D:
        values = tl.load(cache_v + place[:, None] + d[None, :], mask=(d < WIDTH)[None, :], other=0.0)
    else:
        values = tl.load(cache_v + place[:, None] + d[None, :])
    values = values.to(kind)
    mixed = mixed * fade[:, None]
    mixed = tl.dot(weights.to(kind), values, mixed, input_precision="ieee")
    return higher, total, mixed, other


@triton.jit
def _held_in(blocks, begin, high, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of the pool that hold the keys from `begin` on, by the request's row of the block table.

    `begin` is a multiple of BLOCK_N. Where that is a few blocks, each is read once and handed to its keys: a load for
    each key takes half as many registers again, and a tenth longer.
    """
    key = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0 and BLOCK_N <= MOST_BLOCKS * BLOCK_SIZE:
        block = tl.zeros([BLOCK_N], tl.int32)
        for i in tl.static_range(BLOCK_N // BLOCK_SIZE):
            first = begin + i * BLOCK_SIZE
            one = tl.load(blocks + first // BLOCK_SIZE, mask=first < high, other=0)
            block = tl.where(key // BLOCK_SIZE == i, one, block)
        return block
    else:
        return tl.load(blocks + (begin + key) // BLOCK_SIZE, mask=begin + key < high, other=0)


@triton.jit
def _merge(
    partial, summary, first, step, shares, real,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What a tile's splits found together, whoever merges them: they are read anew, in order, past what L1 holds.

    first: partial result of the tile's first row in split 0; those of the next split lie `step` further on.
    """
    MERGED: tl.constexpr = min(8, max(1, MERGED_ELEMENTS // (BLOCK_M * BLOCK_D)))  # splits at once
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(0, shares, MERGED):
        split = begin + tl.arange(0, MERGED)
        there = (split < shares)[:, None] & real[None, :]
        at = first + (split * step)[:, None] + m[None, :]
        kept = there[:, :, None] & (d < WIDTH)[None, None, :]
        parts = tl.load(
            partial + at[:, :, None] * WIDTH + d[None, None, :], mask=kept, other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        top = tl.load(summary + at * 2, mask=there, other=FLOOR, cache_modifier=".cg")
        sums = tl.load(summary + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(best, tl.max(top, 0))
        fade = tl.exp2(best - higher)
        weight = tl.exp2(top - higher[None, :])
        total = total * fade + tl.sum(sums * weight, 0)
        mixed = mixed * fade[:, None] + tl.sum(parts * weight[:, :, None], 0)
        best = higher
    return mixed / tl.maximum(total, 1e-30)[:, None]


@triton.jit(
    do_not_specialize=["first_head", "held", "splits", "tile_rows"],
    do_not_specialize_on_alignment=["members", "row_offsets", "slots", "starts", "begins"],  # parts of one tensor
)
def attend_tile(
    q,  # [N, HEADS, WIDTH], rows q_row apart
    cache_k,  # [places, KV_HEADS, WIDTH]
    cache_v,
    scales,  # float32 [2, KV_HEADS], of keys and values; not read unless SCALED
    out,  # [N, HEADS, WIDTH]
    partial,  # float32 [tiles with several splits, splits, held, tile_rows * SHARED, WIDTH]: not normalised
    summary,  # float32, the same with 2 instead of WIDTH: highest score and sum of weights
    pairs,  # int32 [pairs, PAIR]: first row of a tile, its rows, start, slot, lowest key, split, shares, and which of
    # the tiles with several splits it is
    counters,  # int32 [tiles with several splits, KV_HEADS]: programs that are done; 0 before a launch and behind it
    members,  # [members] int32, spans of this launch; not read unless LISTED
    row_offsets,  # [R + 1] int64
    slots,  # [R] int64
    starts,  # [R] int64
    begins,  # [S] int64, first position of a slot that holds a key; not read unless BEGINS
    block_table,  # [S, table_row] int32
    q_row,
    table_row,
    first_head,  # key head, of the launch
    held,  # key heads of the launch
    splits,  # most that share a context: a number, not a constant, for each constant is compiled
    tile_rows,  # query rows that a tile has at most
    scale,  # of the scores, in base 2; without the cap where there is one
    cap,  # of the scores, in base 2
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,  # WIDTH padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BEGINS: tl.constexpr,
    CAPPED: tl.constexpr,
    LISTED: tl.constexpr,
    UNMASKED: tl.constexpr,  # whether to go through blocks without a mask first: pays where rows and keys are many
    WIDEN: tl.constexpr,  # compute in float32 whatever is stored
    SCALED: tl.constexpr,  # the cache is e4m3 with scales
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRED: tl.constexpr,  # whether programs find their tile and split in `pairs`, and read no span
    SPLIT: tl.constexpr,  # whether splits > 1; PAIRED then
    SPLIT_TOKENS: tl.constexpr,
    PDL: tl.constexpr,  # the kernel before wrote queries, keys or values, and neither pairs nor lengths
):
    """Attention of one tile over one split of its context; the program that is done last merges the tile's splits.

    Grid: pairs times key heads where PAIRED, else tiles, key heads, members. All heads of a pair come before the next
    pair: programs without work then come last. Among the others they would leave some processors more work than others.
    """
    SHARED: tl.constexpr = HEADS // KV_HEADS
    if PAIRED:
        number = tl.program_id(0) // held
        head = first_head + tl.program_id(0) % held
    else:
        number = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile has most context
        head = first_head + tl.program_id(1)
    split = 0
    shares = 1
    lowest = 0
    pair = pairs + number * PAIR
    if PAIRED:
        first_row = tl.load(pair).to(tl.int64)
        rows = tl.load(pair + 1)
        start = tl.load(pair + 2)
        slot = tl.load(pair + 3).to(tl.int64)
        if BEGINS:
            lowest = tl.load(pair + 4)
        known = tl.load(pair + 6)
        if SPLIT:
            split = tl.load(pair + 5)
            shares = known
        if known == 0:
            if PDL:
                after_the_kernel_before()
            return
    else:
        span = tl.program_id(2)
        if LISTED:
            span = tl.load(members + span)
        first_row = tl.load(row_offsets + span)
        tile_row = number * BLOCK_Q
        rows = (tl.load(row_offsets + span + 1) - first_row).to(tl.int32) - tile_row  # from the tile's first on
        if rows <= 0:
            if PDL:
                after_the_kernel_before()
            return
        first_row += tile_row
        slot = tl.load(slots + span)
        start = tl.load(starts + span).to(tl.int32) + tile_row
        if BEGINS:
            lowest = tl.load(begins + slot).to(tl.int32)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m // SHARED  # within the tile
    query_head = head * SHARED + m % SHARED
    real = (m < BLOCK_Q * SHARED) & (row < rows)
    position = tl.maximum(start + row, 0)
    inside = d < WIDTH

    # keys low..high - 1 hold all that rows of the tile may see; then this split's share of them
    low = 0
    high = tl.maximum(start + tl.minimum(rows, BLOCK_Q), 1)
    if WINDOW > 0:
        low = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if BEGINS:
        low = tl.maximum(low, lowest // BLOCK_N * BLOCK_N)
    if SPLIT_TOKENS > 0:
        low = tl.maximum(low, split * SPLIT_TOKENS)
        high = tl.minimum(high, (split + 1) * SPLIT_TOKENS)
    elif SPLIT:
        share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), shares) * BLOCK_N
        low += split * share
        high = tl.minimum(high, low + share)

    blocks = block_table + slot * table_row
    # the block table is read one round ahead: keys whose place is known are fetched while others are multiplied
    block = _held_in(blocks, low, high, BLOCK_SIZE, BLOCK_N)
    if PDL:  # what was read so far is older than the kernel before
        after_the_kernel_before()
    q_place = (first_row + row)[:, None] * q_row + (query_head * WIDTH)[:, None] + d[None, :]
    query = tl.load(q + q_place, mask=real[:, None] & inside[None, :], other=0.0)
    # e4m3 widens to float16 in one instruction and to bfloat16 in three; queries then keep all their bits, too
    kind: tl.constexpr = tl.float32 if WIDEN else tl.float16 if SCALED else cache_k.dtype.element_ty
    if SCALED:
        scale *= tl.load(scales + head)
        if not WIDEN:
            query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0)
    query = query.to(kind)
    top = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    PAIRS: tl.constexpr = SCALED and BLOCK_M < 64 and BLOCK_D >= 64 and WIDTH % 2 == 0
    mixed = tl.zeros([BLOCK_M, BLOCK_D // 2 if PAIRS else BLOCK_D], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32) if PAIRS else total
    masked = low
    if UNMASKED:  # blocks of keys that every row sees whole
        masked += tl.maximum(tl.minimum(high, start + 1) - low, 0) // BLOCK_N * BLOCK_N
        for begin in range(low, masked, BLOCK_N):
            following = _held_in(blocks, begin + BLOCK_N, high, BLOCK_SIZE, BLOCK_N)
            top, total, mixed, other = _absorb(
                begin, high, query, top, total, mixed, other, position, lowest, cache_k, cache_v, block, head, scale,
                cap, KV_HEADS, WIDTH, BLOCK_D, BLOCK_SIZE, WINDOW, BEGINS, CAPPED, kind, PAIRS, BLOCK_N, False,
            )  # fmt: skip
            block = following
    for begin in range(masked, high, BLOCK_N):
        following = _held_in(blocks, begin + BLOCK_N, high, BLOCK_SIZE, BLOCK_N)
        top, total, mixed, other = _absorb(
            begin, high, query, top, total, mixed, other, position, lowest, cache_k, cache_v, block, head, scale, cap,
            KV_HEADS, WIDTH, BLOCK_D, BLOCK_SIZE, WINDOW, BEGINS, CAPPED, kind, PAIRS, BLOCK_N, True,
        )  # fmt: skip
        block = following

    if PAIRS:
        mixed = tl.reshape(tl.join(mixed, other), [BLOCK_M, BLOCK_D])
    kept = real[:, None] & inside[None, :]
    if SPLIT:  # read again: kept through the loop they cost 32 registers, and a quarter of the programs at a time
        split = tl.load(pair + 5, cache_modifier=".ca")
        shares = tl.load(pair + 6, cache_modifier=".ca")
    if shares > 1:
        tile = tl.load(pair + 7)
        step = held * tile_rows * SHARED
        first = (tile * splits * step + (head - first_head) * tile_rows * SHARED).to(tl.int64)
        at = first + split * step + m
        tl.store(partial + at[:, None] * WIDTH + d[None, :], mixed, mask=kept)
        tl.store(summary + at * 2, top, mask=real)
        tl.store(summary + at * 2 + 1, total, mask=real)
        tl.debug_barrier()  # all of the program's stores come before its count
        counter = counters + tile * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == shares - 1:
            o_place = ((first_row + row) * HEADS + query_head)[:, None] * WIDTH + d[None, :]
            merged = _merge(partial, summary, first, step, shares, real, WIDTH, BLOCK_D, BLOCK_M)
            if SCALED:
                merged *= tl.load(scales + KV_HEADS + head)
            tl.store(out + o_place, merged.to(out.dtype.element_ty), mask=kept)
            tl.store(counter, 0)  # for the next layer
    else:
        o_place = ((first_row + row) * HEADS + query_head)[:, None] * WIDTH + d[None, :]
        result = mixed / tl.maximum(total, 1e-30)[:, None]  # padding rows may have seen nothing
        if SCALED:
            result *= tl.load(scales + KV_HEADS + head)
        tl.store(out + o_place, result.to(out.dtype.element_ty), mask=kept)
