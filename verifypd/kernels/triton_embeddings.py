"""The Triton kernels that embed tokens and norm them. Know pointers and tiles; nothing of who launches them.

Names in capitals are compile-time constants. One program takes a row, rounded where the torch kernels round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verifypd.kernels.triton_kernels import after_the_kernel_before, normed


@triton.jit
def embedded(ids, table, row, column, inside, scale, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """The float32 row of a token, times `scale` where SCALED."""
    wide = tl.load(table + tl.load(ids + row) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        wide = (wide * scale).to(table.dtype.element_ty).to(tl.float32)
    return wide


@triton.jit(do_not_specialize_on_alignment=["ids"])
def embed_norm_rows(
    ids,  # [N] int64
    table,  # [V, WIDTH]
    weight,  # [WIDTH]
    stream,  # out [N, WIDTH]: the rows
    out,  # out [N, WIDTH]: the same normed
    scale,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH padded to a power of two
    SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: rows."""
    if PDL:
        after_the_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = embedded(ids, table, row, column, inside, scale, WIDTH, SCALED)
    kind = out.dtype.element_ty
    tl.store(stream + row * WIDTH + column, wide.to(kind), mask=inside)
    tl.store(out + row * WIDTH + column, normed(wide, weight, column, inside, eps, WIDTH, UNIT, kind), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def embed_beside_rows(
    ids,  # [N] int64
    table,  # [V, WIDTH]
    weight,  # [WIDTH], as the other: read where NORMED
    features,  # [N, WIDTH], rows features_row apart
    features_weight,
    out,  # [N, 2 WIDTH]
    kept,  # out [N, WIDTH], where NORMED: features as they are in `out`
    features_row,
    scale,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens and, beside them, features. Grid: rows, halves."""
    if PDL:
        after_the_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = out.dtype.element_ty
    place = out + row * 2 * WIDTH + column
    if tl.program_id(1) == 0:
        wide = embedded(ids, table, row, column, inside, scale, WIDTH, SCALED)
        if NORMED:
            wide = normed(wide, weight, column, inside, eps, WIDTH, False, kind).to(tl.float32)
        tl.store(place, wide.to(kind), mask=inside)
    else:
        wide = tl.load(features + row * features_row + column, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            wide = normed(wide, features_weight, column, inside, eps, WIDTH, False, kind).to(tl.float32)
            tl.store(kept + row * WIDTH + column, wide.to(kind), mask=inside)
        tl.store(place + WIDTH, wide.to(kind), mask=inside)
