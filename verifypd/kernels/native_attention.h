/* Paged attention: writes the rows' keys and values, then attends. Included by native.c. */

#define KEYS 64   /* keys of a softmax step, at absolute positions 64 c .. 64 c + 63 so that every row sums alike */
#define QUERIES 24 /* query vectors that share the keys and values of a step */

typedef struct {
    const float *q, *k, *v; ptrdiff_t qs, ks, vs;
    void *kc, *vc;
    const int64_t *write_index, *offsets, *slots, *starts;
    const int32_t *table; ptrdiff_t table_stride, block_size;
    const int64_t *begins; /* of each slot, the first position that holds anything; NULL: 0 */
    float *out;
    ptrdiff_t n, spans, Hq, Hk, D, window; /* window: keys a row sees, its own included; 0: all */
    float scale, softcap;                  /* softcap 0: none */
    const float *scales;                   /* [2, Hk], what keys and values of a cache in e4m3 are multiplied by */
} attend_args;

/* acc[M][D part] = o * rescale + sum over keys of p * v, VECS vectors of D at a time. */
#define DEFINE_VALUES(T, WT, LOAD)                                                                                  \
    INLINE void values_##T(const int M, const int VECS, const float *p, const WT *const *v, ptrdiff_t d,            \
                           ptrdiff_t n, const float *rescale, float *o, ptrdiff_t D) {                              \
        vf acc[MAXM][16];                                                                                           \
        UNROLL for (int m = 0; m < M; m++) {                                                                        \
            UNROLL for (int i = 0; i < VECS; i++)                                                                   \
                acc[m][i] = load_f32(o + m * D + d + i * VL) * splat(rescale[m]);                                   \
        }                                                                                                           \
        for (ptrdiff_t j = 0; j < n; j++) {                                                                         \
            vf b[16];                                                                                               \
            UNROLL for (int i = 0; i < VECS; i++) b[i] = LOAD(v[j] + d + i * VL);                                   \
            UNROLL for (int m = 0; m < M; m++) {                                                                    \
                vf a = splat(p[m * KEYS + j]);                                                                      \
                UNROLL for (int i = 0; i < VECS; i++) acc[m][i] = fused(a, b[i], acc[m][i]);                        \
            }                                                                                                       \
        }                                                                                                           \
        UNROLL for (int m = 0; m < M; m++) {                                                                        \
            UNROLL for (int i = 0; i < VECS; i++) store_f32(o + m * D + d + i * VL, acc[m][i]);                     \
        }                                                                                                           \
    }                                                                                                               \
    INLINE void add_values_##T(const int M, const float *p, const WT *const *v, ptrdiff_t n, const float *rescale,  \
                               float *o, ptrdiff_t D) {                                                             \
        ptrdiff_t d = 0;                                                                                            \
        for (; d + 4 * VL <= D; d += 4 * VL) values_##T(M, 4, p, v, d, n, rescale, o, D);                           \
        for (; d + VL <= D; d += VL) values_##T(M, 1, p, v, d, n, rescale, o, D);                                   \
        for (; d < D; d++) {                                                                                        \
            for (int m = 0; m < M; m++) {                                                                           \
                float s = o[m * D + d] * rescale[m];                                                                \
                for (ptrdiff_t j = 0; j < n; j++) s = FMAF(p[m * KEYS + j], ONE_##T(v[j][d]), s);                   \
                o[m * D + d] = s;                                                                                   \
            }                                                                                                       \
        }                                                                                                           \
    }
#define ONE_f32 one_f32
#define ONE_bf16 one_bf16
#define ONE_f16 one_f16
#define ONE_e4m3 one_e4m3

DEFINE_VALUES(f32, float, load_f32)
DEFINE_VALUES(bf16, bf16, load_bf16)
DEFINE_VALUES(f16, f16, load_f16)
DEFINE_VALUES(e4m3, e4m3, load_e4m3)

/* Scores of one query vector in a step become weights: keys outside [from, to) weigh 0. Returns the factor for what
 * was summed before. */
static float soften(float *p, ptrdiff_t from, ptrdiff_t to, float softcap, float *top, float *total) {
    if (to <= from) {
        for (int i = 0; i < KEYS; i += VL) store_f32(p + i, splat(0.0f));
        return 1.0f;
    }
    ptrdiff_t padded = (to + VL - 1) / VL * VL;
    if (softcap > 0.0f) {
        for (ptrdiff_t i = to; i < padded; i++) p[i] = 0.0f;
        vf inverse = splat(1.0f / softcap), cap = splat(softcap);
        for (ptrdiff_t i = 0; i < padded; i += VL) store_f32(p + i, vtanh(load_f32(p + i) * inverse) * cap);
    }
    for (ptrdiff_t i = 0; i < from; i++) p[i] = -INFINITY;
    for (ptrdiff_t i = to; i < KEYS; i++) p[i] = -INFINITY;
    vf best[4];
    UNROLL for (int j = 0; j < 4; j++) best[j] = load_f32(p + j * VL);
    for (int i = 4 * VL; i < KEYS; i += 4 * VL) {
        UNROLL for (int j = 0; j < 4; j++) best[j] = larger(load_f32(p + i + j * VL), best[j]);
    }
    float m = largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
    if (*top > m) m = *top;
    const float rescale = vexp(splat(*top - m))[0];
    vf vm = splat(m), acc = splat(0.0f);
    for (ptrdiff_t i = 0; i < KEYS; i += EXPS * VL) {
        vf e[EXPS];
        UNROLL for (int j = 0; j < EXPS; j++) e[j] = load_f32(p + i + j * VL) - vm;
        exps(EXPS, e);
        UNROLL for (int j = 0; j < EXPS; j++) { store_f32(p + i + j * VL, e[j]); acc += e[j]; }
    }
    *total = *total * rescale + sum(acc);
    *top = m;
    return rescale;
}

INLINE void fetch(const void *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
}

/* Rows [j0, j1) of a span and the query heads of key head h. scratch: see vpd_attend. */
#define DEFINE_ATTEND(T, WT)                                                                                        \
    static void attend_##T(const attend_args *a, ptrdiff_t span, ptrdiff_t j0, ptrdiff_t j1, ptrdiff_t h,           \
                           float *scratch) {                                                                        \
        const ptrdiff_t D = a->D, G = a->Hq / a->Hk, nq = (j1 - j0) * G, line = a->Hk * D, bs = a->block_size;      \
        const ptrdiff_t first = a->offsets[span], start = a->starts[span];                                          \
        const int32_t *blocks = a->table + a->slots[span] * a->table_stride;                                        \
        const WT *kc = (const WT *)a->kc + h * D, *vc = (const WT *)a->vc + h * D;                                  \
        float *q = scratch, *o = q + nq * D, *p = o + nq * D, *top = p + nq * KEYS, *total = top + nq;              \
        float *rescale = total + nq;                                                                                \
        const float scale = a->scales ? a->scale * a->scales[h] : a->scale;                                         \
        for (ptrdiff_t i = 0; i < nq; i++) {                                                                        \
            const float *from = a->q + (first + j0 + i / G) * a->qs + (h * G + i % G) * D;                          \
            for (ptrdiff_t d = 0; d < D; d++) { q[i * D + d] = from[d] * scale; o[i * D + d] = 0.0f; }              \
            top[i] = -INFINITY;                                                                                     \
            total[i] = 0.0f;                                                                                        \
        }                                                                                                           \
        ptrdiff_t last = start + j1 - 1, begin = a->begins ? a->begins[a->slots[span]] : 0, lowest = begin;         \
        if (a->window > 0 && start + j0 - a->window + 1 > begin) lowest = start + j0 - a->window + 1;               \
        for (ptrdiff_t base = lowest / KEYS * KEYS; base <= last; base += KEYS) {                                   \
            ptrdiff_t n = last + 1 - base < KEYS ? last + 1 - base : KEYS;                                          \
            const WT *values[KEYS];                                                                                 \
            for (ptrdiff_t j = 0; j < n;) { /* runs of keys within a block */                                       \
                ptrdiff_t at = (base + j) % bs, run = bs - at < n - j ? bs - at : n - j;                            \
                ptrdiff_t line0 = ((ptrdiff_t)blocks[(base + j) / bs] * bs + at) * line;                            \
                const WT *keys = kc + line0;                                                                        \
                const char *near = (const char *)keys;                                                              \
                for (ptrdiff_t i = 0; i < run; i++) {                                                               \
                    values[j + i] = vc + line0 + i * line;                                                          \
                    fetch(values[j + i], (size_t)D * sizeof(WT));                                                   \
                }                                                                                                   \
                if (base + j + run <= last) { /* keys of the next block: it may lie anywhere */                     \
                    const WT *next = kc + (ptrdiff_t)blocks[(base + j + run) / bs] * bs * line;                     \
                    for (ptrdiff_t i = 0; i < bs && base + j + run + i <= last; i++)                                \
                        fetch(next + i * line, (size_t)D * sizeof(WT));                                             \
                }                                                                                                   \
                ptrdiff_t i = 0;                                                                                    \
                for (; i + 4 <= run; i += 4)                                                                        \
                    four_##T(nq, q, D, keys + i * line, line, D, near, p + j + i, KEYS);                            \
                for (; i < run; i++) single_##T(nq, q, D, keys + i * line, line, D, near, p + j + i, KEYS);         \
                j += run;                                                                                           \
            }                                                                                                       \
            for (ptrdiff_t i = 0; i < nq; i++) {                                                                    \
                ptrdiff_t pos = start + j0 + i / G, to = pos + 1 - base, from = begin > base ? begin - base : 0;    \
                if (to > n) to = n;                                                                                 \
                if (a->window > 0 && pos - a->window + 1 > base + from) from = pos - a->window + 1 - base;          \
                rescale[i] = soften(p + i * KEYS, from, to, a->softcap, top + i, total + i);                        \
            }                                                                                                       \
            ptrdiff_t tiles = (nq + MAXM - 1) / MAXM;                                                               \
            for (ptrdiff_t t = 0; t < tiles; t++) {                                                                 \
                ptrdiff_t from = nq * t / tiles, to = nq * (t + 1) / tiles;                                         \
                const float *pt = p + from * KEYS;                                                                  \
                float *ot = o + from * D;                                                                           \
                switch (to - from) {                                                                                \
                case 1: add_values_##T(1, pt, values, n, rescale + from, ot, D); break;                             \
                case 2: add_values_##T(2, pt, values, n, rescale + from, ot, D); break;                             \
                case 3: add_values_##T(3, pt, values, n, rescale + from, ot, D); break;                             \
                VALUE_CASES(T)                                                                                      \
                }                                                                                                   \
            }                                                                                                       \
        }                                                                                                           \
        for (ptrdiff_t i = 0; i < nq; i++) { /* void rows saw no key: 0 */                                          \
            float *to = a->out + ((first + j0 + i / G) * a->Hq + h * G + i % G) * D;                                \
            float s = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;                                                     \
            if (a->scales) s *= a->scales[a->Hk + h];                                                               \
            for (ptrdiff_t d = 0; d < D; d++) to[d] = o[i * D + d] * s;                                             \
        }                                                                                                           \
    }

#if MAXM > 3
#define VALUE_CASES(T)                                                                                              \
                case 4: add_values_##T(4, pt, values, n, rescale + from, ot, D); break;                             \
                case 5: add_values_##T(5, pt, values, n, rescale + from, ot, D); break;                             \
                case 6: add_values_##T(6, pt, values, n, rescale + from, ot, D); break;
#else
#define VALUE_CASES(T)
#endif

DEFINE_ATTEND(f32, float)
DEFINE_ATTEND(bf16, bf16)
DEFINE_ATTEND(f16, f16)
DEFINE_ATTEND(e4m3, e4m3)

static void write_row(const attend_args *a, int type, ptrdiff_t i) {
    ptrdiff_t line = a->Hk * a->D, at = a->write_index[i] * line;
    const float *k = a->k + i * a->ks, *v = a->v + i * a->vs;
    if (type == F32) {
        memcpy((float *)a->kc + at, k, sizeof(float) * (size_t)line);
        memcpy((float *)a->vc + at, v, sizeof(float) * (size_t)line);
    } else if (type == BF16) {
        for (ptrdiff_t d = 0; d < line; d++) ((bf16 *)a->kc)[at + d] = to_bf16(k[d]);
        for (ptrdiff_t d = 0; d < line; d++) ((bf16 *)a->vc)[at + d] = to_bf16(v[d]);
    } else if (type == F16) {
        for (ptrdiff_t d = 0; d < line; d++) ((f16 *)a->kc)[at + d] = to_f16(k[d]);
        for (ptrdiff_t d = 0; d < line; d++) ((f16 *)a->vc)[at + d] = to_f16(v[d]);
    } else {
        const float *scales = a->scales;
        for (ptrdiff_t d = 0; d < line; d++) ((e4m3 *)a->kc)[at + d] = to_e4m3(k[d] / scales[d / a->D]);
        for (ptrdiff_t d = 0; d < line; d++) ((e4m3 *)a->vc)[at + d] = to_e4m3(v[d] / scales[a->Hk + d / a->D]);
    }
}

EXPORT int vpd_attend(const float *q, ptrdiff_t qs, const float *k, ptrdiff_t ks, const float *v, ptrdiff_t vs,
                      void *kc, void *vc, int type, const float *scales, const int64_t *write_index,
                      const int64_t *offsets, const int64_t *slots,
                      const int64_t *starts, const int32_t *table, ptrdiff_t table_stride, ptrdiff_t block_size,
                      const int64_t *begins, float *out, ptrdiff_t n, ptrdiff_t spans, ptrdiff_t Hq, ptrdiff_t Hk, ptrdiff_t D,
                      ptrdiff_t window, float scale, float softcap, int threads) {
    attend_args a = {q, k, v, qs, ks, vs, kc, vc, write_index, offsets, slots, starts, table, table_stride, block_size,
                     begins, out, n, spans, Hq, Hk, D, window, scale, softcap, scales};
    void (*run)(const attend_args *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, float *) =
        type == F32 ? attend_f32 : type == BF16 ? attend_bf16 : type == F16 ? attend_f16 : attend_e4m3;
    const ptrdiff_t G = Hq / Hk;
    ptrdiff_t tiles = 0, longest = 1, rows = QUERIES / G > 1 ? QUERIES / G : 1; /* rows of a work item */
    for (ptrdiff_t r = 0; r < spans; r++)
        if (offsets[r + 1] - offsets[r] > longest) longest = offsets[r + 1] - offsets[r];
    if (threads > 1 && spans * Hk < 2 * threads && rows > (longest + 1) / 2) rows = (longest + 1) / 2; /* work for all */
    for (ptrdiff_t r = 0; r < spans; r++) tiles += (offsets[r + 1] - offsets[r] + rows - 1) / rows;
    const size_t per_thread = (size_t)(rows * G * (2 * D + KEYS + 3) + 16);
    struct { int32_t span, from; } *items = malloc(sizeof *items * (size_t)(tiles ? tiles : 1));
    float *scratch = malloc(sizeof(float) * per_thread * (size_t)(threads > 1 ? threads : 1));
    if (!items || !scratch) { free(items); free(scratch); return 1; }
    ptrdiff_t t = 0;
    int64_t work = 0; /* query-key pairs */
    for (ptrdiff_t r = 0; r < spans; r++) {
        int64_t count = offsets[r + 1] - offsets[r];
        work += count * (starts[r] + count > 0 ? starts[r] + count : 0);
        for (int64_t j = 0; j < count; j += rows) { items[t].span = (int32_t)r; items[t++].from = (int32_t)j; }
    }
    if (threads > 1 && work * Hq * D < 32768) threads = 1; /* not worth waking the others */
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        float *mine = scratch + per_thread * (size_t)omp_get_thread_num();
#else
        float *mine = scratch;
#endif
#pragma omp for schedule(static)
        for (ptrdiff_t i = 0; i < n; i++) write_row(&a, type, i);
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t i = tiles * Hk - 1; i >= 0; i--) { /* the last tile of a chunk has the most keys: first */
            ptrdiff_t span = items[i / Hk].span, from = items[i / Hk].from, count = offsets[span + 1] - offsets[span];
            run(&a, span, from, from + rows < count ? from + rows : count, i % Hk, mine);
        }
    }
    free(items);
    free(scratch);
    return 0;
}
