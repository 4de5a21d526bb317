/* The AVX-512 and AMX operations of verifypd/kernels/native*.h, as Intel's manual describes them, on any processor.
 *
 * What a processor would refuse aborts. Compilers find this file in place of their own: see ../emulation.py.
 */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#undef SYS_arch_prctl
#define SYS_arch_prctl 0
#define syscall(...) 0 /* the system allows tiles */
#undef __ARM_FEATURE_DOTPROD
#undef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC

#define OP static inline __attribute__((unused))
#define MUST(c) do { if (!(c)) { fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #c); abort(); } } while (0)
#define LANES for (int i = 0; i < 16; i++)

/* ---- vectors --------------------------------------------------------------------------------------------------- */

typedef float __m512 __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef long long __m256i __attribute__((vector_size(32)));
typedef long long __m128i __attribute__((vector_size(16)));
typedef short __m512bh __attribute__((vector_size(64)));
typedef int32_t words __attribute__((vector_size(64)));

OP __m512 _mm512_loadu_ps(const void *p) { __m512 v; memcpy(&v, p, 64); return v; }
OP __m256i _mm256_loadu_si256(const __m256i *p) { __m256i v; memcpy(&v, p, 32); return v; }
OP __m128i _mm_loadu_si128(const __m128i *p) { __m128i v; memcpy(&v, p, 16); return v; }
OP void _mm512_storeu_si512(void *p, __m512i v) { memcpy(p, &v, 64); }
OP void _mm_storeu_si128(__m128i *p, __m128i v) { memcpy(p, &v, 16); }
OP __m256i _mm512_castsi512_si256(__m512i v) { __m256i r; memcpy(&r, &v, 32); return r; }
OP __m256i _mm512_extracti64x4_epi64(__m512i v, int h) { __m256i r; memcpy(&r, (char *)&v + 32 * h, 32); return r; }
OP __m512i _mm512_slli_epi32(__m512i v, int n) { words w = (words)v; LANES w[i] = (int)((unsigned)w[i] << n); return (__m512i)w; }
OP __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { LANES c[i] = fmaf(a[i], b[i], c[i]); return c; }
OP __m512i _mm512_cvtepu16_epi32(__m256i v) { uint16_t h[16]; words w; memcpy(h, &v, 32); LANES w[i] = h[i]; return (__m512i)w; }
OP __m512i _mm512_cvtepi8_epi32(__m128i v) { int8_t b[16]; words w; memcpy(b, &v, 16); LANES w[i] = b[i]; return (__m512i)w; }
OP __m128i _mm512_cvtepi32_epi8(__m512i v) {
    int8_t b[16]; words w = (words)v; __m128i r; LANES b[i] = (int8_t)w[i]; memcpy(&r, b, 16); return r;
}
OP __m512 _mm512_cvtepi32_ps(__m512i v) { words w = (words)v; __m512 f; LANES f[i] = (float)w[i]; return f; }
OP __m512i _mm512_cvtps_epi32(__m512 v) {
    words w; LANES w[i] = fabsf(v[i]) < 0x1p31f ? (int32_t)rintf(v[i]) : INT32_MIN; return (__m512i)w;
}
OP __m512 _mm512_cvtph_ps(__m256i v) {
    uint16_t h[16]; __m512 f; memcpy(h, &v, 32);
    LANES {
        int e = h[i] >> 10 & 31, m = h[i] & 1023;
        float size = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(m + 1024), e - 25) : ldexpf((float)m, -24);
        f[i] = h[i] >> 15 ? -size : size;
    }
    return f;
}

OP float flushed(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f; }
OP uint16_t nearest_bf16(float f) {
    uint32_t u; f = flushed(f); memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
OP __m512bh _mm512_cvtne2ps_pbh(__m512 second, __m512 first) {
    uint16_t h[32]; __m512bh r;
    LANES { h[i] = nearest_bf16(first[i]); h[16 + i] = nearest_bf16(second[i]); }
    memcpy(&r, h, 64);
    return r;
}

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

typedef struct { int rows, width; uint8_t at[16][64]; } tile;
static __thread tile tiles[8]; /* no rows: there is none */

OP tile *known(int i) { MUST(tiles[i].rows); return tiles + i; }

OP void _tile_loadconfig(const void *p) {
    const uint8_t *b = p;
    MUST(b[0] == 1);
    for (int i = 1; i < 16; i++) MUST(b[i] == 0);
    memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < 16; i++) {
        const int width = b[16 + 2 * i] | b[17 + 2 * i] << 8, rows = b[48 + i];
        MUST(width <= (i < 8 ? 64 : 0) && rows <= 16 && !width == !rows);
        if (i < 8) { tiles[i].rows = rows; tiles[i].width = width; }
    }
}
OP void _tile_release(void) { memset(tiles, 0, sizeof tiles); }
OP void _tile_zero(int i) { memset(known(i)->at, 0, 1024); }
OP void _tile_loadd(int i, const void *p, ptrdiff_t stride) {
    tile *t = known(i);
    memset(t->at, 0, 1024);
    for (int r = 0; r < t->rows; r++) memcpy(t->at[r], (const char *)p + r * stride, (size_t)t->width);
}
OP void _tile_stored(int i, void *p, ptrdiff_t stride) {
    tile *t = known(i);
    for (int r = 0; r < t->rows; r++) memcpy((char *)p + r * stride, t->at[r], (size_t)t->width);
}

OP void check(int d, int a, int b) {
    MUST(d != a && d != b && a != b);
    MUST(known(d)->width == known(b)->width && tiles[d].rows == known(a)->rows && tiles[a].width == 4 * tiles[b].rows);
}
OP float from_bf16(const uint8_t *p) {
    uint32_t u = (uint32_t)(p[0] | p[1] << 8) << 16; float f; memcpy(&f, &u, 4); return flushed(f);
}
OP float add(float a, float b) { volatile float sum = flushed(a) + flushed(b); return flushed(sum); }

OP void _tile_dpbf16ps(int d, int a, int b) {
    check(d, a, b);
    for (int m = 0; m < tiles[d].rows; m++) {
        for (int n = 0; n < tiles[d].width; n += 4) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < tiles[b].rows; k++) {
                const uint8_t *w = tiles[a].at[m] + 4 * k, *x = tiles[b].at[k] + n;
                even = flushed(fmaf(from_bf16(w), from_bf16(x), even));
                odd = flushed(fmaf(from_bf16(w + 2), from_bf16(x + 2), odd));
            }
            memcpy(&sum, tiles[d].at[m] + n, 4);
            sum = add(sum, add(even, odd));
            memcpy(tiles[d].at[m] + n, &sum, 4);
        }
    }
}
OP void _tile_dpbssd(int d, int a, int b) {
    check(d, a, b);
    for (int m = 0; m < tiles[d].rows; m++) {
        for (int n = 0; n < tiles[d].width; n += 4) {
            uint32_t sum;
            memcpy(&sum, tiles[d].at[m] + n, 4);
            for (int k = 0; k < tiles[a].width; k++)
                sum += (uint32_t)((int8_t)tiles[a].at[m][k] * (int8_t)tiles[b].at[k / 4][n + k % 4]);
            memcpy(tiles[d].at[m] + n, &sum, 4);
        }
    }
}
