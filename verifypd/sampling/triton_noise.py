"""Keyed noise in Triton: the words and uniforms of `sampling/philox`. Knows counters; nothing of who draws."""

from __future__ import annotations

import triton
import triton.language as tl

DRAFT_ROLE: tl.constexpr = tl.constexpr(0)  # Role
ACCEPT_ROLE: tl.constexpr = tl.constexpr(1)
RESIDUAL_ROLE: tl.constexpr = tl.constexpr(2)
GUMBEL_ROLE: tl.constexpr = tl.constexpr(3)
SYNTHETIC_ROLE: tl.constexpr = tl.constexpr(4)


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Four words for a counter; see sampling/philox. Counters are uint32, the seed int64."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = tl.full([1], 0xD2511F53, tl.uint32)
    b = tl.full([1], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high = tl.umulhi(b, c2)
        low = tl.umulhi(a, c0)
        c1, c3, c0, c2 = b * c2, a * c0, high ^ c1 ^ k0, low ^ c3 ^ k1
        k0 = k0 + tl.full([1], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([1], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform_pair(seed, choice, index, ROLE: tl.constexpr):
    """Two uniforms in [0, 1), [1] each."""
    c0 = tl.full([1], 0, tl.uint32) + (index & 0xFFFFFFFF).to(tl.uint32)
    c1 = tl.full([1], 0, tl.uint32) + (choice & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.full([1], 0, tl.uint32)
    r0, r1, _r2, _r3 = philox(c0, c1, zero, zero + ROLE, seed)
    scale = 5.9604644775390625e-08  # 2**-24
    return (r0 >> 8).to(tl.float32) * scale, (r1 >> 8).to(tl.float32) * scale


@triton.jit
def gumbel_noise(seed, choice, index, token):
    """Standard Gumbel noise of tokens [BLOCK]; see philox.gumbel. Each word is made four times over: noise is cheap."""
    group = (token // 4).to(tl.uint32)
    zero = group * 0
    r0, r1, r2, r3 = philox(
        zero + (index & 0xFFFFFFFF).to(tl.uint32),
        zero + (choice & 0xFFFFFFFF).to(tl.uint32),
        group,
        zero + GUMBEL_ROLE,
        seed,
    )
    lane = token % 4
    word = tl.where(lane == 0, r0, tl.where(lane == 1, r1, tl.where(lane == 2, r2, r3)))
    w = (word.to(tl.float32) + 0.5) * -2.3283064365386963e-10  # -2**-32
    w = tl.maximum(w, -0.99999994039535522)
    sum_ = 1.0 + w
    exact = sum_ == 1.0  # log1p without its own instruction: the rounding of 1 + w is taken out again
    log1p = tl.where(exact, w, tl.log(sum_) * (w / tl.where(exact, 1.0, sum_ - 1.0)))
    return -tl.log(-log1p)
