/* Products with weights in panels, 16 outputs side by side: for x86 processors, bfloat16 where they have no tiles.
 *
 * Weights are packed as weights.py's PanelWeight has them: an entry of each of 16 outputs, then the next; of bfloat16 two
 * entries of each, then the next two. A vector of weights serves all rows of a tile, and each row brings one number of
 * x, so nothing is summed across a vector: an output's products are added in float32 from the first entry to the last,
 * in every tile alike.
 * Included by native.c.
 */
#define PANEL 16                       /* outputs of a panel */
#define PANEL_VECTORS (PANEL / VL)
#define PANEL_BLOCK 16                 /* entries of a row of x that lie together, before those of the tile's next row */
#define PANEL_DEPTH 1024               /* entries that tile after tile of rows multiplies */
#define PANEL_NEAR (256 * 1024)        /* bytes of weights that stay in the second-level cache meanwhile */
#define PANEL_AHEAD 1024               /* bytes of weights fetched ahead of the first tile */
#if VL == 16
#define PANEL_ROWS 12                  /* of a tile */
#define PANELS_OF(M) ((M) <= 4 ? 6 : (M) <= 8 ? 3 : 2) /* that M rows multiply at once: up to 24 accumulators */
#else
#define PANEL_ROWS 6
#define PANELS_OF(M) ((M) <= 3 ? 2 : 1)
#endif
#define PANELS_MOST 6                  /* of these */

typedef uint32_t panel_words __attribute__((vector_size(VL * 4), aligned(4)));

/* Entry `odd` of two that begin at w, of the outputs of vector v. */
INLINE vf panel_load(const int size, const char *w, ptrdiff_t stride, const int v, const int odd) {
    w += v / PANEL_VECTORS * stride + v % PANEL_VECTORS * VL * 4;
    if (size == 4) return load_f32((const float *)(w + odd * PANEL * 4));
    const panel_words both = *(const panel_words *)w;
    return (vf)(odd ? both & 0xffff0000u : both << 16);
}

/* M rows times P panels of entries of `size` bytes, `depth` of them, added to y unless they are the first; `stride`:
 * bytes from panel to panel. */
INLINE void panel_product(const int M, const int P, const int size, const float *x, const char *w, ptrdiff_t stride,
                          ptrdiff_t depth, int first, ptrdiff_t ahead, float *y, ptrdiff_t ys) {
    const int V = P * PANEL_VECTORS; /* vectors of weights */
    vf acc[24];
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int v = 0; v < V; v++) acc[m * V + v] = first ? splat(0.0f) : load_f32(y + m * ys + v * VL);
    }
    for (ptrdiff_t k = 0; k < depth; k += PANEL_BLOCK, x += (M - 1) * PANEL_BLOCK) {
        for (int i = 0; i < PANEL_BLOCK; i += 2, x += 2, w += 2 * PANEL * size) {
            if (ahead) {
                UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(w + p * stride + ahead, 0, 3);
                if (size == 4) UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(w + p * stride + ahead + 64, 0, 3);
            }
            UNROLL for (int odd = 0; odd < 2; odd++) {
                vf b[PANEL_VECTORS * PANELS_MOST];
                UNROLL for (int v = 0; v < V; v++) b[v] = panel_load(size, w, stride, v, odd);
                UNROLL for (int m = 0; m < M; m++) {
                    const vf a = splat(x[m * PANEL_BLOCK + odd]);
                    UNROLL for (int v = 0; v < V; v++) acc[m * V + v] = fused(a, b[v], acc[m * V + v]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int v = 0; v < V; v++) store_f32(y + m * ys + v * VL, acc[m * V + v]);
    }
}

/* `count` panels times M rows. */
typedef void (*panels_of_rows)(const float *, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int, ptrdiff_t, float *,
                               ptrdiff_t);
#define DEFINE_PANELS(M, size)                                                                                      \
    NOINLINE void panels_##M##_##size(const float *x, const char *w, ptrdiff_t stride, ptrdiff_t count,             \
                                      ptrdiff_t depth, int first, ptrdiff_t ahead, float *y, ptrdiff_t ys) {        \
        const int P = PANELS_OF(M);                                                                                 \
        ptrdiff_t p = 0;                                                                                            \
        for (; p + P <= count; p += P)                                                                              \
            panel_product(M, P, size, x, w + p * stride, stride, depth, first, ahead, y + p * PANEL, ys);           \
        for (; p < count; p++)                                                                                      \
            panel_product(M, 1, size, x, w + p * stride, stride, depth, first, ahead, y + p * PANEL, ys);           \
    }
#if PANEL_ROWS > 6
#define PANEL_HEIGHTS(EACH, size)                                                                                   \
    EACH(1, size) EACH(2, size) EACH(3, size) EACH(4, size) EACH(5, size) EACH(6, size) EACH(7, size) EACH(8, size) \
    EACH(9, size) EACH(10, size) EACH(11, size) EACH(12, size)
#else
#define PANEL_HEIGHTS(EACH, size) EACH(1, size) EACH(2, size) EACH(3, size) EACH(4, size) EACH(5, size) EACH(6, size)
#endif
#define PANEL_NAME(M, size) panels_##M##_##size,
PANEL_HEIGHTS(DEFINE_PANELS, 2)
PANEL_HEIGHTS(DEFINE_PANELS, 4)
static const panels_of_rows panels_by_rows[2][PANEL_ROWS] = {
    {PANEL_HEIGHTS(PANEL_NAME, 2)}, {PANEL_HEIGHTS(PANEL_NAME, 4)},
};

/* Panels [from, to), for all rows. */
static void linear_panels(const linear_args *a, ptrdiff_t size, ptrdiff_t from, ptrdiff_t to) {
    const ptrdiff_t n = a->n, K = a->K, tiles = (n + PANEL_ROWS - 1) / PANEL_ROWS, stride = K * PANEL * size;
    float room[PANEL_ROWS * PANEL_DEPTH] __attribute__((aligned(64)));
    for (ptrdiff_t k = 0; k < K; k += PANEL_DEPTH) {
        const ptrdiff_t depth = K - k < PANEL_DEPTH ? K - k : PANEL_DEPTH;
        const char *w = (const char *)a->w + from * stride + k * PANEL * size;
        for (ptrdiff_t t = 0; t < tiles; t++) {
            const ptrdiff_t row = n * t / tiles, height = n * (t + 1) / tiles - row;
            const float *x = a->x + row * a->xs + k;
            float *to_row = room;
            if (height > 1) {
                for (ptrdiff_t i = 0; i < depth; i += PANEL_BLOCK)
                    for (ptrdiff_t m = 0; m < height; m++, to_row += PANEL_BLOCK)
                        memcpy(to_row, x + m * a->xs + i, sizeof(float) * PANEL_BLOCK);
            }
            panels_by_rows[size == 4][height - 1](height > 1 ? room : x, w, stride, to - from, depth, k == 0,
                                                  t ? 0 : PANEL_AHEAD, a->y + row * a->out + from * PANEL, a->out);
        }
    }
    finish(a, 0, n, from * PANEL, to * PANEL);
}

/* All of a product with entries of `size` bytes. */
static void product_panels(const linear_args *a, ptrdiff_t size, int threads) {
    const ptrdiff_t panels = a->out / PANEL, depth = a->K < PANEL_DEPTH ? a->K : PANEL_DEPTH;
    ptrdiff_t chunk = PANEL_NEAR / (depth * PANEL * size) / PANELS_MOST * PANELS_MOST;
    while (chunk > PANELS_MOST && chunk * threads * 4 > panels) chunk -= PANELS_MOST; /* a late thread costs little */
    if (chunk < PANELS_MOST) chunk = PANELS_MOST;
    const ptrdiff_t chunks = (panels + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (ptrdiff_t c = 0; c < chunks; c++)
        linear_panels(a, size, c * chunk, (c + 1) * chunk < panels ? (c + 1) * chunk : panels);
}
