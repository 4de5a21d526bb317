"""The Triton kernels of a layer's small operations. Know pointers, strides and tiles; nothing of who launches them.

Names in capitals are compile-time constants. One program takes whole rows, so that a row's result never depends on its
neighbours; sums are in float32 and rounded where the torch kernels round.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def after_the_kernel_before():
    """Under programmatic dependent launch: wait for the kernel before, then let the next one take its place.

    Each kernel of a chain must wait so: whoever is behind it then knows that all before it are done. The other way
    round kernels further on take the processors' room too early (4.5 ms for 4.2 of a 7B pass on an H200).
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def as_stored(x, scales, head, kind: tl.constexpr, SCALED: tl.constexpr):
    """Keys or values as a cache of `kind` holds them: over the scale of their head where SCALED, which is for e4m3.

    What lies beyond its range saturates. Rounded to its three bits here, and the conversion changes nothing: Triton's
    interpreter would cut them off.
    """
    if SCALED:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / tl.load(scales + head), -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        fine = (x + 24576.0) - 24576.0  # steps of 2^-9, below 2^-6
        x = tl.where(tl.abs(x) < 0.015625, fine, even.to(tl.float32, bitcast=True))
    return x.to(kind)


@triton.jit
def acted(gate, SILU: tl.constexpr):
    """The activation of float32: SiLU, or GELU by tanh."""
    if SILU:
        small = tl.exp(-tl.abs(gate))
        return gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        small = tl.exp(-2.0 * tl.abs(inner))
        return gate * tl.where(inner >= 0, 1.0, small) / (1.0 + small)  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))


@triton.jit
def normed(wide, weight, column, inside, eps, WIDTH: tl.constexpr, UNIT: tl.constexpr, kind: tl.constexpr):
    """A float32 row over its root mean square, times the weight, in `kind`."""
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    by = tl.load(weight + column, mask=inside, other=0.0)
    if UNIT:
        return (wide * (1.0 + by.to(tl.float32))).to(kind)
    return (wide.to(kind).to(tl.float32) * by.to(kind).to(tl.float32)).to(kind)


@triton.jit
def norm_rows(
    x,  # [N, GROUP, WIDTH], rows x_row apart, groups x_group apart
    weight,  # [WIDTH]
    out,  # [N, GROUP, WIDTH], contiguous
    x_row,
    x_group,
    eps,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH padded to a power of two
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: rows times groups."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        after_the_kernel_before()
    begin = x + program // GROUP * x_row + program % GROUP * x_group
    wide = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    result = normed(wide, weight, column, inside, eps, WIDTH, UNIT, out.dtype.element_ty)
    tl.store(out + program * WIDTH + column, result, mask=inside)


@triton.jit
def add_norm_rows(
    x,  # [N, WIDTH], contiguous, as the others
    residual,
    weight,
    out,
    total,  # out: x + residual
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        after_the_kernel_before()
    added = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    rounded = added.to(kind)
    tl.store(total + row + column, rounded, mask=inside)
    result = normed(rounded.to(tl.float32), weight, column, inside, eps, WIDTH, UNIT, kind)
    tl.store(out + row + column, result, mask=inside)


@triton.jit
def divide_rows(
    x,  # [N, WIDTH], contiguous
    squares,  # float32 [SQUARES, squares_row]: sums of squares of parts of the stream x was made of
    out,  # [N, WIDTH]
    squares_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of a `Normed` as they are meant. Grid: rows."""
    if PDL:
        after_the_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SQUARES_PADDED)
    total = tl.sum(tl.load(squares + part * squares_row + row, mask=part < SQUARES, other=0.0), 0)
    column = tl.arange(0, BLOCK)
    wide = tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    result = wide * tl.rsqrt(total / WIDTH + eps)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def narrow_rows(
    x,  # [N, WIDTH], rows x_row apart
    out,  # [N, WIDTH], fp8, contiguous
    scale,  # out, float32 [N]: what a row was divided by
    x_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows in fp8: the largest entry of each becomes 448. Grid: rows."""
    if PDL:
        after_the_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    by = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / 448.0
    tl.store(scale + row, by)
    narrow = tl.minimum(tl.maximum(wide / by, -448.0), 448.0)
    tl.store(out + row * WIDTH + column, narrow.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(
    gate_up,  # [N, 2 WIDTH], contiguous
    out,  # [N, WIDTH], contiguous
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,  # else GELU by tanh
    PDL: tl.constexpr,
):
    """activation(gate) * up. Grid: rows, parts of a row."""
    if PDL:
        after_the_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
    kind = out.dtype.element_ty
    tl.store(
        out + row * WIDTH + column,
        (acted(gate, SILU).to(kind).to(tl.float32) * up.to(tl.float32)).to(kind),
        mask=inside,
    )


@triton.jit(do_not_specialize=["rows"])
def product_tile(
    x,  # [N, DEPTH], rows x_row apart
    weight,  # [OUT, DEPTH], contiguous
    bias,  # [OUT]; not read unless BIASED
    out,  # [N, OUT], contiguous
    rows,
    outputs,
    x_row,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x times weight transposed; sums have one order whatever the number of rows. Grid: tiles of rows, of outputs."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = x + m[:, None].to(tl.int64) * x_row + k[None, :]
    right = weight + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, DEPTH, BLOCK_K):
        inside = k < DEPTH - begin
        a = tl.load(left + begin, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + begin, mask=(n < outputs)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    place = out + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize_on_alignment=["slots", "row_span", "positions", "write_index"])  # parts of one tensor
def move_rows(
    cache,  # [places, WIDTH]
    rows,  # [N, WIDTH]
    table,  # [S, table_row] int32
    slots,  # [R] int64
    row_span,  # [N] int64
    positions,  # [N] int64
    write_index,  # [N] int64, 0: a void row
    table_row,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,  # rows go into the cache; else those of the position before come out of it
    PDL: tl.constexpr,
):
    """Rows of a paged cache. Grid: rows, parts of a row."""
    if PDL:
        after_the_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    position = tl.load(positions + row)
    slot = tl.load(slots + tl.load(row_span + row))
    if KEEP:
        if tl.load(write_index + row) != 0:
            block = tl.load(table + slot * table_row + position // BLOCK_SIZE).to(tl.int64)
            place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * WIDTH
            value = tl.load(rows + row * WIDTH + column, mask=inside)
            tl.store(cache + place + column, value.to(cache.dtype.element_ty), mask=inside)
    else:
        before = tl.maximum(position - 1, 0)
        block = tl.load(table + slot * table_row + before // BLOCK_SIZE).to(tl.int64)
        place = (block * BLOCK_SIZE + before % BLOCK_SIZE) * WIDTH
        value = tl.load(cache + place + column, mask=inside & (position > 0), other=0.0)
        tl.store(rows + row * WIDTH + column, value, mask=inside)
