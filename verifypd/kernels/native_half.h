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
#define HALF_NEAR 24576            /* bytes of weights kept in the nearest cache while tiles of x come by */

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

/* A row of K entries in parts of at most HALF_STEPS steps, none of them longer than another by more than one. */
typedef struct { ptrdiff_t parts, shortest, longer; } half_parts; /* longer: by how many steps they are more in all */

INLINE half_parts parts_of(ptrdiff_t K) {
    const ptrdiff_t steps = K / 8, parts = (steps + HALF_STEPS - 1) / HALF_STEPS;
    return (half_parts){parts, parts ? steps / parts : 0, parts ? steps % parts : 0};
}

/* M rows times four outputs; scales of the rows and of the weights. Nothing is divided here: the processor would wait
 * for where the next rows are. (Eight outputs at once are two streams of weights, which memory brings half as fast.) */
INLINE void half_product(const int M, const float16_t *x, const float *scale, const float16_t *w, const float *w_scale,
                         half_parts p, ptrdiff_t ahead, float *out, ptrdiff_t os) {
    float32x4_t total[HALF_ROWS];
    UNROLL for (int m = 0; m < M; m++) total[m] = vdupq_n_f32(0.0f);
    for (ptrdiff_t part = 0, over = 0; part < p.parts; part++) {
        float16x8_t acc[4 * HALF_ROWS];
        over += p.longer;
        const float16_t *end = x + (p.shortest + (over >= p.parts)) * 8 * M;
        if (over >= p.parts) over -= p.parts;
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
        /* all rows' sums side by side: those of one alone would wait for each other */
        UNROLL for (int i = 0; i < 2 * M; i++) acc[i] = vpaddq_f16(acc[2 * i], acc[2 * i + 1]);
        UNROLL for (int i = 0; i < M; i++) acc[i] = vpaddq_f16(acc[2 * i], acc[2 * i + 1]);
        UNROLL for (int m = 0; m < M; m += 2) acc[m] = vpaddq_f16(acc[m], acc[m + 1 < M ? m + 1 : m]);
        UNROLL for (int m = 0; m < M; m++) {
            const float16x8_t s = acc[m / 2 * 2];
            total[m] = vaddq_f32(total[m], m % 2 ? vcvt_high_f32_f16(s) : vcvt_f32_f16(vget_low_f16(s)));
        }
    }
    const float32x4_t by = vld1q_f32(w_scale);
    UNROLL for (int m = 0; m < M; m++) vst1q_f32(out + m * os, vmulq_f32(vmulq_n_f32(total[m], scale[m]), by));
}

/* Outputs [from, to), multiples of four, of the `height` rows from `row` on. */
static void half_outputs(const linear_args *a, const half_rows *x, half_parts p, ptrdiff_t row, ptrdiff_t height,
                         ptrdiff_t from, ptrdiff_t to, ptrdiff_t ahead) {
    const float16_t *rows = x->rows + row * a->K, *w = (const float16_t *)a->w + from * a->K;
    const float *scale = x->scale + row;
    float *y = a->y + row * a->out;
#define HALF_CASE(M)                                                                                                \
    case M:                                                                                                         \
        for (ptrdiff_t o = from; o < to; o += 4, w += 4 * a->K)                                                     \
            half_product(M, rows, scale, w, a->scale + o, p, ahead, y + o, a->out);                                 \
        break;
    switch (height) { HALF_CASE(1) HALF_CASE(2) HALF_CASE(3) HALF_CASE(4) HALF_CASE(5) HALF_CASE(6) }
#undef HALF_CASE
}

/* Outputs [from, to), multiples of four. */
static void linear_half(const linear_args *a, const half_rows *x, ptrdiff_t from, ptrdiff_t to) {
    const ptrdiff_t tiles = half_tiles(a->n);
    const half_parts p = parts_of(a->K);
    ptrdiff_t row[16], height[16];
    for (ptrdiff_t first = 0; first < tiles; first += 16) {
        const ptrdiff_t count = first + 16 < tiles ? 16 : tiles - first, near = HALF_NEAR / (2 * a->K) / 4 * 4;
        const ptrdiff_t step = count == 1 ? to - from : near > 4 ? near : 4;
        for (ptrdiff_t t = 0; t < count; t++) row[t] = half_tile(a->n, first + t, height + t);
        for (ptrdiff_t o = from; o < to; o += step) {
            const ptrdiff_t end = o + step < to ? o + step : to;
            for (ptrdiff_t t = 0; t < count; t++)
                half_outputs(a, x, p, row[t], height[t], o, end, t ? 0 : HALF_AHEAD);
        }
    }
    linear_args scaled = *a;
    scaled.scale = NULL;
    finish(&scaled, 0, a->n, from, to);
}

/* All of a product; `chunk` outputs at a time to a thread. Returns 1 where memory is short. */
static int product_half(const linear_args *a, ptrdiff_t chunk, int threads) {
    const ptrdiff_t n = a->n, K = a->K, out = a->out, tiles = half_tiles(n), chunks = (out + chunk - 1) / chunk;
    float *scale = malloc(sizeof(float) * (size_t)n + sizeof(float16_t) * (size_t)(n * K) + 64);
    if (!scale) return 1;
    half_rows rows = {(float16_t *)(((uintptr_t)(scale + n) + 63) & ~(uintptr_t)63), scale}; /* no load spans two lines */
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
