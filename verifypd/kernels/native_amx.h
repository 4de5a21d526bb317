/* Products by AMX tiles, on x86 processors that have them: 16 columns cost what one costs.
 *
 * The weights are read as they lie: a tile is 64 bytes of 16 rows. Beside bfloat16 weights an entry of x is two
 * bfloat16, high + low, exact to 2^-17; beside int8 weights it is three int8, an integer within 2^21 times a scale of
 * its row, exact to 2^-21 of the row's largest entry. Each part is a column, so eight rows fill a tile, or five; fewer
 * rows make a narrower tile. A result is exact to 2 in a million, or 0.5 with int8, and its columns feel no neighbours.
 * Included by native.c.
 */
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_BLOCK 12          /* groups of rows kept in the second-level cache while weights stream by; even */
#define AMX_TILE 1024         /* bytes of a tile of weights */
#define AMX_KEPT (16u << 20)  /* bytes of working space kept for the next product, at most */
#define AMX_TOP 2080768.0f    /* 127 * 2^14: what the largest entry of a row becomes beside int8 weights */
/* Compilers do not see that tiles read memory: what was written there has to be there. */
#define AMX_MEMORY(at) __asm__ volatile("" : : "r"(at) : "memory")

typedef struct { uint8_t palette, start; uint8_t zero[14]; uint16_t width[16]; uint8_t height[16]; } amx_config;

/* Rows of x as tiles: 16 times `columns` words, part p of row r of a group in column p * height + r. A group of
 * `height` rows is `steps` tiles; columns of rows that the last group lacks hold anything. */
typedef struct { ptrdiff_t height, groups, columns, steps; const uint32_t *tiles; const float *scale; } amx_rows;

/* Whether the system lets this process use tiles; asked once. */
static int amx_allowed(void) {
    static int known; /* 1: yes, 2: no */
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : 2;
    return known == 1;
}

/* Tiles 4 and 5 hold weights; 6 and 7 x, 0 to 3 sums, as many columns as there are. */
static void amx_begin(ptrdiff_t columns) {
    amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.width[i] = i == 4 || i == 5 ? 64 : (uint16_t)(4 * columns);
        config.height[i] = 16;
    }
    AMX_MEMORY(&config);
    _tile_loadconfig(&config);
}

/* ---- working space -------------------------------------------------------------------------------------------- */

typedef struct { size_t size; char fill[56], at[]; } amx_room;

/* Kept for the next product, whoever asks first. An allocator hands such blocks back to the system in some threads, and
 * each product would fetch them again, page by page. */
static amx_room *amx_kept;

static amx_room *amx_take(size_t size) {
    amx_room *room = __atomic_exchange_n(&amx_kept, NULL, __ATOMIC_ACQ_REL);
    if (room && room->size >= size) return room;
    free(room);
    room = aligned_alloc(64, sizeof(amx_room) + size);
    if (room) room->size = size;
    return room;
}

static void amx_keep(amx_room *room) {
    free(room->size > AMX_KEPT ? room : __atomic_exchange_n(&amx_kept, room, __ATOMIC_ACQ_REL));
}

/* ---- rows of x ------------------------------------------------------------------------------------------------ */

/* What 1 of the integers is worth that a row becomes. It is not finite where an entry is not. */
static float amx_scale(const float *x, ptrdiff_t K) { return largest_size(x, K) / AMX_TOP; }

/* 32 entries as two bfloat16 each. */
INLINE void amx_split_bf16(const float *x, uint32_t (*parts)[16]) {
    __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
    __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    __m512 wide_first = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
    __m512 wide_second = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
    _mm512_storeu_si512(parts[0], high);
    _mm512_storeu_si512(parts[1], (__m512i)_mm512_cvtne2ps_pbh(second - wide_second, first - wide_first));
}

/* 64 entries as three int8 each: x = (high * 2^14 + middle * 2^7 + low) * scale. */
INLINE void amx_split_i8(const float *x, float inverse, uint32_t (*parts)[16]) {
    for (int i = 0; i < 4; i++) {
        vi q = (vi)_mm512_cvtps_epi32((__m512)(load_f32(x + 16 * i) * splat(inverse)));
        vi high = (q + 8192) >> 14, rest = q - high * 16384, middle = (rest + 64) >> 7, low = rest - middle * 128;
        _mm_storeu_si128((__m128i *)(parts[0] + 4 * i), _mm512_cvtepi32_epi8((__m512i)high));
        _mm_storeu_si128((__m128i *)(parts[1] + 4 * i), _mm512_cvtepi32_epi8((__m512i)middle));
        _mm_storeu_si128((__m128i *)(parts[2] + 4 * i), _mm512_cvtepi32_epi8((__m512i)low));
    }
}

/* Tile t of x. */
static void amx_split(const linear_args *a, int type, const amx_rows *x, ptrdiff_t t, uint32_t *to) {
    const ptrdiff_t first = t / x->steps * x->height, k = t % x->steps * (type == I8 ? 64 : 32);
    const ptrdiff_t rows = a->n - first < x->height ? a->n - first : x->height;
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *from = a->x + (first + r) * a->xs + k;
        uint32_t parts[3][16] __attribute__((aligned(64)));
        if (type == I8) {
            const float scale = x->scale[first + r];
            amx_split_i8(from, scale > 0.0f ? 1.0f / scale : 0.0f, parts);
        } else {
            amx_split_bf16(from, parts);
        }
        uint32_t *word = to + r;
        for (int i = 0; i < 16; i++, word += x->columns) {
            word[0] = parts[0][i];
            word[x->height] = parts[1][i];
            if (type == I8) word[2 * x->height] = parts[2][i];
        }
    }
}

/* ---- products ------------------------------------------------------------------------------------------------- */

#define AMX_MULTIPLY(to, w, x)                                                                                      \
    do {                                                                                                            \
        if (type == I8) _tile_dpbssd(to, w, x);                                                                     \
        else _tile_dpbf16ps(to, w, x);                                                                              \
    } while (0)

/* A times 16 outputs, B groups of rows: sums[a][b] are tiles of 16 outputs by so many columns, as x has. */
INLINE void amx_product(const int type, const int A, const int B, const char *w, ptrdiff_t stride, const amx_rows *rows,
                        ptrdiff_t group, const char *ahead, uint32_t (*sums)[2][256]) {
    const ptrdiff_t across = 4 * rows->columns, tile = 16 * across, next = rows->steps * tile;
    const char *x = (const char *)rows->tiles + group * next;
    AMX_MEMORY(w);
    AMX_MEMORY(x);
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
    for (ptrdiff_t step = 0; step < rows->steps; step++, x += tile, w += 64) {
        for (int i = 0; i < A * AMX_TILE; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        ahead += A * AMX_TILE;
        _tile_loadd(4, w, stride);
        _tile_loadd(6, x, across);
        AMX_MULTIPLY(0, 4, 6);
        if (B > 1) {
            _tile_loadd(7, x + next, across);
            AMX_MULTIPLY(1, 4, 7);
        }
        if (A > 1) {
            _tile_loadd(5, w + 16 * stride, stride);
            AMX_MULTIPLY(2, 5, 6);
            if (B > 1) AMX_MULTIPLY(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], across);
    if (B > 1) _tile_stored(1, sums[0][1], across);
    if (A > 1) _tile_stored(2, sums[1][0], across);
    if (A > 1 && B > 1) _tile_stored(3, sums[1][1], across);
    AMX_MEMORY(sums);
}

/* What the parts of an output, h words apart, make together. Powers of two are exact: fused or not, the sum is the
 * same. */
INLINE float amx_together(const int type, const uint32_t *sum, ptrdiff_t h, float scale) {
    if (type == I8) {
        const int32_t *part = (const int32_t *)sum;
        return ((float)part[0] * 16384.0f + (float)part[h] * 128.0f + (float)part[2 * h]) * scale;
    }
    float high, low;
    memcpy(&high, sum, 4);
    memcpy(&low, sum + h, 4);
    return high + low;
}

/* Outputs [o, o + 16 A) of groups [from, to). ahead: 16 A rows of weights. */
INLINE void amx_outputs(const int type, const int A, const linear_args *a, const amx_rows *x, ptrdiff_t from,
                        ptrdiff_t to, const char *ahead, ptrdiff_t o) {
    const ptrdiff_t stride = 64 * x->steps, h = x->height;
    const char *w = (const char *)a->w + o * stride;
    for (ptrdiff_t g = from; g < to; g += 2) {
        uint32_t sums[2][2][256] __attribute__((aligned(64)));
        if (to - g > 1) amx_product(type, A, 2, w, stride, x, g, ahead, sums);
        else amx_product(type, A, 1, w, stride, x, g, ahead, sums);
        ahead = w; /* what is there already */
        const ptrdiff_t row = g * h, left = a->n - row, end = to - g > 1 ? 2 * h : h;
        for (ptrdiff_t m = 0; m < end && m < left; m++) {
            const float scale = type == I8 ? x->scale[row + m] : 1.0f;
            float *y = a->y + (row + m) * a->out + o;
            for (int i = 0; i < A; i++) {
                const uint32_t *sum = m < h ? sums[i][0] + m : sums[i][1] + m - h;
                for (int j = 0; j < 16; j++, sum += x->columns) y[16 * i + j] = amx_together(type, sum, h, scale);
            }
        }
    }
}

/* Outputs [from, to), multiples of 16. */
INLINE void linear_amx(const int type, const linear_args *a, const amx_rows *x, ptrdiff_t from, ptrdiff_t to) {
    const ptrdiff_t stride = 64 * x->steps;
    for (ptrdiff_t group = 0; group < x->groups; group += AMX_BLOCK) {
        const ptrdiff_t end = group + AMX_BLOCK < x->groups ? group + AMX_BLOCK : x->groups, row = group * x->height;
        for (ptrdiff_t o = from, next; o < to; o = next) {
            next = o + 32 <= to ? o + 32 : to;
            const char *ahead = (const char *)a->w + (next + 32 <= to ? next : o) * stride;
            if (next - o == 32) amx_outputs(type, 2, a, x, group, end, ahead, o);
            else amx_outputs(type, 1, a, x, group, end, ahead, o);
        }
        finish(a, row, (end * x->height < a->n ? end * x->height : a->n) - row, from, to);
    }
}

NOINLINE void linear_amx_bf16(const linear_args *a, const amx_rows *x, ptrdiff_t from, ptrdiff_t to) {
    linear_amx(BF16, a, x, from, to);
}

NOINLINE void linear_amx_i8(const linear_args *a, const amx_rows *x, ptrdiff_t from, ptrdiff_t to) {
    linear_amx(I8, a, x, from, to);
}

/* Whether tiles take rows of K entries: rows of weights are whole tiles. */
static int amx_fits(int type, ptrdiff_t K, ptrdiff_t out) {
    return ((type == BF16 && K % 32 == 0) || (type == I8 && K % 64 == 0)) && out >= 16 && amx_allowed();
}

/* All of a product but its last out % 16 outputs; `chunk` outputs, a multiple of 32, at a time to a thread. Returns 1
 * where memory is short, and nothing is done then. */
static int product_amx(const linear_args *a, int type, ptrdiff_t chunk, int threads) {
    const ptrdiff_t n = a->n, K = a->K, out = a->out / 16 * 16, chunks = (out + chunk - 1) / chunk;
    const ptrdiff_t parts = type == I8 ? 3 : 2, most = 16 / parts, groups = (n + most - 1) / most;
    const ptrdiff_t height = groups ? (n + groups - 1) / groups : 1, columns = parts * height;
    const ptrdiff_t steps = K / (type == I8 ? 64 : 32), tiles = groups * steps, words = 16 * columns;
    const int apart = groups == 1; /* each thread splits few rows for itself: quicker than to fetch them from another */
    const size_t scales = (size_t)(n + 15) / 16 * 64, size = scales + (size_t)(tiles * words) * 4;
    amx_room *room = amx_take(apart ? size * (size_t)threads : size);
    if (!room) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char *at = room->at;
#ifdef _OPENMP /* a place that depends on the room, not on the product: its lines stay in a core's cache */
        if (apart) at += room->size / (size_t)threads / 64 * 64 * (size_t)omp_get_thread_num();
#endif
        float *scale = (float *)at;
        uint32_t *to = (uint32_t *)(at + scales);
        const amx_rows x = {height, groups, columns, steps, to, scale};
        if (apart) {
            for (ptrdiff_t r = 0; type == I8 && r < n; r++) scale[r] = amx_scale(a->x + r * a->xs, K);
            for (ptrdiff_t t = 0; t < tiles; t++) amx_split(a, type, &x, t, to + t * words);
        } else { /* a tile has one writer: threads that share its lines would wait for one another */
            if (type == I8) {
#pragma omp for schedule(static)
                for (ptrdiff_t r = 0; r < n; r++) scale[r] = amx_scale(a->x + r * a->xs, K);
            }
#pragma omp for schedule(static)
            for (ptrdiff_t t = 0; t < tiles; t++) amx_split(a, type, &x, t, to + t * words);
        }
        amx_begin(columns);
#pragma omp for schedule(dynamic, 1) nowait
        for (ptrdiff_t c = 0; c < chunks; c++) {
            const ptrdiff_t from = c * chunk, end = from + chunk < out ? from + chunk : out;
            if (type == I8) linear_amx_i8(a, &x, from, end);
            else linear_amx_bf16(a, &x, from, end);
        }
        _tile_release();
    }
    amx_keep(room);
    return 0;
}
