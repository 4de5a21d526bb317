/* Products in float16, where the processor multiplies it (ARM's fphp and asimdhp): twice the rate of float32.
 *
 * Weights are packed as base.py's HalfWeight has them: four rows by turns, eight entries each, the largest of a row in
 * [8, 16). A row of x is scaled by a power of two so that its largest entry lies in [4, 8), and rounded. Products are
 * summed in float16 over HALF_STEPS steps of eight entries, then in float32: no sum exceeds 24 * 8 * 128, so none
 * overflows, and the error of a result is about 0.0009 of its typical size, half of what rounding x to bfloat16 makes.
 * Included by native.c.
 */
#define HALF_STEPS 24
#define HALF_ROWS 6                /* of a tile: 24 accumulators, 4 weights, 1 of x */
#define HALF_BLOCK (16 * HALF_ROWS) /* rows of x kept in the second-level cache while weights stream by */
#define HALF_AHEAD 768             /* bytes of weights fetched ahead of the tile */

typedef struct { float16_t *rows; float *scale; } half_rows; /* a tile's rows by turns, eight entries each */

/* Tile t of n rows: blocks of 16 tiles, the tiles of the last block of near-equal height. */
INLINE ptrdiff_t half_tile(ptrdiff_t n, ptrdiff_t t, ptrdiff_t *height) {
    const ptrdiff_t block = t / 16 * HALF_BLOCK, rows = n - block < HALF_BLOCK ? n - block : HALF_BLOCK;
    const ptrdiff_t tiles = (rows + HALF_ROWS - 1) / HALF_ROWS, from = rows * (t % 16) / tiles;
    *height = rows * (t % 16 + 1) / tiles - from;
    return block + from;
}

INLINE ptrdiff_t half_tiles(ptrdiff_t n) {
    return n / HALF_BLOCK * 16 + (n % HALF_BLOCK + HALF_ROWS - 1) / HALF_ROWS;
}

/* One row of a tile; `to` is where its first eight entries go. */
static void halve_row(const float *x, ptrdiff_t K, ptrdiff_t height, float16_t *to, float *scale) {
    float32x4_t top = vdupq_n_f32(0.0f);
    for (ptrdiff_t k = 0; k < K; k += 4) top = vmaxq_f32(top, vabsq_f32(vld1q_f32(x + k)));
    const float most = vmaxvq_f32(top);
    int exponent = 3;
    if (most > 0.0f && most < INFINITY) frexpf(most, &exponent); /* otherwise the scale is 1, and NaN stays NaN */
    if (exponent < -100) exponent = -100;
    const float factor = ldexpf(1.0f, 3 - exponent);
    *scale = ldexpf(1.0f, exponent - 3);
    for (ptrdiff_t k = 0; k < K; k += 8, to += 8 * height) {
        float16x4_t low = vcvt_f16_f32(vmulq_n_f32(vld1q_f32(x + k), factor));
        vst1q_f16(to, vcvt_high_f16_f32(low, vmulq_n_f32(vld1q_f32(x + k + 4), factor)));
    }
}

/* The lanes of eight vectors summed, of each in the same order; `count` 4: of four of them. */
INLINE float16x8_t half_sums(const float16x8_t *v, const int count) {
    const float16x8_t low = vpaddq_f16(vpaddq_f16(v[0], v[1]), vpaddq_f16(v[2], v[3]));
    return vpaddq_f16(low, count > 4 ? vpaddq_f16(vpaddq_f16(v[4], v[5]), vpaddq_f16(v[6], v[7])) : low);
}

/* M rows times four outputs; scales of the rows and of the weights. */
INLINE void half_product(const int M, const float16_t *x, const float *scale, const float16_t *w, const float *w_scale,
                         ptrdiff_t K, ptrdiff_t ahead, float *out, ptrdiff_t os) {
    float32x4_t total[HALF_ROWS];
    UNROLL for (int m = 0; m < M; m++) total[m] = vdupq_n_f32(0.0f);
    const ptrdiff_t steps = K / 8, parts = (steps + HALF_STEPS - 1) / HALF_STEPS;
    for (ptrdiff_t part = 0; part < parts; part++) {
        float16x8_t acc[4 * HALF_ROWS];
        const float16_t *end = x + (steps * (part + 1) / parts - steps * part / parts) * 8 * M;
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int o = 0; o < 4; o++) acc[4 * m + o] = vmulq_f16(vld1q_f16(x + 8 * m), vld1q_f16(w + 8 * o));
        }
        for (x += 8 * M, w += 32; x < end; x += 8 * M, w += 32) {
            float16x8_t b[4];
            __builtin_prefetch((const char *)w + ahead, 0, 3);
            UNROLL for (int o = 0; o < 4; o++) b[o] = vld1q_f16(w + 8 * o);
            UNROLL for (int m = 0; m < M; m++) {
                const float16x8_t a = vld1q_f16(x + 8 * m);
                UNROLL for (int o = 0; o < 4; o++) acc[4 * m + o] = vfmaq_f16(acc[4 * m + o], a, b[o]);
            }
        }
        UNROLL for (int m = 0; m < M; m += 2) {
            const float16x8_t s = half_sums(acc + 4 * m, 4 * (M - m));
            total[m] = vaddq_f32(total[m], vcvt_f32_f16(vget_low_f16(s)));
            if (m + 1 < M) total[m + 1] = vaddq_f32(total[m + 1], vcvt_high_f32_f16(s));
        }
    }
    const float32x4_t by = vld1q_f32(w_scale);
    UNROLL for (int m = 0; m < M; m++) vst1q_f32(out + m * os, vmulq_f32(vmulq_n_f32(total[m], scale[m]), by));
}

/* Outputs [from, to), multiples of four. */
static void linear_half(const linear_args *a, const half_rows *x, ptrdiff_t from, ptrdiff_t to) {
    const ptrdiff_t K = a->K, tiles = half_tiles(a->n);
    for (ptrdiff_t first = 0; first < tiles; first += 16) {
        const ptrdiff_t last = first + 16 < tiles ? first + 16 : tiles;
        for (ptrdiff_t o = from; o < to; o += 4) {
            const float16_t *w = (const float16_t *)a->w + o * K;
            for (ptrdiff_t t = first; t < last; t++) {
                ptrdiff_t height, row = half_tile(a->n, t, &height), ahead = t == first ? HALF_AHEAD : 0;
                const float16_t *rows = x->rows + row * K;
                const float *scale = x->scale + row;
                float *y = a->y + row * a->out + o;
                switch (height) {
                case 1: half_product(1, rows, scale, w, a->scale + o, K, ahead, y, a->out); break;
                case 2: half_product(2, rows, scale, w, a->scale + o, K, ahead, y, a->out); break;
                case 3: half_product(3, rows, scale, w, a->scale + o, K, ahead, y, a->out); break;
                case 4: half_product(4, rows, scale, w, a->scale + o, K, ahead, y, a->out); break;
                case 5: half_product(5, rows, scale, w, a->scale + o, K, ahead, y, a->out); break;
                case 6: half_product(6, rows, scale, w, a->scale + o, K, ahead, y, a->out); break;
                }
            }
        }
    }
    linear_args scaled = *a;
    scaled.scale = NULL;
    finish(&scaled, 0, a->n, from, to);
}

/* All of a product; `chunk` outputs at a time to a thread. Returns 1 where memory is short. */
static int product_half(const linear_args *a, ptrdiff_t chunk, int threads) {
    const ptrdiff_t n = a->n, K = a->K, out = a->out, tiles = half_tiles(n), chunks = (out + chunk - 1) / chunk;
    float *scale = malloc(sizeof(float) * (size_t)n + sizeof(float16_t) * (size_t)(n * K));
    if (!scale) return 1;
    half_rows rows = {(float16_t *)(scale + n), scale};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (ptrdiff_t t = 0; t < tiles; t++) {
            ptrdiff_t height, row = half_tile(n, t, &height);
            for (ptrdiff_t i = 0; i < height; i++)
                halve_row(a->x + (row + i) * a->xs, K, height, rows.rows + row * K + 8 * i, scale + row + i);
        }
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t c = 0; c < chunks; c++)
            linear_half(a, &rows, c * chunk, (c + 1) * chunk < out ? (c + 1) * chunk : out);
    }
    free(scale);
    return 0;
}
