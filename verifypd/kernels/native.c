/* CPU kernels: linear layers, norms, gated activations, rotary embedding, paged rows, paged attention, verdicts, and
 * the layers of a whole pass.
 *
 * Portable C with GCC/Clang vector extensions; the vector width follows the compiler's target. Knows raw pointers and
 * strides (in elements) only; callers own every buffer and have checked shapes and dtypes.
 *
 * Every result of one row is summed in an order that depends on nothing but that row and the weights: one vector
 * accumulator per dot product, lanes folded at the end, whatever the tile. So results do not depend, to the bit, on how
 * many rows a call has or on the number of threads.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#if defined(__AVX__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16   /* floats of a vector */
#define MAXM 6  /* rows of a register tile: MAXM * 4 accumulators + 5 operands fit 32 registers */
#elif defined(__AVX__)
#define VL 8
#define MAXM 3  /* 16 registers */
#else
#define VL 4
#define MAXM 6
#endif
#define MAXO 8

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef uint8_t vq __attribute__((vector_size(VL)));
typedef float f4 __attribute__((vector_size(16)));

enum { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, HALF = 4 /* packed float16, see native_half.h */, E4M3 = 5 /* of caches */ };

typedef uint16_t bf16;  /* bits of a bfloat16 */
typedef struct { uint16_t bits; } f16;
typedef struct { uint8_t bits; } e4m3;

/* ---- loads, stores, folds ------------------------------------------------------------------------------------- */

INLINE vf splat(float s) { return s - (vf){0}; }
INLINE vf load_f32(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf load_bf16(const bf16 *p) {
#if defined(__aarch64__) && VL == 4 /* compilers take the conversion apart lane by lane */
    return (vf)vshll_n_u16(vld1_u16(p), 16);
#elif VL == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif VL == 8 && defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vh h; memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

INLINE float one_bf16(bf16 b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }

INLINE bf16 to_bf16(float f) {  /* round to nearest even; NaN stays NaN */
    uint32_t u; memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (bf16)((u >> 16) | 64);
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE float one_f16(f16 h) {
#ifdef __aarch64__
    __fp16 x; memcpy(&x, &h, 2); return (float)x;
#elif defined(__F16C__)
    return _cvtsh_ss(h.bits);
#else
    uint32_t s = (uint32_t)(h.bits & 0x8000) << 16, e = (h.bits >> 10) & 31, m = h.bits & 1023, u;
    if (e == 31) u = s | 0x7f800000 | m << 13;
    else if (e) u = s | (e + 112) << 23 | m << 13;
    else { float f = (float)m * 0x1p-24f; memcpy(&u, &f, 4); u |= s; }
    float f; memcpy(&f, &u, 4); return f;
#endif
}

INLINE f16 to_f16(float f) {
    f16 h;
#ifdef __aarch64__
    __fp16 x = (__fp16)f; memcpy(&h, &x, 2);
#elif defined(__F16C__)
    h.bits = (uint16_t)_cvtss_sh(f, 0);
#else
    uint32_t u; memcpy(&u, &f, 4);
    uint32_t s = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a >= 0x7f800000) h.bits = (uint16_t)(s | 0x7c00 | (a > 0x7f800000 ? 512 : 0));
    else if (a >= 0x477ff000) h.bits = (uint16_t)(s | 0x7c00);
    else if (a >= 0x38800000) h.bits = (uint16_t)(s | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));
    else { float g; memcpy(&g, &a, 4); g = g * 0x1p24f; h.bits = (uint16_t)(s | (uint32_t)lrintf(g)); }
#endif
    return h;
}

INLINE vf load_f16(const f16 *p) {
#if defined(__aarch64__) && VL == 4
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#elif defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && VL == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf v; for (int i = 0; i < VL; i++) v[i] = one_f16(p[i]); return v;
#endif
}

/* The exponent of e4m3 is read as a float's, and put right by a product; below 2^-6 that float is subnormal. */
INLINE float one_e4m3(e4m3 b) {
    uint32_t u = (uint32_t)(b.bits & 0x80) << 24 | (uint32_t)(b.bits & 0x7f) << 20;
    float f; memcpy(&f, &u, 4); return f * 0x1p120f;
}

INLINE e4m3 to_e4m3(float f) {  /* round to nearest even; what lies beyond 448 is 448, NaN stays NaN */
    uint32_t u; memcpy(&u, &f, 4);
    uint32_t a = u & 0x7fffffff, to;
    if (a > 0x7f800000) to = 0x7f;
    else if (a >= 0x43e00000) to = 0x7e;
    else if (a >= 0x3c800000) to = (a - 0x3c000000 + 0x7ffff + ((a >> 20) & 1)) >> 20;
    else { float g; memcpy(&g, &a, 4); to = (uint32_t)lrintf(g * 0x1p9f); }
    return (e4m3){(uint8_t)((u >> 24 & 0x80) | to)};
}

INLINE vf load_e4m3(const e4m3 *p) {
    vq b; memcpy(&b, p, sizeof b);
    vu u = __builtin_convertvector(b, vu);
    return (vf)((u & 0x80) << 24 | (u & 0x7f) << 20) * splat(0x1p120f);
}

INLINE vf load_i8(const int8_t *p) {
#if defined(__aarch64__) && VL == 4
    int32_t four; memcpy(&four, p, 4);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
#elif VL == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif VL == 8 && defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vb b; memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

INLINE float one_f32(float f) { return f; }
INLINE float one_i8(int8_t b) { return (float)b; }
INLINE float to_f32(float f) { return f; }

/* a * b + c, always fused where the processor can: the compiler is not left to choose tile by tile. */
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__aarch64__) && VL == 4
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Lanes of v folded to four, always halves onto halves. */
INLINE f4 fold(vf v) {
#if VL == 4
    return v;
#elif VL == 8
    f4 h[2]; memcpy(h, &v, sizeof v); return h[0] + h[1];
#else
    f4 h[4]; memcpy(h, &v, sizeof v); return (h[0] + h[2]) + (h[1] + h[3]);
#endif
}

INLINE float sum4(f4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }
INLINE float sum(vf v) { return sum4(fold(v)); }

/* Four sums at once, each in the order of sum4. */
INLINE f4 sums(f4 a, f4 b, f4 c, f4 d) {
#ifdef __aarch64__
    return (f4)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
    return (f4){sum4(a), sum4(b), sum4(c), sum4(d)};
#endif
}

INLINE float largest(vf v) {
    float m = v[0];
    UNROLL for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

#define EXPS 4 /* vectors whose exp is computed by turns: each alone would wait for itself at every step */
#define EACH UNROLL for (int i = 0; i < N; i++)

/* x becomes exp(x) to about 1 ulp, x <= 88; exactly 0 below -87, so -inf drops out. */
INLINE void exps(const int N, vf *x) {
    const vf magic = splat(0x1.8p23f);
    vi low[EXPS], e[EXPS];
    vf n[EXPS], p[EXPS];
    EACH low[i] = x[i] < splat(-87.0f);
    EACH n[i] = fused(x[i], splat(0x1.715476p+0f), magic);
    EACH { e[i] = (vi)n[i] << 23; n[i] -= magic; }
    EACH x[i] = fused(n[i], splat(-0x1.62e400p-1f), x[i]);
    EACH x[i] = fused(n[i], splat(-0x1.7f7d1cp-20f), x[i]);
    EACH p[i] = fused(splat(1.9875691500e-4f), x[i], splat(1.3981999507e-3f));
    EACH p[i] = fused(p[i], x[i], splat(8.3334519073e-3f));
    EACH p[i] = fused(p[i], x[i], splat(4.1665795894e-2f));
    EACH p[i] = fused(p[i], x[i], splat(1.6666665459e-1f));
    EACH p[i] = fused(p[i], x[i], splat(5.0000001201e-1f));
    EACH p[i] *= x[i];
    EACH p[i] = fused(p[i], x[i], x[i]);
    EACH x[i] = (vf)(~low[i] & ((vi)(p[i] + splat(1.0f)) + e[i]));
}

INLINE vf vexp(vf x) {
    x = pick(x > splat(88.0f), splat(88.0f), x);
    exps(1, &x);
    return x;
}

INLINE vf vtanh(vf x) {
    vi sign = (vi)x & (int32_t)0x80000000;
    vf a = (vf)((vi)x & 0x7fffffff);
    a = pick(a > splat(20.0f), splat(20.0f), a);
    vf big = splat(1.0f) - splat(2.0f) / (vexp(a + a) + splat(1.0f));
    vf s = a * a;
    vf p = splat(0x1.664f48p-6f);           /*  62/2835 */
    p = p * s - splat(0x1.ba1ba2p-5f);      /* -17/315  */
    p = p * s + splat(0x1.111112p-3f);      /*   2/15   */
    p = p * s - splat(0x1.555556p-2f);      /*  -1/3    */
    vf small = p * s * a + a;
    return (vf)((vi)pick(a < splat(0.25f), small, big) | sign);
}

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
#if !defined(VPD_NO_AMX) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES
#include "native_amx.h"
#endif

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
#ifdef __ARM_FEATURE_DOTPROD
    if (type == I8) return product_dots(&a, chunk, threads);
#endif
#ifdef TILES
    if ((type == BF16 || type == I8) && K % 32 == 0 && out >= 16 && amx_allowed()) {
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

/* ---- norms, gates, rotation ------------------------------------------------------------------------------------ */

INLINE vf load_any(const void *p, int type, ptrdiff_t i) {
    if (type == F32) return load_f32((const float *)p + i);
    if (type == BF16) return load_bf16((const bf16 *)p + i);
    return load_f16((const f16 *)p + i);
}

INLINE void norm_row(const int type, const float *x, const float *r, float *total, const void *w, float *y,
                     ptrdiff_t H, float eps, float offset) {
    vf acc = splat(0.0f);
    ptrdiff_t i = 0;
    float tail = 0.0f;
    if (r) {
        for (; i + VL <= H; i += VL) {
            vf v = load_f32(x + i) + load_f32(r + i);
            store_f32(total + i, v);
            acc = fused(v, v, acc);
        }
        for (; i < H; i++) { total[i] = x[i] + r[i]; tail += total[i] * total[i]; }
        x = total;
    } else {
        for (; i + VL <= H; i += VL) { vf v = load_f32(x + i); acc = fused(v, v, acc); }
        for (; i < H; i++) tail += x[i] * x[i];
    }
    float s = 1.0f / sqrtf((sum(acc) + tail) / (float)H + eps);
    vf vs = splat(s), vo = splat(offset);
    for (i = 0; i + VL <= H; i += VL) store_f32(y + i, load_f32(x + i) * vs * (load_any(w, type, i) + vo));
    for (; i < H; i++) y[i] = x[i] * s * (bias_at(w, type, i) + offset);
}

/* y = norm(x + residual) * (weight + offset), total = x + residual; residual and total may be NULL. */
EXPORT void vpd_norm(const float *x, ptrdiff_t xs, const float *residual, float *total, const void *w, int type,
                     float *y, ptrdiff_t n, ptrdiff_t H, float eps, float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * H > 65536)
    for (ptrdiff_t i = 0; i < n; i++) {
        const float *r = residual ? residual + i * H : NULL;
        float *t = total ? total + i * H : NULL;
        if (type == F32) norm_row(F32, x + i * xs, r, t, w, y + i * H, H, eps, offset);
        else if (type == BF16) norm_row(BF16, x + i * xs, r, t, w, y + i * H, H, eps, offset);
        else norm_row(F16, x + i * xs, r, t, w, y + i * H, H, eps, offset);
    }
}

INLINE vf gate(const int gelu, vf g) {
    if (gelu) {
        vf inner = splat(2 * 0.7978845608028654f) * (g + splat(0.044715f) * g * g * g);
        return g / (splat(1.0f) + vexp(-inner)); /* (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), without cancellation */
    }
    return g / (splat(1.0f) + vexp(-g));
}

INLINE void gated_row(const int gelu, const float *g, const float *u, float *y, ptrdiff_t I) {
    ptrdiff_t i = 0;
    for (; i + VL <= I; i += VL) store_f32(y + i, gate(gelu, load_f32(g + i)) * load_f32(u + i));
    if (i < I) {
        vf v = splat(0.0f);
        for (ptrdiff_t j = i; j < I; j++) v[j - i] = g[j];
        v = gate(gelu, v);
        for (ptrdiff_t j = i; j < I; j++) y[j] = v[j - i] * u[j];
    }
}

EXPORT void vpd_gated(const float *x, ptrdiff_t xs, float *y, ptrdiff_t n, ptrdiff_t I, int gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * I > 16384)
    for (ptrdiff_t i = 0; i < n; i++) {
        if (gelu) gated_row(1, x + i * xs, x + i * xs + I, y + i * I, I);
        else gated_row(0, x + i * xs, x + i * xs + I, y + i * I, I);
    }
}

INLINE void rotate_row(float *x, const float *c, const float *s, ptrdiff_t half) {
    ptrdiff_t i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load_f32(x + i), b = load_f32(x + half + i), vc = load_f32(c + i), vs = load_f32(s + i);
        store_f32(x + i, a * vc - b * vs);
        store_f32(x + half + i, b * vc + a * vs);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * c[i] - b * s[i];
        x[half + i] = b * c[i] + a * s[i];
    }
}

EXPORT void vpd_rotate(float *q, ptrdiff_t qs, ptrdiff_t Hq, float *k, ptrdiff_t ks, ptrdiff_t Hk, const int64_t *pos,
                       const float *cos, const float *sin, ptrdiff_t n, ptrdiff_t D, ptrdiff_t half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * (Hq + Hk) * D > 65536)
    for (ptrdiff_t i = 0; i < n; i++) {
        const float *c = cos + pos[i] * half, *s = sin + pos[i] * half;
        for (ptrdiff_t h = 0; h < Hq; h++) rotate_row(q + i * qs + h * D, c, s, half);
        for (ptrdiff_t h = 0; h < Hk; h++) rotate_row(k + i * ks + h * D, c, s, half);
    }
}

/* ---- rows of a paged cache ------------------------------------------------------------------------------------- */

/* Row i is entry within[i] of a span that begins at starts[row_span[i]] of its slot: where that is in the text and in
 * the cache. Before the text begins: at position 0, and in the null block, as is what lies before first[slot] (NULL: 0).
 * Returns 1 where the table has no such place. */
EXPORT int vpd_place(const int64_t *row_span, const int64_t *within, const int64_t *slots, ptrdiff_t all_slots,
                     const int64_t *starts, ptrdiff_t blocks, const int32_t *table, ptrdiff_t table_stride,
                     ptrdiff_t block_size, const int64_t *first, ptrdiff_t n, int64_t *positions,
                     int64_t *write_index) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t span = row_span[i], at = starts[span] + within[i], position = at < 0 ? 0 : at;
        const int64_t slot = slots[span], index = position / block_size;
        if (slot < 0 || slot >= all_slots || index >= blocks) return 1;
        positions[i] = position;
        const int none = at < (first ? first[slot] : 0);
        write_index[i] = none ? 0 : table[slot * table_stride + index] * (int64_t)block_size + position % block_size;
    }
    return 0;
}

/* The same for spans that begin at the last of the lengths[slot] tokens of their slots, whose places come out too; row i
 * of the pass is of a span that has offsets[span] rows before it. */
EXPORT int vpd_place_last(const int64_t *row_span, const int64_t *within, const int64_t *slots, ptrdiff_t all_slots,
                          const int64_t *lengths, ptrdiff_t spans, ptrdiff_t blocks, const int32_t *table,
                          ptrdiff_t table_stride, ptrdiff_t block_size, const int64_t *first, ptrdiff_t n,
                          int64_t *starts, int64_t *positions, int64_t *write_index) {
    for (ptrdiff_t i = 0; i < spans; i++) {
        if (slots[i] < 0 || slots[i] >= all_slots) return 1;
        starts[i] = lengths[slots[i]] - 1;
    }
    return vpd_place(row_span, within, slots, all_slots, starts, blocks, table, table_stride, block_size, first, n,
                     positions, write_index);
}

/* Tokens of such a pass: the last confirmed one of each span, then its drafts. Returns 1 where a row has none. */
EXPORT int vpd_ids(const int64_t *row_span, const int64_t *slots, const int64_t *starts, const int64_t *positions,
                   const int64_t *tokens, ptrdiff_t tokens_stride, const int64_t *drafts, ptrdiff_t drafts_stride,
                   ptrdiff_t n, int64_t *ids) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t slot = slots[row_span[i]], depth = positions[i] - starts[row_span[i]];
        if (positions[i] >= tokens_stride + drafts_stride || depth > drafts_stride) return 1;
        if (depth <= 0 && positions[i] >= tokens_stride) return 1;
        ids[i] = depth > 0 ? drafts[slot * drafts_stride + depth - 1] : tokens[slot * tokens_stride + positions[i]];
    }
    return 0;
}

/* Row i goes where the cache holds position positions[i] of slot slots[row_span[i]]; a void row, which writes its keys to
 * place 0, goes nowhere. */
EXPORT void vpd_keep(float *data, const float *rows, ptrdiff_t width, const int32_t *table, ptrdiff_t table_stride,
                     ptrdiff_t block_size, const int64_t *slots, const int64_t *row_span, const int64_t *positions,
                     const int64_t *write_index, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) {
        if (!write_index[i]) continue;
        const int64_t at = positions[i], block = table[slots[row_span[i]] * table_stride + at / block_size];
        memcpy(data + (block * block_size + at % block_size) * width, rows + i * width, sizeof(float) * (size_t)width);
    }
}

/* ---- paged attention ------------------------------------------------------------------------------------------- */

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

/* ---- verdicts --------------------------------------------------------------------------------------------------- */

enum { RUNNING = 0, STOP = 1, LENGTH = 2, ERROR = 3 }; /* Finish in sampling/verify.py */

typedef struct {
    const int64_t *slots, *depth, *first_row; ptrdiff_t spans, widest; /* widest: most drafts of a span */
    const int64_t *accepted, *following; const uint8_t *hopeless;      /* NULL: as own and top, of each row, have it */
    const int64_t *own; const float *top;
    int64_t *tokens; ptrdiff_t tokens_stride; int64_t *lengths;
    const int64_t *drafts; ptrdiff_t drafts_stride; const int64_t *draft_lens;
    const int64_t *stop_ids; ptrdiff_t stop_stride, stop_width;
    const int64_t *max_len; ptrdiff_t max_len_stride;
    uint8_t *alive; int64_t vocab; int64_t *out; /* [spans, widest + 6] */
} verdict_args;

static int64_t leading(const verdict_args *a, const int64_t *draft, int64_t row, int64_t drafted) {
    int64_t stand = 0;
    for (; stand < drafted; stand++) {
        const int64_t token = draft[stand] < 0 ? 0 : draft[stand] >= a->vocab ? a->vocab - 1 : draft[stand];
        if (a->own[row + stand] != token || !(a->top[row + stand] > -INFINITY)) break;
    }
    return stand;
}

/* What is emitted of each span, cut at the first stop id and at the greatest length; tokens, lengths and life with it.
 * out, by span: tokens emitted, drafts among them, drafts judged, why it ends, the id that ended it, the tokens. */
EXPORT void vpd_verdicts(const verdict_args *a) {
    const int64_t width = a->widest + 1;
    for (ptrdiff_t r = 0; r < a->spans; r++) {
        const int64_t slot = a->slots[r], length = a->lengths[slot], most = a->max_len[slot * a->max_len_stride];
        const int64_t *draft = a->drafts + slot * a->drafts_stride;
        const int64_t drafted = a->draft_lens[slot] < a->depth[r] ? a->draft_lens[slot] : a->depth[r];
        const int64_t accepted = a->accepted ? a->accepted[r] : leading(a, draft, a->first_row[r], drafted);
        const int64_t row = a->first_row[r] + accepted;
        const int64_t following = a->accepted ? a->following[r] : a->own[row];
        const int hopeless = a->accepted ? a->hopeless[r] : a->top[row] == -INFINITY, alive = a->alive[slot];
        int64_t *out = a->out + r * (width + 5), *emitted = out + 5, stop_at = width;
        for (int64_t j = 0; j < a->widest; j++) emitted[j] = draft[j];
        emitted[a->widest] = emitted[accepted] = following;
        for (int64_t j = 0; j < width && j + hopeless <= accepted && stop_at == width; j++) {
            for (ptrdiff_t i = 0; i < a->stop_width; i++)
                if (emitted[j] == a->stop_ids[slot * a->stop_stride + i]) stop_at = j;
        }
        const int64_t room = most > length ? most - length : 0, limit = stop_at + 1 < room ? stop_at + 1 : room;
        const int64_t whole = accepted + 1 < limit ? accepted + 1 : limit;
        const int error = hopeless && limit > accepted; /* the missing token is one that would have been emitted */
        const int stopped = stop_at < whole;
        const int64_t count = alive && !error ? whole : 0;
        out[0] = count;
        out[1] = accepted < count ? accepted : count;
        out[2] = alive ? drafted : 0;
        out[3] = !alive ? RUNNING : error ? ERROR : stopped ? STOP : length + whole >= most ? LENGTH : RUNNING;
        out[4] = stopped && alive && !error ? emitted[stop_at] : -1;
        memcpy(a->tokens + slot * a->tokens_stride + length, emitted, sizeof(int64_t) * (size_t)count);
        a->lengths[slot] = length + count;
        a->alive[slot] = alive && out[3] == RUNNING;
    }
}

/* ---- look-up ---------------------------------------------------------------------------------------------------- */

/* Whoever has drafts to find, a pair of slot and drafts each: what followed the latest of the longest earlier
 * occurrences of its last tokens, `shortest` to `longest` of them, in the first `width` of its row; a draft that runs
 * past the end goes on with itself. `depth` drafts are written of each; how many count: those it has, or none where
 * nothing was found, unless `always`. */
EXPORT void vpd_look_up(const int64_t *tokens, ptrdiff_t tokens_stride, ptrdiff_t width, const int64_t *lengths,
                        const int64_t *wanted, ptrdiff_t count, ptrdiff_t shortest, ptrdiff_t longest, ptrdiff_t depth,
                        int always, int64_t *drafts, ptrdiff_t drafts_stride, int64_t *draft_lens) {
    for (ptrdiff_t r = 0; r < count; r++) {
        const int64_t slot = wanted[2 * r], length = lengths[slot], last = length - 1;
        const int64_t *text = tokens + slot * tokens_stride;
        ptrdiff_t best = 0, size = 0; /* where the best match ends, and its tokens */
        for (ptrdiff_t end = 0; end < width && end < last; end++) {
            if (text[end] != text[last]) continue;
            ptrdiff_t same = 1;
            while (same < longest && same <= end && text[end - same] == text[last - same]) same++;
            if (same >= shortest && same >= size) { size = same; best = end; }
        }
        const int64_t start = best + 1, period = length - start > 1 ? length - start : 1;
        for (ptrdiff_t j = 0; j < depth; j++) {
            const int64_t at = start + j % period;
            drafts[slot * drafts_stride + j] = text[at < width ? at : width - 1];
        }
        draft_lens[slot] = size || always ? wanted[2 * r + 1] : 0;
    }
}

/* ---- decoder layers --------------------------------------------------------------------------------------------- */

/* The layers of a pass in one call: from a caller in Python each of their operations costs 20 us beside its work, since
 * the weights that stream by leave it cold caches. Nothing is computed here but by the functions above, in the order in
 * which the models call them, so results are the same to the bit. The structs are laid out as in models/native.py. */

typedef struct { const void *w; int64_t type; } vector_weight; /* w NULL: there is none */
typedef struct { const void *w; const float *scale; ptrdiff_t out, K; int64_t type; vector_weight bias; } matrix_weight;
typedef struct {
    matrix_weight qkv, output, gate_up, down;
    vector_weight q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm, next_norm;
    const float *cos, *sin;
    ptrdiff_t window;
} layer_weights;
typedef struct {
    ptrdiff_t H, I, Hq, Hk, D, half; /* half: columns of the rotary tables */
    int64_t gelu;
    float eps, offset, scale, softcap;
    vector_weight first_norm;
} layer_shape;

static int multiply(const float *x, ptrdiff_t n, const matrix_weight *m, float *y, int threads) {
    return vpd_linear(x, m->K, n, m->w, (int)m->type, m->scale, m->bias.w, (int)m->bias.type, y, m->K, m->out, threads);
}

static void normed(const float *x, const float *residual, float *total, const vector_weight *w, const layer_shape *s,
                   float *y, ptrdiff_t n, int threads) {
    vpd_norm(x, s->H, residual, total, w->w, (int)w->type, y, n, s->H, s->eps, s->offset, threads);
}

/* Each of a row's heads is normed where it lies. */
static void normed_heads(float *x, ptrdiff_t xs, ptrdiff_t heads, const vector_weight *w, const layer_shape *s,
                         ptrdiff_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * heads * s->D > 65536)
    for (ptrdiff_t i = 0; i < n; i++)
        vpd_norm(x + i * xs, s->D, NULL, NULL, w->w, (int)w->type, x + i * xs, heads, s->D, s->eps, s->offset, 1);
}

/* residual [n, H] in; the residual stream behind the last layer and, normed, x out, both [n, H]. captures: a place for
 * the stream behind each layer, or 0. scratch: n * vpd_scratch(shape) floats. cache: the layers' keys and, value_bytes behind them,
 * values; scales: [count, 2, Hk] of e4m3. Returns 1 where memory is short. */
EXPORT int vpd_layers(const layer_weights *layers, ptrdiff_t count, const layer_shape *s, const float *residual,
                      float *stream, float *x, const int64_t *captures, float *scratch, const int64_t *positions,
                      char *cache, ptrdiff_t layer_bytes, ptrdiff_t value_bytes, int type, const float *scales,
                      const int64_t *write_index, const int64_t *offsets, const int64_t *slots, const int64_t *starts, const int32_t *table,
                      ptrdiff_t table_stride, ptrdiff_t block_size, const int64_t *begins, ptrdiff_t n,
                      ptrdiff_t spans, int threads) {
    const ptrdiff_t q_width = s->Hq * s->D, width = q_width + 2 * s->Hk * s->D;
    float *added = scratch, *gated = added + n * s->H, *gate_up = gated + n * s->I;
    float *qkv = gate_up, *mixed = qkv + n * width; /* done with when the MLP begins */
    normed(residual, NULL, NULL, &s->first_norm, s, x, n, threads);
    for (ptrdiff_t i = 0; i < count; i++, cache += layer_bytes) {
        const layer_weights *l = layers + i;
        if (multiply(x, n, &l->qkv, qkv, threads)) return 1;
        if (l->q_norm.w) {
            normed_heads(qkv, width, s->Hq, &l->q_norm, s, n, threads);
            normed_heads(qkv + q_width, width, s->Hk, &l->k_norm, s, n, threads);
        }
        float *k = qkv + q_width, *v = k + s->Hk * s->D;
        vpd_rotate(qkv, width, s->Hq, k, width, s->Hk, positions, l->cos, l->sin, n, s->D, s->half, threads);
        if (vpd_attend(qkv, width, k, width, v, width, cache, cache + value_bytes, type,
                       scales ? scales + i * 2 * s->Hk : NULL, write_index, offsets, slots, starts, table, table_stride, block_size, begins, mixed, n, spans, s->Hq, s->Hk, s->D, l->window,
                       s->scale, s->softcap, threads))
            return 1;
        if (multiply(mixed, n, &l->output, added, threads)) return 1;
        if (l->post_attention_norm.w)
            normed(added, NULL, NULL, &l->post_attention_norm, s, added, n, threads);
        normed(added, residual, stream, &l->mlp_norm, s, x, n, threads);
        if (multiply(x, n, &l->gate_up, gate_up, threads)) return 1;
        vpd_gated(gate_up, 2 * s->I, gated, n, s->I, (int)s->gelu, threads);
        if (multiply(gated, n, &l->down, added, threads)) return 1;
        if (l->post_mlp_norm.w) normed(added, NULL, NULL, &l->post_mlp_norm, s, added, n, threads);
        normed(added, stream, stream, &l->next_norm, s, x, n, threads);
        if (captures[i]) memcpy((float *)(intptr_t)captures[i], stream, sizeof(float) * (size_t)(n * s->H));
        residual = stream;
    }
    return 0;
}

/* Floats of a row in the working space of vpd_layers. */
EXPORT ptrdiff_t vpd_scratch(const layer_shape *s) {
    const ptrdiff_t attention = 2 * (s->Hq + s->Hk) * s->D, mlp = 2 * s->I;
    return s->H + s->I + (attention > mlp ? attention : mlp);
}

#include "native_head.h"
