"""Cuts in Triton: temperature, min_p, top_k and top_p without a sort. Know pointers; nothing of who launches them.

Names in capitals are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verifypd.sampling.triton_state import ALPHA, FLOATS, GREEDY, INTEGERS, LOG_MIN_P, MODE, TEMPERATURE, TOP_K, TOP_P

LARGEST: tl.constexpr = tl.constexpr(1e30)
MASS_ONE: tl.constexpr = tl.constexpr(1099511627776.0)  # 2**40, see transforms
DIGIT: tl.constexpr = tl.constexpr(4)  # bits of a key settled by one reading of a row
CANDIDATES: tl.constexpr = tl.constexpr(16)  # 2**DIGIT


@triton.jit
def ordered(x):
    """int64 keys in 0 .. 2**32 - 1 in the order of float32 x; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def cleaned(x):
    """NaN is no token, +inf a very large number."""
    x = tl.where(x != x, float("-inf"), x)
    return tl.minimum(x, LARGEST)


@triton.jit
def weighed(x, top, least):
    """Weight of tokens, 1 for the likeliest; nothing below `least`."""
    return tl.where(x >= least, tl.exp(x - top), 0.0)


@triton.jit
def largest_threshold(
    row, top, least, needed, VOCAB: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, WEIGHTS: tl.constexpr
):
    """Largest key t such that what has keys >= t comes to `needed` at least: tokens (COUNT) or fixed-point mass.

    Keys are those of the values, or of their weights (WEIGHTS). Four bits are settled by one reading of the row.
    """
    found = tl.full([1], 0, tl.int64)
    digit = tl.arange(0, CANDIDATES).to(tl.int64)
    for step in range(32 // DIGIT):
        shift = 32 - DIGIT - step * DIGIT
        candidate = found + (digit << shift)
        held = tl.zeros([CANDIDATES], tl.int64)
        for begin in range(0, VOCAB, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            x = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
            weight = weighed(x, top, least)
            key = ordered(weight) if WEIGHTS else ordered(x)
            if COUNT:
                measure = tl.where((token < VOCAB) & (x >= least), 1, 0).to(tl.int64)
            else:
                measure = (weight * MASS_ONE).to(tl.int64)
            held += tl.sum(tl.where(key[None, :] >= candidate[:, None], measure[None, :], 0), 1)
        enough = tl.sum(((held >= needed) & (digit > 0)).to(tl.int64), 0)
        found = found + (enough << shift)
    return found


@triton.jit
def given_logits(
    row,
    places,
    token,
    VOCAB: tl.constexpr,
    KNOWN: tl.constexpr,
    MAPPED: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Logits of tokens as float32, from a row of any type that has KNOWN of them, each token's at its place where
    MAPPED (see propose_rows); -inf where there is none."""
    if MAPPED:
        at = tl.load(places + token, mask=token < VOCAB, other=-1)
        value = tl.load(row + at, mask=at >= 0, other=float("-inf")).to(tl.float32)
    else:
        value = tl.load(row + token, mask=token < KNOWN, other=float("-inf")).to(tl.float32)
    return cleaned(value) if CLEAN else value


@triton.jit
def cut_row(
    given,  # the row as it comes: see given_logits
    row,  # float32 [VOCAB], out; may be `given`
    places,
    slot,
    temperature,
    floats,
    integers,
    VOCAB: tl.constexpr,
    KNOWN: tl.constexpr,
    MAPPED: tl.constexpr,
    CLEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Temperature, min_p, top_k, top_p of one row, in this order; what falls is -inf."""
    floor = tl.load(floats + slot * FLOATS + LOG_MIN_P)
    share = tl.load(floats + slot * FLOATS + TOP_P)
    top_k = tl.load(integers + slot * INTEGERS + TOP_K)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = given_logits(given, places, token, VOCAB, KNOWN, MAPPED, CLEAN)
        value = tl.div_rn(value, temperature)
        tl.store(row + token, value, mask=token < VOCAB)
        highest = tl.maximum(highest, value)
    if (floor > float("-inf")) | (top_k > 0) | (share < 1.0):
        tl.debug_barrier()  # what other threads of the program stored is read from here on
        top = tl.maximum(tl.max(highest, 0), -LARGEST)
        least = tl.zeros([1], tl.float32) + (top + floor)
        key = tl.full([1], 0, tl.int64)  # tokens with keys below it fall
        weight_key = tl.full([1], 0, tl.int64)
        if top_k > 0:
            key = largest_threshold(row, top, least, top_k, VOCAB, BLOCK, True, False)
        if share < 1.0:
            # what is left weighs 1 and more, so a share of it is never nothing
            total = tl.zeros([BLOCK], tl.int64)
            for begin in range(0, VOCAB, BLOCK):
                token = begin + tl.arange(0, BLOCK)
                value = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
                weight = tl.where(ordered(value) >= key, weighed(value, top, least), 0.0)
                total += (weight * MASS_ONE).to(tl.int64)
            needed = tl.ceil(tl.sum(total, 0).to(tl.float64) * share.to(tl.float64)).to(tl.int64)
            needed = tl.maximum(needed, 1)
            if top_k > 0:
                key = tl.maximum(key, largest_threshold(row, top, least, needed, VOCAB, BLOCK, False, False))
            else:
                weight_key = largest_threshold(row, top, least, needed, VOCAB, BLOCK, False, True)
        for begin in range(0, VOCAB, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            value = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
            kept = (value >= least) & (ordered(value) >= key) & (ordered(weighed(value, top, least)) >= weight_key)
            tl.store(row + token, tl.where(kept, value, float("-inf")), mask=token < VOCAB)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def cut_rows(
    x,  # float32 [N, x_row], changed in place
    slots,  # [N] int64
    floats,  # [S, FLOATS]
    integers,  # [S, INTEGERS]
    heat,  # [N] float32, multiplies the temperature; read where HEATED
    x_row,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    HEATED: tl.constexpr,
):
    """The cuts of sampled rows; others stay. Grid: rows."""
    row_index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row_index)
    mode = tl.load(integers + slot * INTEGERS + MODE)
    alpha = tl.load(floats + slot * FLOATS + ALPHA)
    if mode == GREEDY:
        return
    if alpha >= 0.0:
        return
    temperature = tl.load(floats + slot * FLOATS + TEMPERATURE)
    if HEATED:
        temperature = temperature * tl.load(heat + row_index)
    row = x + row_index * x_row
    cut_row(row, row, row, slot, temperature, floats, integers, VOCAB, VOCAB, False, False, BLOCK)
