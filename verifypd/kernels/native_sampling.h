/* Sampling: from rows of scores to the tokens that requests take, drafted and verified. Included by native.c.
 *
 * What sampling/cuts.py, sampling/sampler.py and sampling/torch.py do, row by row; a row that no verdict needs is not
 * looked at. A row becomes weights: 1 for its likeliest token, 0 for what the request's cuts exclude. A token is drawn
 * by weight or is the best with noise. exp and log are rounded otherwise than torch's. Where that could change a
 * coupled draw, the caller is told that it was close.
 */

typedef struct { float temperature, top_p, log_min_p, presence, frequency, repetition, alpha; } slot_floats;
typedef struct { int64_t top_k, seed, choice, prompt_len, min_len, max_len, bias_row, mode; } slot_integers;
enum { GREEDY = 0, REJECTION = 1, COUPLED = 2, SYNTHETIC = 3 }; /* Mode in sampling/state.py, and what alpha says */

INLINE int mode_of(const slot_floats *f, const slot_integers *s) { return f->alpha >= 0.0f ? SYNTHETIC : (int)s->mode; }

/* ---- the likeliest ------------------------------------------------------------------------------------------------ */

/* What sampling/rows.py's `clean` makes of a score. */
#define LARGEST 1e30f
INLINE vf cleaned(vf v) { return pick(v == v, pick(v == splat(INFINITY), splat(LARGEST), v), splat(-INFINITY)); }
INLINE float cleaned_one(float v) { return v != v ? -INFINITY : v == INFINITY ? LARGEST : v; }

#define BEST_BLOCK 256

/* The largest of a row of scores, cleaned, and the first place that has it; 0 where nothing is left. */
static int64_t best_of(const float *x, ptrdiff_t width, float *value) {
    ptrdiff_t block = 0, i;
    float most = -INFINITY;
    for (ptrdiff_t from = 0; from < width; from += BEST_BLOCK) {
        const ptrdiff_t to = from + BEST_BLOCK < width ? from + BEST_BLOCK : width;
        vf top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
        for (i = from; i + 4 * VL <= to; i += 4 * VL) {
            UNROLL for (int j = 0; j < 4; j++) top[j] = larger(cleaned(load_f32(x + i + j * VL)), top[j]);
        }
        float found = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
        for (; i < to; i++) if (cleaned_one(x[i]) > found) found = cleaned_one(x[i]);
        if (found > most) { most = found; block = from; }
    }
    *value = most;
    for (i = block; i < width; i++) if (cleaned_one(x[i]) == most) return i;
    return 0;
}

/* ---- cuts --------------------------------------------------------------------------------------------------------- */

/* The k-th largest of y [n]; -inf where there are fewer. heap: room for k. */
static float kth_largest(const float *y, ptrdiff_t n, ptrdiff_t k, float *heap) {
    for (ptrdiff_t i = 0; i < k; i++) heap[i] = -INFINITY; /* the smallest first */
    for (ptrdiff_t i = 0; i < n; i++) {
        if (!(y[i] > heap[0])) continue;
        ptrdiff_t at = 0;
        for (ptrdiff_t child = 1; child < k; child = 2 * at + 1) {
            if (child + 1 < k && heap[child + 1] < heap[child]) child++;
            if (heap[child] >= y[i]) break;
            heap[at] = heap[child];
            at = child;
        }
        heap[at] = y[i];
    }
    return heap[0];
}

enum { ONE = 0x3F800000, DIGIT = 10 }; /* bits of 1.0f; of a float in [0, 1], looked at so many at a time */

/* The sum of those of w [n] that are no less than a threshold. n: a multiple of VL. */
static double sum_from(const float *w, ptrdiff_t n, float threshold) {
    double total = 0.0;
    for (ptrdiff_t from = 0; from < n; from += BEST_BLOCK) {
        vf part = splat(0.0f);
        for (ptrdiff_t i = from; i < n && i < from + BEST_BLOCK; i += VL) {
            const vf v = load_f32(w + i);
            part += pick(v < splat(threshold), splat(0.0f), v);
        }
        total += sum(part);
    }
    return total;
}

/* Largest threshold such that the weights w [n] in [0, 1] from there on sum to `wanted` at least; 0 where there is none:
 * `histogram_threshold` of sampling/cuts.py. n: a multiple of VL; kept: room for n. */
static float top_p_threshold(const float *w, ptrdiff_t n, double wanted, float *kept) {
    float least = 0x1p-4f; /* few tokens have nearly all of the mass: only they are sorted */
    double found = sum_from(w, n, least);
    for (; found < wanted && least > 0.0f; found = sum_from(w, n, least)) least *= 0x1p-4f;
    double spare = found - wanted; /* what of those may be dropped */
    ptrdiff_t count = 0;
    for (ptrdiff_t i = 0; i < n; i++)
        if (w[i] >= least) kept[count++] = w[i];
    uint32_t bits = 0;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        double held[1 << DIGIT] = {0};
        uint32_t digit = 0, last = 0;
        for (ptrdiff_t i = 0; i < count; i++) {
            uint32_t own;
            memcpy(&own, kept + i, sizeof own);
            if (own > ONE || own >> (shift + DIGIT) != bits) continue;
            own = own >> shift & ((1 << DIGIT) - 1);
            held[own] += kept[i];
            last = own > last ? own : last;
        }
        for (; digit < last && held[digit] <= spare; digit++) spare -= held[digit];
        bits = bits << DIGIT | digit;
    }
    memcpy(&least, &bits, sizeof bits);
    return least;
}

#define WHOLE(n) (((n) + EXPS * VL - 1) / (EXPS * VL) * (EXPS * VL))

/* Weights [WHOLE(n)] of a row of scores under a slot's temperature, min_p, top_k and top_p, and their sum. Returns the
 * largest score over the temperature; -inf: there is nothing to take, and no weight. heap: room for WHOLE(n).
 * sure: NULL, or all tokens that top_p may keep are kept, however sums and exponentials are rounded; those that it keeps
 * in any case are those whose heavier ones sum to less than `sure`. */
static float weigh(const float *x, ptrdiff_t n, const slot_floats *f, const slot_integers *s, float temperature,
                   float *w, float *heap, double *total, double *sure) {
    const ptrdiff_t whole = WHOLE(n);
    vf most = splat(-INFINITY);
    ptrdiff_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf y = cleaned(load_f32(x + i)) / splat(temperature);
        store_f32(w + i, y);
        most = larger(y, most);
    }
    float top = largest(most);
    for (; i < n; i++) {
        w[i] = cleaned_one(x[i]) / temperature;
        top = w[i] > top ? w[i] : top;
    }
    for (; i < whole; i++) w[i] = -INFINITY;
    if (top == -INFINITY) return top;
    const float kth = s->top_k > 0 && s->top_k < n ? kth_largest(w, n, s->top_k, heap) : -INFINITY;
    const float floor = top + f->log_min_p, low = kth > floor ? kth : floor;
    for (i = 0; i < whole; i += EXPS * VL) {
        vf y[EXPS], e[EXPS];
        UNROLL for (int j = 0; j < EXPS; j++) { y[j] = load_f32(w + i + j * VL); e[j] = y[j] - splat(top); }
        exps(EXPS, e);
        UNROLL for (int j = 0; j < EXPS; j++) store_f32(w + i + j * VL, pick(y[j] < splat(low), splat(0.0f), e[j]));
    }
    *total = sum_from(w, whole, 0.0f);
    if (f->top_p < 1.0f) {
        const double wanted = f->top_p * *total, margin = sure ? *total * 0x1p-16 : 0.0;
        const float least = top_p_threshold(w, whole, wanted + margin, heap);
        if (sure) *sure = wanted - margin;
        *total = sum_from(w, whole, least);
        for (i = 0; i < whole; i += VL) {
            const vf v = load_f32(w + i);
            store_f32(w + i, pick(v < splat(least), splat(0.0f), v));
        }
    }
    return top;
}

/* ---- noise -------------------------------------------------------------------------------------------------------- */

enum { DRAFT = 0, ACCEPT = 1, RESIDUAL = 2, GUMBEL = 3, BY_CHANCE = 4 }; /* Role in sampling/philox.py */
enum { COUNTERS = 64, ROUNDS = 10, WORDS = 4 }; /* counters made side by side; each gives a word for WORDS tokens */

/* Philox4x32-10 of N counters, in place. */
INLINE void philox(const int N, uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, int64_t seed) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
    for (int round = 0; round < ROUNDS; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        for (int i = 0; i < N; i++) {
            const uint64_t low = (uint64_t)c0[i] * 0xD2511F53u, high = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(high >> 32) ^ c1[i] ^ k0, c2[i] = (uint32_t)(low >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)high, c3[i] = (uint32_t)low;
        }
    }
}

/* Two uniforms in [0, 1) of an output place and a role. */
static void uniforms(const slot_integers *s, int64_t place, int role, float *u) {
    uint32_t c[4] = {(uint32_t)place, (uint32_t)s->choice, 0, (uint32_t)role};
    philox(1, c, c + 1, c + 2, c + 3, s->seed);
    for (int i = 0; i < 2; i++) u[i] = (float)(c[i] >> 8) * 0x1p-24f;
}

/* `gumbel` in sampling/philox.py of a word, each logarithm rounded as a float. */
static float gumbel(uint32_t word) {
    const float u = ((float)word + 0.5f) * -0x1p-32f, most = -(1.0f - 0x1p-24f);
    return -(float)log(-(double)(float)log1p((double)(u > most ? u : most)));
}

/* ---- draws -------------------------------------------------------------------------------------------------------- */

/* The best of scores with noise: `best_with_noise` in sampling/draws.py. x, w: as `weigh` has them; ids: of the
 * columns; NULL: they are ids. A token has noise g <= -log(u), so it wins only where u <= w * exp(top - best): for most
 * that says it all, and no logarithm is taken. step: tokens of a counter that are looked at, 1 with ids, else WORDS. */
INLINE int64_t best_by(const ptrdiff_t step, const float *x, const float *w, const int64_t *ids, ptrdiff_t n,
                       const slot_integers *s, int64_t place, float temperature, float top, float *score, int *close) {
    const float near = 1e-5f + fabsf(top) * 0x1p-20f; /* what rounding may do to scores */
    float best = -INFINITY, second = -INFINITY, reach = 20.0f; /* the least noise is -2.9 */
    int64_t chosen = 0;
    for (ptrdiff_t next = 0; next < n;) {
        uint32_t c[WORDS][COUNTERS] = {0};
        float own[WORDS][COUNTERS] = {0}; /* their weights */
        int32_t hits[COUNTERS];
        ptrdiff_t at[COUNTERS];
        int count = 0;
        for (; next < n && count < COUNTERS; next += step) {
            float most = 0.0f;
            UNROLL for (ptrdiff_t j = 0; j < step; j++) {
                own[j][count] = w[next + j];
                most = w[next + j] > most ? w[next + j] : most;
            }
            at[count] = next;
            c[2][count] = (uint32_t)(ids ? ids[next] : next) / WORDS;
            count += most * reach >= 0x1p-33f;
        }
        for (int i = 0; i < COUNTERS; i++) c[0][i] = (uint32_t)place, c[1][i] = (uint32_t)s->choice, c[3][i] = GUMBEL;
        philox(COUNTERS, c[0], c[1], c[2], c[3], s->seed);
        for (int i = 0; ids && i < count; i++) c[0][i] = c[ids[at[i]] % WORDS][i];
        for (int i = 0; i < COUNTERS; i += VL) {
            vi hit = {0};
            UNROLL for (ptrdiff_t j = 0; j < step; j++) {
                vu word;
                memcpy(&word, c[j] + i, sizeof word);
                hit |= __builtin_convertvector(word, vf) * splat(0x1p-32f) <= load_f32(own[j] + i) * splat(reach);
            }
            memcpy(hits + i, &hit, sizeof hit);
        }
        for (int i = 0; i < count; i++) {
            for (ptrdiff_t j = 0; hits[i] && j < step; j++) {
                const ptrdiff_t token = at[i] + j;
                if (own[j][i] == 0.0f) continue;
                const float found = gumbel(c[j][i]) + cleaned_one(x[token]) / temperature;
                if (found <= best) { second = found > second ? found : second; continue; }
                second = best, best = found;
                chosen = ids ? ids[token] : token;
                reach = expf(top - best + 2.0f * near);
            }
        }
    }
    *score = best;
    *close |= best - second < near;
    return chosen;
}

static int64_t best_with_noise(const float *x, const float *w, const int64_t *ids, ptrdiff_t n, const slot_integers *s,
                               int64_t place, float temperature, float top, float *score, int *close) {
    return ids ? best_by(1, x, w, ids, n, s, place, temperature, top, score, close)
               : best_by(WORDS, x, w, NULL, n, s, place, temperature, top, score, close);
}

/* Index into weights w [n] by inverse CDF at u: `_pick` in sampling/draws.py. */
static ptrdiff_t picked(const float *w, ptrdiff_t n, float u) {
    double total = 0.0, sum = 0.0;
    for (ptrdiff_t i = 0; i < n; i++) total += w[i];
    const float goal = fminf(u * (float)total, nextafterf((float)total, 0.0f));
    for (ptrdiff_t i = 0; i < n; i++) {
        sum += w[i];
        if (w[i] > 0.0f && (float)sum > goal) return i;
    }
    return 0;
}

/* A token by weight w [n], a block of them and then one in it: `draw` in sampling/draws.py. sums: room for n. */
static int64_t drawn(const float *w, ptrdiff_t n, const float *u, float *sums) {
    const ptrdiff_t most = n < 256 ? n : 256, size = n % most == 0 ? most : n % 128 == 0 ? 128 : n % 64 == 0 ? 64 : 256;
    const ptrdiff_t blocks = (n + size - 1) / size;
    for (ptrdiff_t b = 0; b < blocks; b++) {
        const ptrdiff_t end = (b + 1) * size < n ? (b + 1) * size : n;
        ptrdiff_t i = b * size;
        vf part = splat(0.0f);
        float rest = 0.0f;
        for (; i + VL <= end; i += VL) part += load_f32(w + i);
        for (; i < end; i++) rest += w[i];
        sums[b] = sum(part) + rest;
    }
    const ptrdiff_t first = picked(sums, blocks, u[0]) * size;
    return first + picked(w + first, n - first < size ? n - first : size, u[1]);
}

/* ---- drafting ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const slot_floats *floats; const slot_integers *integers; const int64_t *lengths; /* of each slot */
    const float *heat;                                       /* of each slot, on its temperature; NULL: 1 */
    int64_t *drafts; ptrdiff_t drafts_stride;
    float *q; ptrdiff_t q_slot, q_depth;                     /* [vocab] by slot and depth; NULL: nobody draws by weight */
    const int64_t *ids; ptrdiff_t known, vocab;              /* ids of the known columns; NULL: they are ids */
} draw_args;

/* Draft token `depth` of a slot from scores of the known tokens, and what it was drawn from: `propose` in
 * sampling/sampler.py. Returns 1 where memory is short. */
static int propose(const draw_args *a, int64_t slot, int64_t depth, const float *x) {
    const slot_floats *f = a->floats + slot;
    const slot_integers *s = a->integers + slot;
    const ptrdiff_t n = a->known, V = a->vocab;
    const int64_t place = a->lengths[slot] + depth - s->prompt_len;
    const int mode = mode_of(f, s);
    int64_t *draft = a->drafts + slot * a->drafts_stride + depth;
    float top, u[2];
    if (mode == GREEDY || mode == SYNTHETIC) {
        const int64_t best = best_of(x, n, &top);
        *draft = a->ids ? a->ids[best] : best;
        return 0;
    }
    float *w = malloc(sizeof(float) * (size_t)(WHOLE(n) + WHOLE(V)));
    if (!w) return 1;
    const float temperature = a->heat ? f->temperature * a->heat[slot] : f->temperature;
    double total;
    int close = 0; /* torch need not draft the same */
    top = weigh(x, n, f, s, temperature, w, w + WHOLE(n), &total, NULL);
    if (mode == COUPLED) {
        *draft = top == -INFINITY ? 0 : best_with_noise(x, w, a->ids, n, s, place, temperature, top, &top, &close);
    } else {
        float *q = a->q + slot * a->q_slot + depth * a->q_depth;
        const float share = (float)(1.0 / total);
        if (a->ids || n < V || top == -INFINITY) memset(q, 0, sizeof(float) * (size_t)V);
        if (top == -INFINITY) q[0] = 1.0f; /* any q is exact as long as it is the true one */
        else if (a->ids) for (ptrdiff_t i = 0; i < n; i++) q[a->ids[i]] = w[i] * share;
        else for (ptrdiff_t i = 0; i < n; i++) q[i] = w[i] * share;
        uniforms(s, place, DRAFT, u);
        *draft = drawn(q, V, u, w);
    }
    free(w);
    return 0;
}

/* Of rows x [n, >= known] of slots. */
EXPORT int vpd_propose(const draw_args *a, const int64_t *slots, ptrdiff_t n, int64_t depth, const float *x,
                       ptrdiff_t xs, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (threads > 1 && n > 1 && n * a->known > 65536)
    for (ptrdiff_t i = 0; i < n; i++) failed |= propose(a, slots[i], depth, x + i * xs);
    return failed;
}

/* ---- verdicts ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x; ptrdiff_t xs, width;                     /* rows of scores, [width] of each count */
    const slot_floats *floats; const slot_integers *integers;
    const float *q; ptrdiff_t q_slot, q_depth;               /* as in draw_args */
    const uint8_t *by_weight;                                /* of each span, whether its drafts were drawn from q */
    verdict_args emitted; uint8_t *close; int64_t threads;   /* close: of each span, whether rounding decides */
} judge_args;

/* Which drafts of a span stand, and the token behind them, to its row of `out`: a row that nobody comes to is not
 * looked at. w: room for twice WHOLE(width). */
static void judge_span(const judge_args *a, ptrdiff_t r, float *w, int *close) {
    const verdict_args *e = &a->emitted;
    const int64_t slot = e->slots[r], drafted = drafted_of(e, r);
    const slot_floats *f = a->floats + slot;
    const slot_integers *s = a->integers + slot;
    const int mode = mode_of(f, s);
    const ptrdiff_t n = a->width;
    int64_t *out = e->out + r * (e->widest + 6);
    for (int64_t depth = 0;; depth++) {
        const float *x = a->x + (e->first_row[r] + depth) * a->xs;
        const int64_t place = e->lengths[slot] + depth - s->prompt_len;
        int64_t draft = depth < drafted ? e->drafts[slot * e->drafts_stride + depth] : -1, own;
        if (depth < drafted) draft = draft < 0 ? 0 : draft >= e->vocab ? e->vocab - 1 : draft;
        float top = 0.0f, u[2];
        double total = 1.0;
        int stands;
        if (mode == SYNTHETIC) {
            uniforms(s, place, BY_CHANCE, u);
            stands = u[0] < f->alpha;
            own = best_of(x, n, &top);
            top = 0.0f; /* never hopeless */
        } else if (mode == GREEDY) {
            own = best_of(x, n, &top);
            stands = own == draft;
        } else {
            double sure = INFINITY;
            top = weigh(x, n, f, s, f->temperature, w, w + WHOLE(n), &total, mode == COUPLED ? &sure : NULL);
            own = 0;
            if (top == -INFINITY) stands = 0;
            else if (mode == COUPLED) {
                own = best_with_noise(x, w, NULL, n, s, place, f->temperature, top, &top, close);
                if (sure < INFINITY) {
                    /* where top_k cuts too, torch tells tokens of one weight apart by their scores */
                    const double heavier = s->top_k > 0 && s->top_k < n
                                               ? sum_from(w, WHOLE(n), w[own]) - w[own]
                                               : sum_from(w, WHOLE(n), nextafterf(w[own], INFINITY));
                    *close |= heavier > 0.0 && heavier >= sure;
                }
                stands = own == draft;
            } else {
                const float share = (float)(1.0 / total);
                const float *q = draft >= 0 && a->by_weight[r] ? a->q + slot * a->q_slot + depth * a->q_depth : NULL;
                uniforms(s, place, ACCEPT, u);
                stands = draft >= 0 && u[0] * (q ? q[draft] : 1.0f) < w[draft] * share;
                if (!stands) {
                    if (q) for (ptrdiff_t i = 0; i < n; i++) w[i] = fmaxf(w[i] * share - q[i], 0.0f);
                    else if (draft >= 0) w[draft] = 0.0f;
                    uniforms(s, place, RESIDUAL, u);
                    own = drawn(w, n, u, w + WHOLE(n));
                    if (!(w[own] > 0.0f)) own = best_of(x, n, &top); /* p and q are the same up to rounding */
                }
            }
        }
        if (depth < drafted && stands && top != -INFINITY) continue;
        out[0] = depth, out[1] = own, out[2] = top == -INFINITY;
        return;
    }
}

/* The verdicts of all spans; `emit` says what is written. Returns 1 where memory is short, 2 where coupled draws were so
 * close that rounding decides: then `close` says of which spans, and nothing is written before `vpd_emit`. */
EXPORT int vpd_judge(const judge_args *a) {
    const ptrdiff_t spans = a->emitted.spans, room = 2 * WHOLE(a->width);
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads((int)a->threads) reduction(| : failed) \
    if (a->threads > 1 && spans > 1 && spans * a->width > 65536)
    for (ptrdiff_t r = 0; r < spans; r++) {
        float *w = malloc(sizeof(float) * (size_t)room);
        int close = 0;
        if (w) judge_span(a, r, w, &close);
        a->close[r] = (uint8_t)close;
        failed |= !w ? 1 : close ? 2 : 0;
        free(w);
    }
    for (ptrdiff_t r = 0; r < spans && !failed; r++) emit(&a->emitted, r);
    return failed;
}

EXPORT void vpd_emit(const verdict_args *a) {
    for (ptrdiff_t r = 0; r < a->spans; r++) emit(a, r);
}
