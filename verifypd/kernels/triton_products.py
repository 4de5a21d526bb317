"""The Triton kernels of products with few rows. Know pointers, strides and tiles; nothing of who launches them.

A pass of few rows is bound by reading weights. So a program streams some rows of the weight matrix through shared
memory, with many loads under way, against all rows of the input; what stands before and behind a product is done on
the way. Weights in fp8 are widened in registers, and the scales of their rows put on the sums. Under programmatic
dependent launch (PDL) a program is on its processor before the kernel before it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verifypd.kernels.triton_kernels import acted, after_the_kernel_before, as_stored


@triton.jit
def widened(weight, kind: tl.constexpr):
    """Weights as the input they meet. By way of float32, for `cvt` from float16 to bfloat16 runs at a quarter rate."""
    if weight.dtype == kind:
        return weight
    return weight.to(tl.float16).to(tl.float32).to(kind)


@triton.jit
def _streamed(
    x, first, second, column, m, rows, x_row,
    DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of one weight, or of two, times all rows of x: [BLOCK_N, BLOCK_M] of each. One sum after the other."""
    k = tl.arange(0, BLOCK_K)
    left = column[:, None] * DEPTH + k[None, :]
    right = x + m[None, :] * x_row + k[:, None]
    there = (m < rows)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other = total
    for begin in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        if DEPTH % BLOCK_K:
            inside = k < DEPTH - begin
            b = tl.load(right + begin, mask=there & inside[:, None], other=0.0)
            a = tl.load(first + left + begin, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            total = tl.dot(widened(a, b.dtype), b, total)
            if GATED:
                a = tl.load(second + left + begin, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                other = tl.dot(widened(a, b.dtype), b, other)
        else:
            b = tl.load(right + begin, mask=there, other=0.0)
            a = tl.load(first + left + begin, eviction_policy="evict_first")
            total = tl.dot(widened(a, b.dtype), b, total)
            if GATED:
                a = tl.load(second + left + begin, eviction_policy="evict_first")
                other = tl.dot(widened(a, b.dtype), b, other)
    return total, other


@triton.jit
def _streamed_in_parts(
    x, first, second, column, m, rows, x_row,
    DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_streamed`, with a part of the depth for each warp: sums run side by side and do not wait for each other."""
    SHARE: tl.constexpr = DEPTH // PARTS
    k = tl.arange(0, BLOCK_K)
    begins = tl.arange(0, PARTS) * SHARE
    left = begins[:, None, None] + column[None, :, None] * DEPTH + k[None, None, :]
    right = x + begins[:, None, None] + m[None, None, :] * x_row + k[None, :, None]
    there = (m < rows)[None, None, :]
    total = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    other = total
    for begin in tl.range(0, SHARE, BLOCK_K, num_stages=STAGES):
        b = tl.load(right + begin, mask=there, other=0.0)
        a = tl.load(first + left + begin, eviction_policy="evict_first")
        total = tl.dot(widened(a, b.dtype), b, total)
        if GATED:
            a = tl.load(second + left + begin, eviction_policy="evict_first")
            other = tl.dot(widened(a, b.dtype), b, other)
    if GATED:
        return tl.sum(total, 0), tl.sum(other, 0)
    whole = tl.sum(total, 0)
    return whole, whole


@triton.jit
def _products(
    x, first, second, column, m, rows, x_row,
    DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if PARTS > 1:
        total, other = _streamed_in_parts(
            x, first, second, column, m, rows, x_row, DEPTH, GATED, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, STAGES
        )
    else:
        total, other = _streamed(
            x, first, second, column, m, rows, x_row, DEPTH, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
        )
    return total, other


@triton.jit
def _factor(squares, squares_row, m, eps, WIDTH: tl.constexpr, SQUARES: tl.constexpr, SQUARES_PADDED: tl.constexpr):
    """What the rows `m` of a stream are multiplied by to be normed, [BLOCK_M]."""
    part = tl.arange(0, SQUARES_PADDED)
    parts = tl.load(squares + part[:, None] * squares_row + m[None, :], mask=(part < SQUARES)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(parts, 0) / WIDTH + eps)


@triton.jit(do_not_specialize=["rows"])
def skinny_product(
    x,  # [rows, DEPTH], rows x_row apart
    weight,  # [OUT, DEPTH], contiguous; [2 OUT, DEPTH] where GATED; of x's dtype, or fp8
    channels,  # float32 [OUT], or [2 OUT]: the scales of its rows; not read unless FP8
    bias,  # [OUT], or [2 OUT]; not read unless BIASED
    squares,  # float32 [SQUARES, squares_row]: sums of squares of parts of the stream x was made of; see SCALED
    residual,  # [rows, OUT], contiguous, as the others; not read unless ADDED
    norm,  # [OUT]: the norm behind; not read unless ADDED
    out,  # [rows, OUT]: the result, times the norm where ADDED
    stream,  # out, [rows, OUT]: the result itself; not written unless ADDED
    new_squares,  # out, float32 [programs, BLOCK_M]: of the stream; not written unless ADDED
    rows,
    x_row,
    squares_row,
    eps,
    DEPTH: tl.constexpr,
    OUT: tl.constexpr,
    FP8: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,  # whether x has yet to be divided by the root mean square of its stream
    SQUARES: tl.constexpr,
    SQUARES_PADDED: tl.constexpr,
    GATED: tl.constexpr,  # activation(first half) * second half
    SILU: tl.constexpr,
    ADDED: tl.constexpr,  # whether the residual is added and the norm follows
    UNIT: tl.constexpr,  # whether that norm scales by 1 + weight
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # of the depth, one for each warp; 1: warps share
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x times weight transposed, with what stands around it. Grid: tiles of outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.where(n < OUT, n, 0).to(tl.int64) if OUT % BLOCK_N else n.to(tl.int64)
    second = weight + OUT * DEPTH
    if PDL:
        after_the_kernel_before()
    m = tl.arange(0, BLOCK_M)
    there = (m < rows)[None, :]
    total, other = _products(
        x, weight, second, column, m, rows, x_row, DEPTH, GATED, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, STAGES
    )
    if SCALED:
        factor = _factor(squares, squares_row, m, eps, DEPTH, SQUARES, SQUARES_PADDED)[None, :]
        total *= factor
        if GATED:
            other *= factor
    known = n < OUT
    if FP8:
        total *= tl.load(channels + n, mask=known, other=0.0)[:, None]
        if GATED:
            other *= tl.load(channels + OUT + n, mask=known, other=0.0)[:, None]
    if BIASED:
        total += tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[:, None]
        if GATED:
            other += tl.load(bias + OUT + n, mask=known, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    place = m[None, :].to(tl.int64) * OUT + n[:, None]
    held = there & known[:, None]
    if GATED:
        gate = acted(total.to(kind).to(tl.float32), SILU).to(kind).to(tl.float32)
        total = gate * other.to(kind).to(tl.float32)
    if ADDED:
        before = tl.load(residual + place, mask=held, other=0.0).to(tl.float32)
        total = (total.to(kind).to(tl.float32) + before).to(kind)
        tl.store(stream + place, total, mask=held)
        total = total.to(tl.float32)
        own = tl.sum(tl.where(held, total * total, 0.0), 0)
        tl.store(new_squares + tl.program_id(0) * BLOCK_M + m, own)
        by = tl.load(norm + n, mask=known, other=0.0).to(tl.float32)
        total *= (1.0 + by if UNIT else by)[:, None]
    tl.store(out + place, total.to(kind), mask=held)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["write_index", "positions"])
def skinny_qkv(
    x,  # [rows, DEPTH], rows x_row apart
    weight,  # [(Q_HEADS + 2 KV_HEADS) * WIDTH, DEPTH], contiguous
    channels,  # as of `skinny_product`
    bias,  # of its rows; not read unless BIASED
    squares,  # as of `skinny_product`
    q,  # out, [rows, Q_HEADS, WIDTH]
    cache_k,  # [places, KV_HEADS, WIDTH]
    cache_v,
    scales,  # float32 [2, KV_HEADS], of keys and values in the cache; not read unless CACHE_SCALED
    write_index,  # [rows] int64, a row's place
    positions,  # [rows] int64
    cos,  # float32 [T, WIDTH / 2]
    sin,
    rows,
    x_row,
    squares_row,
    eps,
    DEPTH: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FP8: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_PADDED: tl.constexpr,
    CACHE_SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries, keys and values of x: queries rotated, keys rotated into the cache, values into the cache.

    Grid: tiles of a head. A tile has dimensions of its first half and those they rotate with, of the second.
    """
    HALF: tl.constexpr = WIDTH // 2
    OWN: tl.constexpr = BLOCK_N // 2
    head = tl.program_id(0) // (HALF // OWN)
    begin = tl.program_id(0) % (HALF // OWN) * OWN
    n = tl.arange(0, BLOCK_N)
    column = (head * WIDTH + n // OWN * HALF + begin + n % OWN).to(tl.int64)
    if PDL:
        after_the_kernel_before()
    m = tl.arange(0, BLOCK_M)
    total, _ = _products(
        x, weight, weight, column, m, rows, x_row, DEPTH, False, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, STAGES
    )
    if SCALED:
        total *= _factor(squares, squares_row, m, eps, DEPTH, SQUARES, SQUARES_PADDED)[None, :]
    if FP8:
        total *= tl.load(channels + column)[:, None]
    if BIASED:
        total += tl.load(bias + column).to(tl.float32)[:, None]
    kind = q.dtype.element_ty
    halves = tl.permute(tl.reshape(total.to(kind).to(tl.float32), [2, OWN, BLOCK_M]), [1, 2, 0])
    low, high = tl.split(halves)
    there = m < rows
    d = begin + tl.arange(0, OWN)
    if head < Q_HEADS + KV_HEADS:
        position = tl.load(positions + m, mask=there, other=0)
        c = tl.load(cos + position[None, :] * HALF + d[:, None])
        s = tl.load(sin + position[None, :] * HALF + d[:, None])
        low, high = low * c - high * s, high * c + low * s
    place = tl.load(write_index + m, mask=there, other=0)
    held = there[None, :]
    narrow = cache_k.dtype.element_ty
    if head < Q_HEADS:
        query = q + (m[None, :] * Q_HEADS + head) * WIDTH + d[:, None]
        tl.store(query, low.to(kind), mask=held)
        tl.store(query + HALF, high.to(kind), mask=held)
    elif head < Q_HEADS + KV_HEADS:
        target = cache_k + (place[None, :] * KV_HEADS + head - Q_HEADS) * WIDTH + d[:, None]
        tl.store(target, as_stored(low.to(kind), scales, head - Q_HEADS, narrow, CACHE_SCALED), mask=held)
        tl.store(target + HALF, as_stored(high.to(kind), scales, head - Q_HEADS, narrow, CACHE_SCALED), mask=held)
    else:
        target = cache_v + (place[None, :] * KV_HEADS + head - Q_HEADS - KV_HEADS) * WIDTH + d[:, None]
        tl.store(target, as_stored(low, scales, head - Q_HEADS, narrow, CACHE_SCALED), mask=held)
        tl.store(target + HALF, as_stored(high, scales, head - Q_HEADS, narrow, CACHE_SCALED), mask=held)
