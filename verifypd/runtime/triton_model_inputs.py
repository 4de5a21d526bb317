"""The Triton kernel that prepares what a model reads of a padded pass. Knows pointers; nothing of who launches it.

Names in capitals are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verifypd.kernels.triton_kernels import after_the_kernel_before


@triton.jit
def begun(span, inside, slots, own, back, given, lengths, depth, STEP: tl.constexpr):
    """Slot and first position of spans."""
    slot = tl.load(slots + span, mask=inside, other=0)
    length = tl.load(lengths + slot, mask=inside, other=0)
    if STEP:
        start = tl.where(tl.load(own + span, mask=inside, other=-1) < 0, -1, length - 1 + depth)
    else:
        fixed = tl.load(given + span, mask=inside, other=0)
        start = tl.where(fixed < 0, length - tl.load(back + span, mask=inside, other=0), fixed)
    return slot, start


# Parts of one tensor: whether one begins on a 16-byte border must not make another kernel.
@triton.jit(
    do_not_specialize=["spans", "rows", "depth", "widest"],
    do_not_specialize_on_alignment=["slots", "own", "back", "given", "row_span", "within", "depths"],
)
def prepare_rows(
    slots,  # [R] int64
    own,  # [R] int64, negative: a void span; read where STEP
    back,  # [R] int64, tokens before its slot's end that a span begins
    given,  # [R] int64, or its first position where that is not negative
    row_span,  # [N] int64
    within,  # [N] int64, offset in the span
    depths,  # [N] int64, depth of a drafted token + 1; 0: a confirmed one
    lengths,  # [S] int64
    table,  # [S, table_row] int32
    first,  # [S] int64, positions before it hold nothing; read where BEGINS
    tokens,  # [S, tokens_row] int64
    drafts,  # [S, drafts_row] int64
    starts,  # out [R] int64
    positions,  # out [N] int64, as the others
    write_index,
    ids,
    spans,
    rows,
    depth,  # of a step
    widest,  # columns of drafts
    table_row,
    tokens_row,
    drafts_row,
    BLOCK_SIZE: tl.constexpr,
    BEGINS: tl.constexpr,
    STEP: tl.constexpr,  # one row a span, the token drafted at depth - 1; row_span, within and depths are not read
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Starts of spans; positions, write indices and token ids of their rows. Grid: blocks of spans and rows."""
    if PDL:
        after_the_kernel_before()
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, start = begun(each, each < spans, slots, own, back, given, lengths, depth, STEP)
    tl.store(starts + each, start, mask=each < spans)
    inside = each < rows
    raw = start  # the position; before the text it is negative
    if not STEP:
        span = tl.load(row_span + each, mask=inside, other=0)
        slot, start = begun(span, inside, slots, own, back, given, lengths, depth, STEP)
        raw = start + tl.load(within + each, mask=inside, other=0)
    position = tl.maximum(raw, 0)
    index = position // BLOCK_SIZE
    block = tl.load(table + slot * table_row + index, mask=inside, other=0).to(tl.int64)
    void = raw < 0
    if BEGINS:
        void = raw < tl.load(first + slot, mask=inside, other=0)
    tl.store(positions + each, position, mask=inside)
    tl.store(write_index + each, tl.where(void, 0, position + (block - index) * BLOCK_SIZE), mask=inside)
    if STEP:
        token = tl.load(drafts + slot * drafts_row + depth - 1, mask=inside, other=0)
    else:
        at = tl.load(depths + each, mask=inside, other=0)
        drafted = inside & (at > 0)
        token = tl.load(tokens + slot * tokens_row + position, mask=inside & (at <= 0), other=0)
        draft = tl.load(drafts + slot * drafts_row + tl.minimum(at, widest) - 1, mask=drafted, other=0)
        token = tl.where(drafted, draft, token)
    tl.store(ids + each, token, mask=inside)
