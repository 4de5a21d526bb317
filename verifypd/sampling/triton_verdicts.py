"""Verdicts and draws of drafts in Triton. Know pointers; nothing of who launches them.

Names in capitals are compile-time constants. Columns of the state's tables are those of `SamplingState`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verifypd.kernels.triton_kernels import after_the_kernel_before
from verifypd.sampling.triton_cuts import LARGEST, cleaned, cut_row
from verifypd.sampling.triton_noise import (
    ACCEPT_ROLE,
    DRAFT_ROLE,
    RESIDUAL_ROLE,
    SYNTHETIC_ROLE,
    gumbel_noise,
    uniform_pair,
)
from verifypd.sampling.triton_state import (
    ALPHA,
    CHOICE,
    COUPLED,
    ERROR,
    FLOATS,
    GREEDY,
    INTEGERS,
    LENGTH,
    MAX_LEN,
    MODE,
    PROMPT_LEN,
    REJECTION,
    SEED,
    STOP,
    TEMPERATURE,
)


@triton.jit
def scanned(row, seed, choice, index, noisy, CLEAN: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One reading of a row: best score and its token, with Gumbel noise where `noisy`; maximum, and Σ exp below it.

    A row without any token scores -inf and gives token 0.
    """
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    highest = tl.full([BLOCK], -LARGEST, tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
        if CLEAN:
            value = cleaned(value)
        higher = tl.maximum(highest, value)
        weight = weight * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
        if noisy:
            value += gumbel_noise(seed, choice, index, token)
        better = value > best
        where = tl.where(better, token, where)
        best = tl.where(better, value, best)
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, where, VOCAB), 0)
    token = tl.where(score == float("-inf"), 0, token)
    top = tl.max(highest, 0)
    return score, token, top, tl.sum(weight * tl.exp(highest - top), 0)


# Indices come as parts of one tensor: whether one begins on a 16-byte border must not make another kernel.
@triton.jit(do_not_specialize=["widest"], do_not_specialize_on_alignment=["slots", "depths", "row_span", "drawn"])
def judge_rows(
    x,  # float32 [N, x_row], transformed
    raw,  # float32 [N, raw_row], as the model gave it: synthetic rows look here
    slots,  # [N] int64
    depths,  # [N] int64
    row_span,  # [N] int64
    lengths,  # [S] int64
    drafts,  # [S, drafts_row] int64
    draft_q,  # float32 [S, L, V]
    drawn,  # [R] int64
    floats,
    integers,
    own,  # out [N] int64: the likeliest token, with noise where coupled
    scores,  # out float32 [N, 3]: its score; highest value and sum of weights
    stands,  # out [N] int64: whether the row's draft does
    x_row,
    raw_row,
    drafts_row,
    widest,  # columns of drafts that may be read
    q_slot,
    q_depth,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_Q: tl.constexpr,
    LISTED: tl.constexpr,  # drawn is to be read
):
    """What a row says for itself, and whether the draft it decides about stands. Grid: rows."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n)
    depth = tl.load(depths + n)
    mode = tl.load(integers + slot * INTEGERS + MODE)
    alpha = tl.load(floats + slot * FLOATS + ALPHA)
    seed = tl.load(integers + slot * INTEGERS + SEED)
    choice = tl.load(integers + slot * INTEGERS + CHOICE)
    index = tl.load(lengths + slot) + depth - tl.load(integers + slot * INTEGERS + PROMPT_LEN)
    synthetic = alpha >= 0.0
    row = x + n * x_row
    if synthetic:
        row = raw + n * raw_row
    noisy = (mode == COUPLED) & (alpha < 0.0)
    score, token, top, total = scanned(row, seed, choice, index, noisy, True, VOCAB, BLOCK)
    draft = tl.load(drafts + slot * drafts_row + tl.minimum(depth, widest - 1), mask=widest > 0, other=0)
    draft = tl.minimum(tl.maximum(draft, 0), VOCAB - 1)
    stand = ((token == draft) & (score > float("-inf"))).to(tl.int64) + tl.zeros([1], tl.int64)
    if synthetic:
        u, _ = uniform_pair(seed, choice, index, SYNTHETIC_ROLE)
        stand = (u < alpha).to(tl.int64)
    elif mode == REJECTION:
        u, _ = uniform_pair(seed, choice, index, ACCEPT_ROLE)
        p = tl.exp(tl.load(x + n * x_row + draft) - top) / tl.maximum(total, 1e-30)
        q = 1.0
        if HAS_Q:
            from_q = True
            if LISTED:
                from_q = tl.load(drawn + tl.load(row_span + n)) > 0
            at = slot * q_slot + tl.minimum(depth, widest - 1) * q_depth + draft
            q = tl.where(from_q, tl.load(draft_q + at, mask=widest > 0, other=1.0), 1.0)
        stand = (u * q < p).to(tl.int64) * (score > float("-inf")).to(tl.int64)
    one = tl.arange(0, 1)
    tl.store(own + n, token.to(tl.int64))
    tl.store(scores + n * 3, tl.where(synthetic, 0.0, score))
    tl.store(scores + n * 3 + 1, top)
    tl.store(scores + n * 3 + 2, total)
    tl.store(stands + n + one, stand)


@triton.jit
def picked(weights, u, axis: tl.constexpr):
    """First index whose running sum passes u of the whole, among those that weigh anything; see verify._pick."""
    held = weights > 0
    sums = tl.cumsum(weights, axis)
    total = tl.max(tl.where(held, sums, 0.0), axis)
    below = (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)  # the float before a positive one
    goal = tl.minimum(u * total, tl.where(total > 0, below, 0.0))
    return tl.argmax((held & (sums > goal)).to(tl.int32), axis)


@triton.jit
def leftover(
    x_base, q_base, begin, top, total, q_tokens, given, VOCAB: tl.constexpr, BLOCK: tl.constexpr, HAS_Q: tl.constexpr
):
    """Weights of tokens begin .. begin + BLOCK - 1 after the accepted drafts; see verify._leftover.

    q_tokens: tokens of q to take away, all or none; given: the draft that fell without a q, or -1.
    """
    token = begin + tl.arange(0, BLOCK)
    value = tl.load(x_base + token, mask=token < VOCAB, other=float("-inf"))
    p = tl.exp(value - top) / total
    if HAS_Q:
        p = tl.maximum(p - tl.load(q_base + token, mask=token < q_tokens, other=0.0), 0.0)
    return tl.where((token < VOCAB) & (token != given), p, 0.0)


@triton.jit(
    do_not_specialize=["stop_row", "stop_width"],  # they follow what requests stop at
    do_not_specialize_on_alignment=["span_slots", "first_rows", "span_depths", "drawn"],
)
def judge_spans(
    x,
    own,
    scores,
    stands,
    block_sums,  # float32 [R, BLOCKS], scratch
    span_slots,  # [R] int64
    first_rows,  # [R] int64
    span_depths,  # [R] int64, drafts of the span
    tokens,  # [S, tokens_row] int64, grows
    lengths,  # [S] int64, grow
    drafts,
    draft_lens,  # [S] int64
    draft_q,
    drawn,
    floats,
    integers,
    stop_ids,  # [S, stop_row] int64
    alive,  # [S] bool, falls
    packed,  # out int64 [R, W + 5]: counts, accepted, drafted, finish, stop token, tokens
    x_row,
    tokens_row,
    drafts_row,
    stop_row,
    stop_width,
    q_slot,
    q_depth,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a block of `draw`
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,  # blocks read at once
    WIDTH: tl.constexpr,  # W, most drafts of any span + 1
    WIDTH_PADDED: tl.constexpr,
    STOPS: tl.constexpr,  # ids that end a request, read at once: a request may have any number
    HAS_Q: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The verdict of one span, and what it changes. Grid: spans."""
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(span_slots + r)
    first = tl.load(first_rows + r)
    length = tl.load(lengths + slot)
    drafted = tl.minimum(tl.load(draft_lens + slot), tl.load(span_depths + r))
    mode = tl.load(integers + slot * INTEGERS + MODE)
    alpha = tl.load(floats + slot * FLOATS + ALPHA)
    place = tl.arange(0, WIDTH_PADDED).to(tl.int64)
    stand = tl.load(stands + first + place, mask=place < drafted, other=0)
    accepted = tl.min(tl.where(stand > 0, WIDTH_PADDED, place), 0)
    accepted = tl.minimum(accepted, drafted)
    last = first + accepted
    following = tl.load(own + last)
    hopeless = tl.load(scores + last * 3) == float("-inf")
    if (mode == REJECTION) & (alpha < 0.0) & (hopeless == 0):
        seed = tl.load(integers + slot * INTEGERS + SEED)
        choice = tl.load(integers + slot * INTEGERS + CHOICE)
        index = length + accepted - tl.load(integers + slot * INTEGERS + PROMPT_LEN)
        u0, u1 = uniform_pair(seed, choice, index, RESIDUAL_ROLE)
        top = tl.load(scores + last * 3 + 1)
        total = tl.load(scores + last * 3 + 2)
        depth = tl.maximum(tl.minimum(accepted, WIDTH - 2), 0)
        given = tl.load(drafts + slot * drafts_row + depth, mask=accepted < drafted, other=-1)
        q_tokens = 0
        if HAS_Q:
            from_q = accepted < drafted
            if LISTED:
                from_q = from_q & (tl.load(drawn + r) > 0)
            q_tokens = tl.where(from_q, VOCAB, 0)
            given = tl.where(from_q, -1, given)
        q_base = draft_q + slot * q_slot + depth * q_depth
        x_base = x + last * x_row
        for block in range(0, BLOCKS, GROUP):
            many = leftover(x_base, q_base, block * BLOCK, top, total, q_tokens, given, VOCAB, GROUP * BLOCK, HAS_Q)
            at = block + tl.arange(0, GROUP)
            tl.store(block_sums + r * BLOCKS + at, tl.sum(tl.reshape(many, [GROUP, BLOCK]), 1), mask=at < BLOCKS)
        tl.debug_barrier()
        b = tl.arange(0, BLOCKS_PADDED)
        sums = tl.load(block_sums + r * BLOCKS + b, mask=b < BLOCKS, other=0.0)
        chosen = picked(sums, tl.sum(u0, 0), 0)
        weights = leftover(x_base, q_base, chosen * BLOCK, top, total, q_tokens, given, VOCAB, BLOCK, HAS_Q)
        inside = picked(weights, tl.sum(u1, 0), 0)
        weighs = tl.sum(tl.where(tl.arange(0, BLOCK) == inside, weights, 0.0), 0)
        following = tl.where(weighs > 0, (chosen * BLOCK + inside).to(tl.int64), following)

    # cut at the first stop id and at the greatest length; see verify._finish
    emitted = tl.load(drafts + slot * drafts_row + place, mask=place < WIDTH - 1, other=0)
    emitted = tl.where((place == accepted) | (place == WIDTH - 1), following, emitted)
    met = tl.zeros([WIDTH_PADDED], tl.int32)
    for begin in range(0, stop_width, STOPS):
        k = begin + tl.arange(0, STOPS)
        stops = tl.load(stop_ids + slot * stop_row + k, mask=k < stop_width, other=-1)
        equal = (emitted[:, None] == stops[None, :]) & (k < stop_width)[None, :]
        met = tl.maximum(met, tl.max(equal.to(tl.int32), 1))
    lost = hopeless.to(tl.int64)
    hit = (met > 0) & (place + lost <= accepted)
    stop_at = tl.min(tl.where(hit & (place < WIDTH), place, WIDTH), 0)
    max_len = tl.load(integers + slot * INTEGERS + MAX_LEN)
    limit = tl.minimum(stop_at + 1, tl.maximum(max_len - length, 0))
    error = hopeless & (limit > accepted)
    counts = tl.minimum(accepted + 1, limit)
    stopped = stop_at < counts
    finish = tl.where(length + counts >= max_len, LENGTH, 0)
    finish = tl.where(stopped, STOP, finish)
    finish = tl.where(error, ERROR, finish)
    living = tl.load(alive + slot) != 0
    finish = tl.where(living, finish, 0).to(tl.int64)
    counts = tl.where(living, tl.where(error, accepted, counts), 0)
    stop_token = tl.sum(tl.where(place == tl.minimum(stop_at, WIDTH - 1), emitted, 0), 0)
    out = packed + r * (WIDTH + 5)
    tl.store(out, counts)
    tl.store(out + 1, tl.minimum(accepted, counts))
    tl.store(out + 2, tl.where(living, drafted, 0))
    tl.store(out + 3, finish)
    tl.store(out + 4, tl.where(stopped & living & (error == 0), stop_token, -1))
    tl.store(out + 5 + place, emitted, mask=place < WIDTH)
    tl.store(tokens + slot * tokens_row + length + place, emitted, mask=place < counts)
    tl.store(lengths + slot, length + counts)
    tl.store(alive + slot, (living & (finish == 0)).to(alive.dtype.element_ty))


@triton.jit
def likeliest_token(row, names, VOCAB: tl.constexpr, KNOWN: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """The token with the highest of KNOWN logits, the first of those that are level; 0 where there is none."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], VOCAB, tl.int32)
    for begin in range(0, KNOWN, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        value = cleaned(tl.load(row + place, mask=place < KNOWN, other=float("-inf")).to(tl.float32))
        token = place
        if MAPPED:
            token = tl.load(names + place, mask=place < KNOWN, other=VOCAB).to(tl.int32)
        better = (value > best) | ((value == best) & (token < where))
        where = tl.where(better, token, where)
        best = tl.where(better, value, best)
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, where, VOCAB), 0)
    return tl.where(score == float("-inf"), 0, token)


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["slots"])
def propose_rows(
    x,  # float32 [R, x_row]: cut logits; where CUT, room for those of rows that are drawn
    logits,  # [R, logits_row], of any type: read where CUT
    names,  # [KNOWN] int64, where MAPPED: the token at each place of a row of logits
    places,  # int32 [VOCAB], where MAPPED: the place of each token, -1: nowhere
    slots,  # [R] int64; a negative one is padding
    lengths,
    drafts,  # [S, drafts_row] int64, written at depth
    draft_q,  # float32 [S, L, V], written at depth where a token is drawn
    block_sums,  # float32 [R, BLOCKS], scratch
    floats,
    integers,
    heat,  # [S] float32, multiplies the temperature; read where CUT
    x_row,
    logits_row,
    drafts_row,
    q_slot,
    q_depth,
    depth,  # place of the draft token
    VOCAB: tl.constexpr,
    KNOWN: tl.constexpr,
    MAPPED: tl.constexpr,
    CUT: tl.constexpr,  # logits are as the drafter gave them
    CUT_BLOCK: tl.constexpr,
    ROW: tl.constexpr,  # tokens read at once
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One draft token: the likeliest, the likeliest with noise, or one drawn from q, which is kept. Grid: rows."""
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        after_the_kernel_before()
    slot = tl.load(slots + r)
    if slot < 0:
        return
    mode = tl.load(integers + slot * INTEGERS + MODE)
    alpha = tl.load(floats + slot * FLOATS + ALPHA)
    seed = tl.load(integers + slot * INTEGERS + SEED)
    choice = tl.load(integers + slot * INTEGERS + CHOICE)
    index = tl.load(lengths + slot) + depth - tl.load(integers + slot * INTEGERS + PROMPT_LEN)
    row = x + r * x_row
    if CUT:
        given = logits + r * logits_row
        if (mode == GREEDY) | (alpha >= 0.0):
            token = likeliest_token(given, names, VOCAB, KNOWN, MAPPED, ROW)
            tl.store(drafts + slot * drafts_row + depth, token.to(tl.int64))
            return
        temperature = tl.load(floats + slot * FLOATS + TEMPERATURE) * tl.load(heat + slot)
        cut_row(given, row, places, slot, temperature, floats, integers, VOCAB, KNOWN, MAPPED, True, CUT_BLOCK)
        tl.debug_barrier()
    noisy = (mode == COUPLED) & (alpha < 0.0)
    score, likeliest, top, total = scanned(row, seed, choice, index, noisy, False, VOCAB, ROW)
    found = likeliest.to(tl.int64)
    if (mode == REJECTION) & (alpha < 0.0):
        total = tl.maximum(total, 1e-30)
        hopeless = score == float("-inf")  # then q is all on token 0
        q_base = draft_q + slot * q_slot + depth * q_depth
        for block in range(0, BLOCKS, GROUP):
            token = block * BLOCK + tl.arange(0, GROUP * BLOCK)
            value = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
            q = tl.exp(value - top) / total
            q = tl.where(hopeless, tl.where(token == 0, 1.0, 0.0), q)
            tl.store(q_base + token, q, mask=token < VOCAB)
            q = tl.where(token < VOCAB, q, 0.0)
            at = block + tl.arange(0, GROUP)
            tl.store(block_sums + r * BLOCKS + at, tl.sum(tl.reshape(q, [GROUP, BLOCK]), 1), mask=at < BLOCKS)
        tl.debug_barrier()
        u0, u1 = uniform_pair(seed, choice, index, DRAFT_ROLE)
        b = tl.arange(0, BLOCKS_PADDED)
        sums = tl.load(block_sums + r * BLOCKS + b, mask=b < BLOCKS, other=0.0)
        chosen = picked(sums, tl.sum(u0, 0), 0)
        token = chosen * BLOCK + tl.arange(0, BLOCK)
        inside = tl.load(q_base + token, mask=token < VOCAB, other=0.0)
        found = (chosen * BLOCK + picked(inside, tl.sum(u1, 0), 0)).to(tl.int64)
    tl.store(drafts + slot * drafts_row + depth, found)
