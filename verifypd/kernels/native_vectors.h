/* Vectors, as wide as the compiler's target has them: loads, stores and conversions of every type of number, sums,
 * maxima, exp and tanh. Included by native.c.
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

enum { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, HALF = 4 /* packed float16, see native_half.h */, E4M3 = 5 /* of caches */,
       PANELS = 6, WIDE_PANELS = 7, I8_PANELS = 8 /* of bfloat16, float32 and int8, see native_panels.h */ };

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

/* The exponent of e4m3 is read as a float's, and put right by a product; below 2^-6 that float is subnormal. Its only
 * NaN is 0x7f, with either sign. */
INLINE float one_e4m3(e4m3 b) {
    if ((b.bits & 0x7f) == 0x7f) return NAN;
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
    const vf value = (vf)((u & 0x80) << 24 | (u & 0x7f) << 20) * splat(0x1p120f);
    return (vf)((vu)value | (vu)((u & 0x7f) == 0x7f));
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

/* The largest size of n entries, n a multiple of VL; NaN where one of them is. */
INLINE float largest_size(const float *x, ptrdiff_t n) {
    vi top = {0}; /* sizes compare as integers do, NaN above all */
    for (ptrdiff_t i = 0; i < n; i += VL) {
        const vi size = (vi)load_f32(x + i) & 0x7fffffff;
        top = (vi)pick(size > top, (vf)size, (vf)top);
    }
    int32_t most = 0;
    for (int i = 0; i < VL; i++) most = top[i] > most ? top[i] : most;
    float f; memcpy(&f, &most, 4); return f;
}

#define EXPS 4 /* vectors whose exp is computed by turns: each alone would wait for itself at every step */
#define EACH UNROLL for (int i = 0; i < N; i++)

/* x becomes exp(x) to about 1 ulp, x <= 88; exactly 0 below -87, so -inf drops out. */
INLINE void exps(const int N, vf *x) {
    const vf magic = splat(0x1.8p23f);
    vi low[EXPS], e[EXPS];
    vf n[EXPS], p[EXPS];
    EACH low[i] = x[i] < splat(-87.0f);
    EACH n[i] = fused(x[i], splat(0x1.715476p+0f), magic);
    EACH { e[i] = (vi)((vu)n[i] << 23); n[i] -= magic; }
    EACH x[i] = fused(n[i], splat(-0x1.62e400p-1f), x[i]);
    EACH x[i] = fused(n[i], splat(-0x1.7f7d1cp-20f), x[i]);
    EACH p[i] = fused(splat(1.9875691500e-4f), x[i], splat(1.3981999507e-3f));
    EACH p[i] = fused(p[i], x[i], splat(8.3334519073e-3f));
    EACH p[i] = fused(p[i], x[i], splat(4.1665795894e-2f));
    EACH p[i] = fused(p[i], x[i], splat(1.6666665459e-1f));
    EACH p[i] = fused(p[i], x[i], splat(5.0000001201e-1f));
    EACH p[i] *= x[i];
    EACH p[i] = fused(p[i], x[i], x[i]);
    EACH x[i] = (vf)(~low[i] & (vi)((vu)(p[i] + splat(1.0f)) + (vu)e[i]));
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
