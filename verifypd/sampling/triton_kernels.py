"""The Triton kernels of sampling: cuts without a sort, noise, verdicts. Know pointers; nothing of who launches them.

Names in capitals are compile-time constants. Columns of the state's tables are those of `SamplingState`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# columns of SamplingState.floats and .integers
TEMPERATURE: tl.constexpr = tl.constexpr(0)
TOP_P: tl.constexpr = tl.constexpr(1)
MIN_P: tl.constexpr = tl.constexpr(2)
ALPHA: tl.constexpr = tl.constexpr(6)
FLOATS: tl.constexpr = tl.constexpr(7)
TOP_K: tl.constexpr = tl.constexpr(0)
SEED: tl.constexpr = tl.constexpr(1)
CHOICE: tl.constexpr = tl.constexpr(2)
PROMPT_LEN: tl.constexpr = tl.constexpr(3)
MAX_LEN: tl.constexpr = tl.constexpr(5)
MODE: tl.constexpr = tl.constexpr(7)
INTEGERS: tl.constexpr = tl.constexpr(8)

GREEDY: tl.constexpr = tl.constexpr(0)
REJECTION: tl.constexpr = tl.constexpr(1)
COUPLED: tl.constexpr = tl.constexpr(2)
STOP: tl.constexpr = tl.constexpr(1)  # Finish
LENGTH: tl.constexpr = tl.constexpr(2)
ERROR: tl.constexpr = tl.constexpr(3)
DRAFT_ROLE: tl.constexpr = tl.constexpr(0)  # Role
ACCEPT_ROLE: tl.constexpr = tl.constexpr(1)
RESIDUAL_ROLE: tl.constexpr = tl.constexpr(2)
GUMBEL_ROLE: tl.constexpr = tl.constexpr(3)
SYNTHETIC_ROLE: tl.constexpr = tl.constexpr(4)

LARGEST: tl.constexpr = tl.constexpr(1e30)
MASS_ONE: tl.constexpr = tl.constexpr(1099511627776.0)  # 2**40, see transforms
DIGIT: tl.constexpr = tl.constexpr(4)  # bits of a key settled by one reading of a row
CANDIDATES: tl.constexpr = tl.constexpr(16)  # 2**DIGIT


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
def cut_rows(
    x,  # float32 [N, x_row], changed in place
    slots,  # [N] int64
    floats,  # [S, FLOATS]
    integers,  # [S, INTEGERS]
    log_min_p,  # [S]
    heat,  # [N] float32, multiplies the temperature; read where HEATED
    x_row,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    HEATED: tl.constexpr,
):
    """Temperature, min_p, top_k, top_p of one row, in this order; what falls is -inf. Grid: rows."""
    row_index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row_index)
    if slot < 0:  # padding
        return
    mode = tl.load(integers + slot * INTEGERS + MODE)
    alpha = tl.load(floats + slot * FLOATS + ALPHA)
    if mode == GREEDY:
        return
    if alpha >= 0.0:
        return
    temperature = tl.load(floats + slot * FLOATS + TEMPERATURE)
    if HEATED:
        temperature = temperature * tl.load(heat + row_index)
    min_p = tl.load(floats + slot * FLOATS + MIN_P)
    share = tl.load(floats + slot * FLOATS + TOP_P)
    top_k = tl.load(integers + slot * INTEGERS + TOP_K)
    row = x + row_index * x_row
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
        value = tl.div_rn(value, temperature)
        tl.store(row + token, value, mask=token < VOCAB)
        highest = tl.maximum(highest, value)
    if (min_p <= 0.0) & (top_k <= 0) & (share >= 1.0):
        return
    tl.debug_barrier()  # what other threads of the program stored is read from here on
    top = tl.maximum(tl.max(highest, 0), -LARGEST)
    least = tl.full([1], float("-inf"), tl.float32)
    if min_p > 0.0:
        least = top + tl.load(log_min_p + slot + tl.arange(0, 1))
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


@triton.jit
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
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    highest = tl.full([BLOCK], -LARGEST, tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = cleaned(tl.load(row + token, mask=token < VOCAB, other=float("-inf")))
        higher = tl.maximum(highest, value)
        weight = weight * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
        if (mode == COUPLED) & (alpha < 0.0):
            value += gumbel_noise(seed, choice, index, token)
        better = value > best
        where = tl.where(better, token, where)
        best = tl.where(better, value, best)
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, where, VOCAB), 0)
    token = tl.where(score == float("-inf"), 0, token)
    top = tl.max(highest, 0)
    total = tl.sum(weight * tl.exp(highest - top), 0)
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


@triton.jit
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
    STOPS: tl.constexpr,  # stop_width padded
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
    k = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + slot * stop_row + k, mask=k < stop_width, other=-1)
    equal = (emitted[:, None] == stops[None, :]) & (k < stop_width)[None, :]
    lost = hopeless.to(tl.int64)
    hit = (tl.max(equal.to(tl.int32), 1) > 0) & (place + lost <= accepted)
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
    counts = tl.where(living & (error == 0), counts, 0)
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
def propose_rows(
    x,  # float32 [R, x_row], cut
    slots,  # [R] int64; a negative one is padding
    lengths,
    drafts,  # [S, drafts_row] int64, written at depth
    draft_q,  # float32 [S, L, V], written at depth where a token is drawn
    block_sums,  # float32 [R, BLOCKS], scratch
    floats,
    integers,
    x_row,
    drafts_row,
    q_slot,
    q_depth,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    ROW: tl.constexpr,  # tokens read at once
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One draft token: the likeliest, the likeliest with noise, or one drawn from q, which is kept. Grid: rows."""
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r)
    if slot < 0:
        return
    mode = tl.load(integers + slot * INTEGERS + MODE)
    alpha = tl.load(floats + slot * FLOATS + ALPHA)
    seed = tl.load(integers + slot * INTEGERS + SEED)
    choice = tl.load(integers + slot * INTEGERS + CHOICE)
    index = tl.load(lengths + slot) + DEPTH - tl.load(integers + slot * INTEGERS + PROMPT_LEN)
    row = x + r * x_row
    best = tl.full([ROW], float("-inf"), tl.float32)
    where = tl.zeros([ROW], tl.int32)
    highest = tl.full([ROW], -LARGEST, tl.float32)
    weight = tl.zeros([ROW], tl.float32)
    for begin in range(0, VOCAB, ROW):
        token = begin + tl.arange(0, ROW)
        value = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
        higher = tl.maximum(highest, value)
        weight = weight * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
        if (mode == COUPLED) & (alpha < 0.0):
            value += gumbel_noise(seed, choice, index, token)
        better = value > best
        where = tl.where(better, token, where)
        best = tl.where(better, value, best)
    score = tl.max(best, 0)
    found = tl.min(tl.where(best == score, where, VOCAB), 0)
    found = tl.where(score == float("-inf"), 0, found).to(tl.int64)
    if (mode == REJECTION) & (alpha < 0.0):
        top = tl.max(highest, 0)
        total = tl.maximum(tl.sum(weight * tl.exp(highest - top), 0), 1e-30)
        hopeless = score == float("-inf")  # then q is all on token 0
        q_base = draft_q + slot * q_slot + DEPTH * q_depth
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
    tl.store(drafts + slot * drafts_row + DEPTH, found)
