/* Linear layers: register tiles, products of every type of weights, int8 by dot products of int8 where there are any.
 * native_half.h, native_amx.h and native_panels.h hold products with weights in another order. Included by native.c.
 */

/* ---- register tiles: M rows of x times O rows of w ------------------------------------------------------------ */

/* While a tile is computed, the weights of the next one are fetched to the second-level cache, from `ahead` on: one
 * line per step covers it. Pass the tile itself where there is no next one: a walk into unmapped memory is slow. */
#define DEFINE_TILE(T, WT, LOAD, ONE)                                                                               \
    INLINE void tile_##T(const int M, const int O, const float *x, ptrdiff_t xs, const WT *w, ptrdiff_t ws,         \
                         ptrdiff_t K, const char *ahead, float *out, ptrdiff_t os) {                                \
        vf acc[MAXM][MAXO];                                                                                         \
        UNROLL for (int m = 0; m < M; m++) { UNROLL for (int o = 0; o < O; o++) acc[m][o] = splat(0.0f); }          \
        ptrdiff_t k = 0;                                                                                            \
        for (; k + VL <= K; k += VL) {                                                                              \
            vf b[MAXO];                                                                                             \
            UNROLL for (int i = 0; i < (int)sizeof(WT) * O * VL; i += 64) __builtin_prefetch(ahead + i, 0, 2);      \
            ahead += sizeof(WT) * O * VL;                                                                           \
            UNROLL for (int o = 0; o < O; o++) b[o] = LOAD(w + o * ws + k);                                         \
            UNROLL for (int m = 0; m < M; m++) {                                                                    \
                vf a = load_f32(x + m * xs + k);                                                                    \
                UNROLL for (int o = 0; o < O; o++) acc[m][o] = fused(a, b[o], acc[m][o]);                           \
            }                                                                                                       \
        }                                                                                                           \
        if (k < K) { /* the last K % VL entries, padded with zeros */                                               \
            vf b[MAXO];                                                                                             \
            UNROLL for (int o = 0; o < O; o++) {                                                                    \
                b[o] = splat(0.0f);                                                                                 \
                for (ptrdiff_t i = k; i < K; i++) b[o][i - k] = ONE(w[o * ws + i]);                                 \
            }                                                                                                       \
            UNROLL for (int m = 0; m < M; m++) {                                                                    \
                vf a = splat(0.0f);                                                                                 \
                for (ptrdiff_t i = k; i < K; i++) a[i - k] = x[m * xs + i];                                         \
                UNROLL for (int o = 0; o < O; o++) acc[m][o] = fused(a, b[o], acc[m][o]);                           \
            }                                                                                                       \
        }                                                                                                           \
        UNROLL for (int m = 0; m < M; m++) {                                                                        \
            if (O % 4 == 0) {                                                                                       \
                UNROLL for (int o = 0; o < O; o += 4) {                                                             \
                    f4 s = sums(fold(acc[m][o]), fold(acc[m][o + 1]), fold(acc[m][o + 2]), fold(acc[m][o + 3]));    \
                    memcpy(out + m * os + o, &s, 16);                                                               \
                }                                                                                                   \
            } else {                                                                                                \
                UNROLL for (int o = 0; o < O; o++) out[m * os + o] = sum(acc[m][o]);                                \
            }                                                                                                       \
        }                                                                                                           \
    }                                                                                                               \
    /* n rows of x (any number) against O rows of w, in tiles of near-equal height. */                              \
    INLINE void rows_##T(const int O, ptrdiff_t n,  const float *x, ptrdiff_t xs, const WT *w, ptrdiff_t ws,        \
                          ptrdiff_t K, const char *ahead, float *out, ptrdiff_t os) {                               \
        ptrdiff_t tiles = (n + MAXM - 1) / MAXM;                                                                    \
        for (ptrdiff_t t = 0; t < tiles; t++) {                                                                     \
            ptrdiff_t from = n * t / tiles, to = n * (t + 1) / tiles;                                               \
            const float *xt = x + from * xs;                                                                        \
            float *ot = out + from * os;                                                                            \
            switch (to - from) {                                                                                    \
            case 1: tile_##T(1, O, xt, xs, w, ws, K, ahead, ot, os); break;                                         \
            case 2: tile_##T(2, O, xt, xs, w, ws, K, ahead, ot, os); break;                                         \
            case 3: tile_##T(3, O, xt, xs, w, ws, K, ahead, ot, os); break;                                         \
            ROW_CASES(T, O)                                                                                         \
            }                                                                                                       \
        }                                                                                                           \
    }                                                                                                               \
    NOINLINE void four_##T(ptrdiff_t n, const float *x, ptrdiff_t xs, const WT *w, ptrdiff_t ws, ptrdiff_t K,       \
                         const char *ahead, float *out, ptrdiff_t os) {                                             \
        rows_##T(4, n, x, xs, w, ws, K, ahead, out, os);                                                            \
    }                                                                                                               \
    NOINLINE void single_##T(ptrdiff_t n, const float *x, ptrdiff_t xs, const WT *w, ptrdiff_t ws, ptrdiff_t K,     \
                           const char *ahead, float *out, ptrdiff_t os) {                                           \
        rows_##T(1, n, x, xs, w, ws, K, ahead, out, os);                                                            \
    }
#if MAXM > 3
#define ROW_CASES(T, O)                                                                                             \
            case 4: tile_##T(4, O, xt, xs, w, ws, K, ahead, ot, os); break;                                         \
            case 5: tile_##T(5, O, xt, xs, w, ws, K, ahead, ot, os); break;                                         \
            case 6: tile_##T(6, O, xt, xs, w, ws, K, ahead, ot, os); break;
#else
#define ROW_CASES(T, O)
#endif

DEFINE_TILE(f32, float, load_f32, one_f32)
DEFINE_TILE(bf16, bf16, load_bf16, one_bf16)
DEFINE_TILE(f16, f16, load_f16, one_f16)
DEFINE_TILE(i8, int8_t, load_i8, one_i8)
DEFINE_TILE(e4m3, e4m3, load_e4m3, one_e4m3)

/* ---- linear --------------------------------------------------------------------------------------------------- */

#define TOKEN_BLOCK 96 /* rows of x kept in the second-level cache while weights stream by */

typedef struct {
    const float *x; ptrdiff_t xs, n, K, out;
    const void *w; const float *scale; const void *bias; int bias_type;
    float *y;
} linear_args;

#if defined(__aarch64__) || defined(__FMA__)
#define FMAF __builtin_fmaf
#else
#define FMAF(a, b, c) ((a) * (b) + (c))
#endif

INLINE float bias_at(const void *bias, int type, ptrdiff_t i) {
    if (type == F32) return ((const float *)bias)[i];
    if (type == BF16) return one_bf16(((const bf16 *)bias)[i]);
    return one_f16(((const f16 *)bias)[i]);
}

static void finish(const linear_args *a, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t from, ptrdiff_t to) {
    if (!a->scale && !a->bias) return;
    for (ptrdiff_t r = row; r < row + rows; r++) {
        float *y = a->y + r * a->out;
        if (a->scale) for (ptrdiff_t o = from; o < to; o++) y[o] *= a->scale[o];
        if (a->bias) for (ptrdiff_t o = from; o < to; o++) y[o] += bias_at(a->bias, a->bias_type, o);
    }
}

/* Outputs [from, to). Up to two rows: eight outputs at a time, the weights read once. More: four at a time, and where
 * several tiles of rows follow, weights are widened to float32 once, in a buffer that stays in the nearest cache. */
#define AHEAD(O) ((const char *)(o + 2 * (O) <= to ? w + (o + (O)) * K : w + o * K))

#define DEFINE_LINEAR(T, WT, LOAD, ONE)                                                                             \
    static void linear_##T(const linear_args *a, ptrdiff_t from, ptrdiff_t to) {                                    \
        const WT *w = a->w;                                                                                         \
        const ptrdiff_t K = a->K, out = a->out;                                                                     \
        float *wide = NULL;                                                                                         \
        if (sizeof(WT) < 4 && a->n > MAXM) wide = malloc(sizeof(float) * 4 * (size_t)K);                            \
        for (ptrdiff_t row = 0; row < a->n; row += TOKEN_BLOCK) {                                                   \
            ptrdiff_t n = a->n - row < TOKEN_BLOCK ? a->n - row : TOKEN_BLOCK, o = from;                            \
            const float *x = a->x + row * a->xs;                                                                    \
            float *y = a->y + row * out;                                                                            \
            if (n == 1) {                                                                                           \
                for (; o + 8 <= to; o += 8) tile_##T(1, 8, x, a->xs, w + o * K, K, K, AHEAD(8), y + o, out);        \
            } else if (n == 2) {                                                                                    \
                for (; o + 8 <= to; o += 8) tile_##T(2, 8, x, a->xs, w + o * K, K, K, AHEAD(8), y + o, out);        \
            }                                                                                                       \
            for (; o + 4 <= to; o += 4) {                                                                           \
                if (wide && n > MAXM) {                                                                             \
                    for (ptrdiff_t i = 0; i < 4; i++) {                                                             \
                        const WT *wi = w + (o + i) * K;                                                             \
                        ptrdiff_t k = 0;                                                                            \
                        for (; k + VL <= K; k += VL) store_f32(wide + i * K + k, LOAD(wi + k));                     \
                        for (; k < K; k++) wide[i * K + k] = ONE(wi[k]);                                            \
                    }                                                                                               \
                    four_f32(n, x, a->xs, wide, K, K, AHEAD(4), y + o, out);                                        \
                } else {                                                                                            \
                    four_##T(n, x, a->xs, w + o * K, K, K, AHEAD(4), y + o, out);                                   \
                }                                                                                                   \
            }                                                                                                       \
            for (; o < to; o++) single_##T(n, x, a->xs, w + o * K, K, K, AHEAD(1), y + o, out);                     \
            finish(a, row, n, from, to);                                                                            \
        }                                                                                                           \
        free(wide);                                                                                                 \
    }

DEFINE_LINEAR(f32, float, load_f32, one_f32)
DEFINE_LINEAR(bf16, bf16, load_bf16, one_bf16)
DEFINE_LINEAR(f16, f16, load_f16, one_f16)
DEFINE_LINEAR(i8, int8_t, load_i8, one_i8)

#ifdef __ARM_FEATURE_DOTPROD
/* int8 weights by integer dot products. A row of x becomes 15-bit integers, 128 * hi + lo, with one scale per group of
 * 256 entries: |error| <= max|x| of the group / 32512, far below the error of int8 weights. Integer sums are exact. */
#define GROUP 256

typedef struct { const int8_t *hi, *lo; const float *scale; ptrdiff_t stride, groups; } split_rows;

static void split_row(const float *x, ptrdiff_t K, int8_t *hi, int8_t *lo, float *scale, ptrdiff_t stride) {
    memset(hi + K / 16 * 16, 0, (size_t)(stride - K / 16 * 16));
    memset(lo + K / 16 * 16, 0, (size_t)(stride - K / 16 * 16));
    for (ptrdiff_t k = 0; k < K; k += GROUP) {
        ptrdiff_t n = K - k < GROUP ? K - k : GROUP;
        float top = 0.0f;
        for (ptrdiff_t i = 0; i < n; i++) { float a = fabsf(x[k + i]); top = a > top ? a : top; }
        float inverse = top > 0.0f ? 16256.0f / top : 0.0f;
        scale[k / GROUP] = top / 16256.0f;
        for (ptrdiff_t i = 0; i < n; i++) {
            int32_t q = (int32_t)__builtin_rintf(x[k + i] * inverse), h = (q + 64) >> 7;
            hi[k + i] = (int8_t)h;
            lo[k + i] = (int8_t)(q - h * 128);
        }
    }
}

INLINE void dots(const int M, const int O, const split_rows *x, ptrdiff_t row, const int8_t *w, ptrdiff_t K,
                 const char *ahead, float *out, ptrdiff_t os) {
    const int8_t *hi = x->hi + row * x->stride, *lo = x->lo + row * x->stride;
    float32x4_t total[3][2];
    UNROLL for (int m = 0; m < M; m++) { UNROLL for (int o = 0; o < O; o += 4) total[m][o / 4] = vdupq_n_f32(0.0f); }
    for (ptrdiff_t g = 0; g < x->groups; g++) {
        int32x4_t high[3][8], low[3][8];
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int o = 0; o < O; o++) high[m][o] = low[m][o] = vdupq_n_s32(0);
        }
        ptrdiff_t k = g * GROUP, end = k + GROUP < K ? k + GROUP : K;
        for (; k + 16 <= end; k += 16) {
            int8x16_t b[8];
            UNROLL for (int i = 0; i < 16 * O; i += 64) __builtin_prefetch(ahead + i, 0, 2);
            ahead += 16 * O;
            UNROLL for (int o = 0; o < O; o++) b[o] = vld1q_s8(w + o * K + k);
            UNROLL for (int m = 0; m < M; m++) {
                int8x16_t h = vld1q_s8(hi + m * x->stride + k), l = vld1q_s8(lo + m * x->stride + k);
                UNROLL for (int o = 0; o < O; o++) {
                    high[m][o] = vdotq_s32(high[m][o], h, b[o]);
                    low[m][o] = vdotq_s32(low[m][o], l, b[o]);
                }
            }
        }
        if (k < end) { /* the last K % 16 entries of the row */
            UNROLL for (int o = 0; o < O; o++) {
                int8_t part[16] = {0};
                for (ptrdiff_t i = k; i < end; i++) part[i - k] = w[o * K + i];
                int8x16_t b = vld1q_s8(part);
                UNROLL for (int m = 0; m < M; m++) {
                    high[m][o] = vdotq_s32(high[m][o], vld1q_s8(hi + m * x->stride + k), b);
                    low[m][o] = vdotq_s32(low[m][o], vld1q_s8(lo + m * x->stride + k), b);
                }
            }
        }
        UNROLL for (int m = 0; m < M; m++) {
            float s = x->scale[(row + m) * x->groups + g];
            int32x4_t both[8];
            UNROLL for (int o = 0; o < O; o++) both[o] = vaddq_s32(vshlq_n_s32(high[m][o], 7), low[m][o]);
            UNROLL for (int o = 0; o < O; o += 4) {
                int32x4_t four = vdupq_n_s32(vaddvq_s32(both[o]));
                if (O >= 4) {
                    four = vpaddq_s32(vpaddq_s32(both[o], both[o + 1]), vpaddq_s32(both[o + 2], both[o + 3]));
                }
                total[m][o / 4] = vfmaq_n_f32(total[m][o / 4], vcvtq_f32_s32(four), s);
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int o = 0; o < O; o += 4) memcpy(out + m * os + o, &total[m][o / 4], O >= 4 ? 16 : 4);
    }
}

static void linear_dots(const linear_args *a, const split_rows *x, ptrdiff_t from, ptrdiff_t to) {
    const int8_t *w = a->w;
    const ptrdiff_t K = a->K, out = a->out;
    ptrdiff_t o = from, n = a->n, tiles = (n + 2) / 3;
    if (n == 1) for (; o + 8 <= to; o += 8) dots(1, 8, x, 0, w + o * K, K, AHEAD(8), a->y + o, out);
    for (; o + 4 <= to; o += 4) {
        for (ptrdiff_t t = 0; t < tiles; t++) {
            ptrdiff_t row = n * t / tiles, rows = n * (t + 1) / tiles - row;
            float *y = a->y + row * out + o;
            if (rows == 1) dots(1, 4, x, row, w + o * K, K, AHEAD(4), y, out);
            else if (rows == 2) dots(2, 4, x, row, w + o * K, K, AHEAD(4), y, out);
            else dots(3, 4, x, row, w + o * K, K, AHEAD(4), y, out);
        }
    }
    for (; o < to; o++) {
        for (ptrdiff_t row = 0; row < n; row++) dots(1, 1, x, row, w + o * K, K, AHEAD(1), a->y + row * out + o, out);
    }
    finish(a, 0, n, from, to);
}
#endif

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#include "native_half.h"
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES
#include "native_amx.h"
#endif
#include "native_panels.h"

/* Whether weights may come as HALF. */
EXPORT int vpd_takes_half(void) {
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    return 1;
#else
    return 0;
#endif
}

/* Whether bfloat16 and int8 weights are multiplied by tiles. */
EXPORT int vpd_takes_tiles(void) {
#ifdef TILES
    return amx_allowed();
#else
    return 0;
#endif
}

/* Whether weights of this type should come in panels: where vectors multiply them, and not tiles. */
EXPORT int vpd_takes_panels(int type) {
#if defined(__AVX2__) && defined(__FMA__)
    if (type == F32) return 1;
    if (vpd_takes_tiles()) return 0;
#ifdef PANEL_INTEGERS
    if (type == I8) return 1;
#endif
    return type == BF16;
#else
    (void)type;
    return 0;
#endif
}

#ifdef __ARM_FEATURE_DOTPROD
static int product_dots(const linear_args *a, ptrdiff_t chunk, int threads) {
    const ptrdiff_t n = a->n, K = a->K, out = a->out, chunks = (out + chunk - 1) / chunk;
    const ptrdiff_t stride = (K + 15) / 16 * 16, groups = (K + GROUP - 1) / GROUP;
    int8_t *parts = malloc((size_t)(n * stride * 2) + sizeof(float) * (size_t)(n * groups));
    if (!parts) return 1;
    int8_t *hi = parts, *lo = parts + n * stride;
    float *scales = (float *)(lo + n * stride);
    split_rows rows = {hi, lo, scales, stride, groups};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (ptrdiff_t i = 0; i < n; i++)
            split_row(a->x + i * a->xs, K, hi + i * stride, lo + i * stride, scales + i * groups, stride);
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t c = 0; c < chunks; c++)
            linear_dots(a, &rows, c * chunk, (c + 1) * chunk < out ? (c + 1) * chunk : out);
    }
    free(parts);
    return 0;
}
#endif

/* y = x * w^T. Returns 1 where memory is short. */
EXPORT int vpd_linear(const float *x, ptrdiff_t xs, ptrdiff_t n, const void *w, int type, const float *scale,
                      const void *bias, int bias_type, float *y, ptrdiff_t K, ptrdiff_t out, int threads) {
    linear_args a = {x, xs, n, K, out, w, scale, bias, bias_type, y};
    if (n * K * out < 65536) threads = 1;
    if (threads < 1) threads = 1;
    ptrdiff_t chunk = threads == 1 ? out : (out / (threads * 4) + 7) / 8 * 8; /* a late thread costs little */
    if (chunk < 16) chunk = 16;
    ptrdiff_t from = 0; /* the first output that is not done */
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    if (type == HALF) return product_half(&a, chunk, threads);
#endif
    if (type == PANELS || type == WIDE_PANELS || type == I8_PANELS) {
        product_panels(&a, type, threads);
        return 0;
    }
#ifdef __ARM_FEATURE_DOTPROD
    if (type == I8) return product_dots(&a, chunk, threads);
#endif
#ifdef TILES
    if (amx_fits(type, K, out)) {
        if (product_amx(&a, type, (chunk + 31) / 32 * 32, threads)) return 1;
        from = out / 16 * 16;
        if (from == out) return 0;
    }
#endif
    const ptrdiff_t chunks = (out - from + chunk - 1) / chunk;
    void (*run)(const linear_args *, ptrdiff_t, ptrdiff_t) =
        type == F32 ? linear_f32 : type == BF16 ? linear_bf16 : type == F16 ? linear_f16 : linear_i8;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (ptrdiff_t c = 0; c < chunks; c++)
        run(&a, from + c * chunk, from + (c + 1) * chunk < out ? from + (c + 1) * chunk : out);
    return 0;
}
