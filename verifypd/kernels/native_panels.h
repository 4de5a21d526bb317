/* Products with weights in panels, 16 outputs side by side: for x86 processors, bfloat16 and int8 where they have no
 * tiles.
 *
 * Weights are packed as weights.py's PanelWeight and Int8Panels have them: an entry of each of 16 outputs, then the
 * next; of bfloat16 and int8 two entries of each, then the next two. A vector of weights serves all rows of a tile, and
 * each row brings one number of x, or two, so nothing is summed across a vector: an output's products are added in
 * float32 from the first entry to the last, in every tile alike.
 * Beside int8 weights a row of x becomes 15-bit integers with one scale for 1,024 entries: |error| <= max|x| of these /
 * 32766, far below the error of int8 weights. Their sums are exact, and are added in float32.
 * Included by native.c.
 */
#define PANEL 16                       /* outputs of a panel */
#define PANEL_VECTORS (PANEL / VL)
#define PANEL_BLOCK 16                 /* entries of a row of x that lie together, before those of the tile's next row */
#define PANEL_DEPTH 1024               /* entries that tile after tile of rows multiplies, and that share a scale */
#define PANEL_TOP 16383.0f             /* what the largest of these becomes: 1,024 products with -128 fit 32 bits */
#define PANEL_LEAST 1e-30f             /* below which it becomes 0, as do the others */
#define PANEL_NEAR (256 * 1024)        /* bytes of weights that stay in the second-level cache meanwhile */
#define PANEL_AHEAD 1024               /* bytes of weights fetched ahead of the first tile */
#define PANEL_ROOM (512 * 1024)        /* bytes of a thread's stack for rows of x */
#define PANEL_SCALES 1024              /* scales of rows that it holds beside them */
#if VL == 16
#define PANEL_ROWS 12                  /* of a tile */
#define PANELS_OF(M) ((M) <= 4 ? 6 : (M) <= 8 ? 3 : 2) /* that M rows multiply at once: up to 24 accumulators */
#else
#define PANEL_ROWS 6
#define PANELS_OF(M) ((M) <= 3 ? 2 : 1)
#endif
#define PANELS_MOST 6                  /* of these */

#if VL == 16 && defined(__AVX512BW__)
#define PANEL_INTEGERS                 /* whether int8 weights are multiplied so */
typedef __m512i panel_ints;
#define panel_none _mm512_setzero_si512
#define panel_splat _mm512_set1_epi32
#define panel_wide(w) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w)))
#define panel_float(v) ((vf)_mm512_cvtepi32_ps(v))
#define panel_narrow(to, v) \
    _mm256_storeu_si256((__m256i *)(to), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)(v))))
#ifdef __AVX512VNNI__
#define PANEL_PAIRS "vpdpwssd %2, %1, %0"
#else
#define panel_pairs(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
#endif
#elif VL == 8 && defined(__AVX2__)
#define PANEL_INTEGERS
typedef __m256i panel_ints;
#define panel_none _mm256_setzero_si256
#define panel_splat _mm256_set1_epi32
#define panel_wide(w) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w)))
#define panel_float(v) ((vf)_mm256_cvtepi32_ps(v))
INLINE void panel_narrow(int16_t *to, vf v) {
    const __m256i q = _mm256_cvtps_epi32((__m256)v);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)));
}
#ifdef __AVXVNNI__
#define PANEL_PAIRS "%{vex%} vpdpwssd %2, %1, %0"
#else
#define panel_pairs(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
#endif
#endif
#ifdef PANEL_PAIRS
/* Compilers spill sums that an intrinsic adds to. */
INLINE panel_ints panel_pairs(panel_ints sum, panel_ints a, panel_ints b) {
    __asm__(PANEL_PAIRS : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#endif

typedef uint32_t panel_words __attribute__((vector_size(VL * 4), aligned(4)));

/* A tile of rows times some panels. x: blocks of its rows by turns, as floats, or as integers with a scale for each
 * row. w: weights, `stride` bytes from panel to panel, so many panels left in the matrix, so many entries
 * deep, fetched so many bytes ahead. y: sums, `ys` floats from row to row, which are added to unless these entries are
 * the first. */
typedef struct {
    const void *x; const float *scale;
    const char *w; ptrdiff_t stride, left, depth, ahead;
    float *y; ptrdiff_t ys; int first;
} panel_tile;

/* Entry `odd` of two that begin at w, of the outputs of vector v. */
INLINE vf panel_load(const int size, const char *w, ptrdiff_t stride, const int v, const int odd) {
    w += v / PANEL_VECTORS * stride + v % PANEL_VECTORS * VL * 4;
    if (size == 4) return load_f32((const float *)(w + odd * PANEL * 4));
    const panel_words both = *(const panel_words *)w;
    return (vf)(odd ? both & 0xffff0000u : both << 16);
}

/* How far ahead weights are fetched at entry k: at the end of these panels the next P, if there are `more`. */
INLINE ptrdiff_t panel_ahead(const panel_tile *t, const int P, const int size, ptrdiff_t k, int more) {
    const ptrdiff_t left = (t->depth - k) * PANEL * size;
    return t->ahead + (more && left <= t->ahead ? P * t->stride - t->depth * PANEL * size : 0);
}

/* M rows times P panels of floats of `size` bytes. */
INLINE void panel_floats(const int M, const int P, const int size, const panel_tile *t, const char *w, float *y,
                         int more) {
    const int V = P * PANEL_VECTORS; /* vectors of weights */
    const float *x = t->x;
    vf acc[24];
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int v = 0; v < V; v++) acc[m * V + v] = t->first ? splat(0.0f) : load_f32(y + m * t->ys + v * VL);
    }
    for (ptrdiff_t k = 0; k < t->depth; k += PANEL_BLOCK, x += (M - 1) * PANEL_BLOCK) {
        const ptrdiff_t ahead = panel_ahead(t, P, size, k, more);
        for (int i = 0; i < PANEL_BLOCK; i += 2, x += 2, w += 2 * PANEL * size) {
            if (t->ahead) {
                UNROLL for (int p = 0; p < P; p++) {
                    __builtin_prefetch(w + p * t->stride + ahead, 0, 3);
                    if (size == 4) __builtin_prefetch(w + p * t->stride + ahead + 64, 0, 3);
                }
            }
            UNROLL for (int odd = 0; odd < 2; odd++) {
                vf b[PANEL_VECTORS * PANELS_MOST];
                UNROLL for (int v = 0; v < V; v++) b[v] = panel_load(size, w, t->stride, v, odd);
                UNROLL for (int m = 0; m < M; m++) {
                    const vf a = splat(x[m * PANEL_BLOCK + odd]);
                    UNROLL for (int v = 0; v < V; v++) acc[m * V + v] = fused(a, b[v], acc[m * V + v]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int v = 0; v < V; v++) store_f32(y + m * t->ys + v * VL, acc[m * V + v]);
    }
}

#ifdef PANEL_INTEGERS
/* M rows times P panels of int8. */
INLINE void panel_integers(const int M, const int P, const panel_tile *t, const char *w, float *y, int more) {
    const int V = P * PANEL_VECTORS;
    const int16_t *x = t->x;
    panel_ints acc[24];
    UNROLL for (int i = 0; i < M * V; i++) acc[i] = panel_none();
    for (ptrdiff_t k = 0; k < t->depth; k += PANEL_BLOCK, x += (M - 1) * PANEL_BLOCK) {
        const ptrdiff_t ahead = panel_ahead(t, P, 1, k, more);
        for (int i = 0; i < PANEL_BLOCK; i += 2, x += 2, w += 2 * PANEL) {
            if (t->ahead && i % 4 == 0)
                UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(w + p * t->stride + ahead, 0, 3);
            panel_ints b[PANEL_VECTORS * PANELS_MOST];
            UNROLL for (int v = 0; v < V; v++)
                b[v] = panel_wide(w + v / PANEL_VECTORS * t->stride + v % PANEL_VECTORS * VL * 2);
            UNROLL for (int m = 0; m < M; m++) {
                int32_t two;
                memcpy(&two, x + m * PANEL_BLOCK, 4);
                const panel_ints a = panel_splat(two);
                UNROLL for (int v = 0; v < V; v++) acc[m * V + v] = panel_pairs(acc[m * V + v], a, b[v]);
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        const vf by = splat(t->scale[m]);
        UNROLL for (int v = 0; v < V; v++) {
            float *at = y + m * t->ys + v * VL;
            store_f32(at, fused(panel_float(acc[m * V + v]), by, t->first ? splat(0.0f) : load_f32(at)));
        }
    }
}

/* Entries of a row of x as integers, in blocks `apart` entries apart. Returns what 1 of them is worth, which is not
 * finite where an entry is not. */
static float panel_split(const float *x, ptrdiff_t depth, int16_t *to, ptrdiff_t apart) {
    const float size = largest_size(x, depth);
    const vf by = splat(size > PANEL_LEAST ? PANEL_TOP / size : 0.0f);
    for (ptrdiff_t k = 0; k < depth; k += PANEL_BLOCK, to += apart) {
        UNROLL for (int i = 0; i < PANEL_BLOCK; i += VL) panel_narrow(to + i, load_f32(x + k + i) * by);
    }
    return size / PANEL_TOP;
}
#endif

/* `count` panels times M rows. */
typedef void (*panels_of_rows)(const panel_tile *, ptrdiff_t);
#define DEFINE_PANELS(M, name, PRODUCT)                                                                             \
    NOINLINE void panels_##M##_##name(const panel_tile *t, ptrdiff_t count) {                                       \
        ptrdiff_t p = 0;                                                                                            \
        for (; p + PANELS_OF(M) <= count; p += PANELS_OF(M)) PRODUCT(M, PANELS_OF(M));                              \
        for (; p < count; p++) PRODUCT(M, 1);                                                                       \
    }
#define PRODUCT_BF16(M, P) panel_floats(M, P, 2, t, t->w + p * t->stride, t->y + p * PANEL, p + 2 * (P) <= t->left)
#define PRODUCT_F32(M, P) panel_floats(M, P, 4, t, t->w + p * t->stride, t->y + p * PANEL, p + 2 * (P) <= t->left)
#define PRODUCT_I8(M, P) panel_integers(M, P, t, t->w + p * t->stride, t->y + p * PANEL, p + 2 * (P) <= t->left)
#if PANEL_ROWS > 6
#define PANEL_HEIGHTS(EACH, ...)                                                                                    \
    EACH(1, __VA_ARGS__) EACH(2, __VA_ARGS__) EACH(3, __VA_ARGS__) EACH(4, __VA_ARGS__) EACH(5, __VA_ARGS__)        \
    EACH(6, __VA_ARGS__) EACH(7, __VA_ARGS__) EACH(8, __VA_ARGS__) EACH(9, __VA_ARGS__) EACH(10, __VA_ARGS__)       \
    EACH(11, __VA_ARGS__) EACH(12, __VA_ARGS__)
#else
#define PANEL_HEIGHTS(EACH, ...)                                                                                    \
    EACH(1, __VA_ARGS__) EACH(2, __VA_ARGS__) EACH(3, __VA_ARGS__) EACH(4, __VA_ARGS__) EACH(5, __VA_ARGS__)        \
    EACH(6, __VA_ARGS__)
#endif
#define PANEL_NAME(M, name) panels_##M##_##name,
PANEL_HEIGHTS(DEFINE_PANELS, bf16, PRODUCT_BF16)
PANEL_HEIGHTS(DEFINE_PANELS, f32, PRODUCT_F32)
static const panels_of_rows panels_bf16[PANEL_ROWS] = {PANEL_HEIGHTS(PANEL_NAME, bf16)};
static const panels_of_rows panels_f32[PANEL_ROWS] = {PANEL_HEIGHTS(PANEL_NAME, f32)};
#ifdef PANEL_INTEGERS
PANEL_HEIGHTS(DEFINE_PANELS, i8, PRODUCT_I8)
static const panels_of_rows panels_i8[PANEL_ROWS] = {PANEL_HEIGHTS(PANEL_NAME, i8)};
#endif

/* Rows of x at `rows`, `height` of them, in `room` as a tile of theirs is multiplied: blocks by turns. */
static void panel_pack(const linear_args *a, int type, const float *rows, ptrdiff_t height, ptrdiff_t depth, char *room,
                       float *scale) {
#ifdef PANEL_INTEGERS
    if (type == I8_PANELS) {
        int16_t *to = (int16_t *)room;
        for (ptrdiff_t m = 0; m < height; m++)
            scale[m] = panel_split(rows + m * a->xs, depth, to + m * PANEL_BLOCK, height * PANEL_BLOCK);
        return;
    }
#endif
    (void)type, (void)scale;
    float *to = (float *)room;
    for (ptrdiff_t k = 0; k < depth; k += PANEL_BLOCK)
        for (ptrdiff_t m = 0; m < height; m++, to += PANEL_BLOCK)
            memcpy(to, rows + m * a->xs + k, sizeof(float) * PANEL_BLOCK);
}

/* A thread's part of a product: some panels after the others, for all rows. It packs the rows itself, for beside other
 * programs it would wait long for another to do so; once, where `room` holds them all. */
typedef struct {
    const linear_args *a; int type; ptrdiff_t size; /* of a weight, in bytes */
    int whole, packed;                              /* whether room holds all rows, and does already */
    char *room; float *scales;
} panel_part;

/* Panels [from, to). */
static void linear_panels(panel_part *p, ptrdiff_t from, ptrdiff_t to) {
    const linear_args *a = p->a;
    const ptrdiff_t n = a->n, K = a->K, tiles = (n + PANEL_ROWS - 1) / PANEL_ROWS, entry = p->type == I8_PANELS ? 2 : 4;
    const panels_of_rows *products = p->type == PANELS ? panels_bf16 : panels_f32;
#ifdef PANEL_INTEGERS
    if (p->type == I8_PANELS) products = panels_i8;
#endif
    panel_tile tile = {.stride = K * PANEL * p->size, .left = a->out / PANEL - from, .ys = a->out};
    for (ptrdiff_t k = 0; k < K; k += PANEL_DEPTH) {
        tile.depth = K - k < PANEL_DEPTH ? K - k : PANEL_DEPTH;
        tile.w = (const char *)a->w + from * tile.stride + k * PANEL * p->size;
        tile.first = k == 0;
        for (ptrdiff_t t = 0; t < tiles; t++) {
            const ptrdiff_t row = n * t / tiles, height = n * (t + 1) / tiles - row;
            const float *rows = a->x + row * a->xs + k;
            char *room = p->room + (p->whole ? (k * n + row * tile.depth) * entry : 0);
            float *scale = p->scales + (p->whole ? k / PANEL_DEPTH * n + row : 0);
            const int still = height == 1 && entry == 4; /* one row of floats stays where it is */
            if (!still && !p->packed) panel_pack(a, p->type, rows, height, tile.depth, room, scale);
            tile.x = still ? (const void *)rows : room;
            tile.scale = scale;
            tile.ahead = t ? 0 : PANEL_AHEAD;
            tile.y = a->y + row * a->out + from * PANEL;
            products[height - 1](&tile, to - from);
        }
    }
    p->packed = p->whole;
    finish(a, 0, n, from * PANEL, to * PANEL);
}

/* All of a product. */
static void product_panels(const linear_args *a, int type, int threads) {
    const ptrdiff_t size = type == I8_PANELS ? 1 : type == PANELS ? 2 : 4;
    const ptrdiff_t panels = a->out / PANEL, depth = a->K < PANEL_DEPTH ? a->K : PANEL_DEPTH;
    const ptrdiff_t bytes = a->n * a->K * (type == I8_PANELS ? 2 : 4), scales = a->n * (a->K / PANEL_DEPTH + 1);
    ptrdiff_t chunk = PANEL_NEAR / (depth * PANEL * size) / PANELS_MOST * PANELS_MOST;
    while (chunk > PANELS_MOST && chunk * threads * 4 > panels) chunk -= PANELS_MOST; /* a late thread costs little */
    if (chunk < PANELS_MOST) chunk = PANELS_MOST;
    const ptrdiff_t chunks = (panels + chunk - 1) / chunk;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char room[PANEL_ROOM] __attribute__((aligned(64)));
        float own[PANEL_SCALES];
        panel_part part = {a, type, size, bytes <= PANEL_ROOM && scales <= PANEL_SCALES, 0, room, own};
#pragma omp for schedule(dynamic, 1) nowait
        for (ptrdiff_t c = 0; c < chunks; c++)
            linear_panels(&part, c * chunk, (c + 1) * chunk < panels ? (c + 1) * chunk : panels);
    }
}
