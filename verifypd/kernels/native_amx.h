/* Products by AMX tiles, on x86 processors that have them: 16 columns cost what one costs.
 *
 * A row of x is split into two bfloat16, high + low, exact to 2^-17, which are two columns; eight rows fill a tile. The
 * weights are read as they lie: 16 rows, 32 entries of each. int8 weights become bfloat16 first, which holds them
 * exactly. So a result is as exact as one summed in float32, and its columns feel no neighbours. Included by native.c.
 */
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_ROWS 8       /* of x in a tile */
#define AMX_BLOCK 96     /* rows of x kept in the second-level cache while weights stream by */
#define AMX_TILE 1024    /* bytes */
/* Compilers do not see that tiles read memory: what was written there has to be there. */
#define AMX_MEMORY(at) __asm__ volatile("" : : "r"(at) : "memory")

typedef struct { uint8_t palette, start; uint8_t zero[14]; uint16_t width[16]; uint8_t height[16]; } amx_config;

/* Whether the system lets this process use tiles; asked once. */
static int amx_allowed(void) {
    static int known; /* 1: yes, 2: no */
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : 2;
    return known == 1;
}

static void amx_begin(void) {
    amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) { config.width[i] = 64; config.height[i] = 16; }
    AMX_MEMORY(&config);
    _tile_loadconfig(&config);
}

/* Tile t of x: 32 entries of eight rows, row r in columns r and r + 8, columns of rows that are not there zero. */
static void amx_split(const linear_args *a, ptrdiff_t t, uint32_t *to) {
    const __m512i places = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4); /* a row of a tile is 16 words */
    const ptrdiff_t steps = a->K / 32, first = t / steps * AMX_ROWS;
    const ptrdiff_t rows = a->n - first < AMX_ROWS ? a->n - first : AMX_ROWS;
    if (rows < AMX_ROWS) memset(to, 0, AMX_TILE);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *x = a->x + (first + r) * a->xs + t % steps * 32;
        __m512 first_half = _mm512_loadu_ps(x), second_half = _mm512_loadu_ps(x + 16);
        __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second_half, first_half);
        __m512 wide_first = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
        __m512 wide_second = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
        __m512i low = (__m512i)_mm512_cvtne2ps_pbh(second_half - wide_second, first_half - wide_first);
        _mm512_i32scatter_epi32(to + r, places, high, 4);
        _mm512_i32scatter_epi32(to + r + 8, places, low, 4);
    }
}

/* A times 16 outputs, B times eight rows: sums[a][b] are tiles of 16 outputs by 16 columns. x: tiles of a group of
 * eight rows, the next group `group` bytes on. */
INLINE void amx_product(const int A, const int B, const char *w, ptrdiff_t K, const char *x, ptrdiff_t group,
                        const char *ahead, float (*sums)[2][256]) {
    const ptrdiff_t stride = 2 * K;
    AMX_MEMORY(w);
    AMX_MEMORY(x);
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
    for (ptrdiff_t k = 0; k < K; k += 32, x += AMX_TILE, w += 64) {
        for (int i = 0; i < A * AMX_TILE; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        ahead += A * AMX_TILE;
        _tile_loadd(4, w, stride);
        _tile_loadd(6, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (B > 1) {
            _tile_loadd(7, x + group, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (A > 1) {
            _tile_loadd(5, w + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (B > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    if (B > 1) _tile_stored(1, sums[0][1], 64);
    if (A > 1) _tile_stored(2, sums[1][0], 64);
    if (A > 1 && B > 1) _tile_stored(3, sums[1][1], 64);
    AMX_MEMORY(sums);
}

/* 16 rows of int8 as bfloat16. */
static void amx_widen(const int8_t *w, ptrdiff_t entries, bf16 *to) {
    for (ptrdiff_t i = 0; i < entries; i += 32) {
        __m512 first = (__m512)load_i8(w + i), second = (__m512)load_i8(w + i + 16);
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

/* Outputs [o, o + 16 A) of rows [row, row + rows). x: the tiles of these rows. ahead: 16 A rows of weights. */
INLINE void amx_outputs(const int A, const linear_args *a, const bf16 *w, const char *x, ptrdiff_t row, ptrdiff_t rows,
                        const char *ahead, ptrdiff_t o) {
    const ptrdiff_t group = a->K / 32 * AMX_TILE;
    for (ptrdiff_t r = 0; r < rows; r += 2 * AMX_ROWS) {
        float sums[2][2][256] __attribute__((aligned(64)));
        const char *xr = x + r / AMX_ROWS * group;
        if (rows - r > AMX_ROWS) amx_product(A, 2, (const char *)w, a->K, xr, group, ahead, sums);
        else amx_product(A, 1, (const char *)w, a->K, xr, group, ahead, sums);
        ahead = (const char *)w; /* what is there already */
        const ptrdiff_t end = rows - r < 2 * AMX_ROWS ? rows - r : 2 * AMX_ROWS;
        for (ptrdiff_t m = 0; m < end; m++) {
            float *y = a->y + (row + r + m) * a->out + o;
            for (int i = 0; i < A; i++) {
                const float *from = sums[i][m / AMX_ROWS] + m % AMX_ROWS;
                for (int j = 0; j < 16; j++) y[16 * i + j] = from[16 * j] + from[16 * j + 8];
            }
        }
    }
}

/* Outputs [from, to), multiples of 16. x: tiles of all rows. wide: room for 32 rows of weights, where they are int8. */
static void linear_amx(const linear_args *a, int type, const char *x, bf16 *wide, ptrdiff_t from, ptrdiff_t to) {
    const ptrdiff_t K = a->K, group = K / 32 * AMX_TILE, size = type == I8 ? 1 : 2;
    amx_begin();
    for (ptrdiff_t row = 0; row < a->n; row += AMX_BLOCK) {
        const ptrdiff_t rows = a->n - row < AMX_BLOCK ? a->n - row : AMX_BLOCK;
        for (ptrdiff_t o = from, next; o < to; o = next) {
            next = o + 32 <= to ? o + 32 : to;
            const char *at = (const char *)a->w + o * K * size, *ahead = at;
            if (next + 32 <= to) ahead += (next - o) * K * size;
            const bf16 *w = (const bf16 *)at;
            if (type == I8) {
                amx_widen((const int8_t *)at, (next - o) * K, wide);
                w = wide;
            }
            if (next - o == 32) amx_outputs(2, a, w, x + row / AMX_ROWS * group, row, rows, ahead, o);
            else amx_outputs(1, a, w, x + row / AMX_ROWS * group, row, rows, ahead, o);
        }
        finish(a, row, rows, from, to);
    }
    _tile_release();
}

/* All of a product but its last out % 16 outputs; `chunk` outputs, a multiple of 32, at a time to a thread. Returns 1
 * where memory is short, and nothing is done then. */
static int product_amx(const linear_args *a, int type, ptrdiff_t chunk, int threads) {
    const ptrdiff_t n = a->n, K = a->K, out = a->out / 16 * 16, chunks = (out + chunk - 1) / chunk;
    const ptrdiff_t tiles = (n + AMX_ROWS - 1) / AMX_ROWS * (K / 32);
    const int apart = n <= AMX_ROWS; /* each thread splits few rows for itself: quicker than to fetch them from another */
    const size_t split = (size_t)tiles * AMX_TILE, wide = type == I8 ? 64 * (size_t)K : 0;
    char *room = aligned_alloc(64, split * (size_t)(apart ? threads : 1) + wide * (size_t)threads);
    if (!room) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        const size_t thread = (size_t)omp_get_thread_num();
#else
        const size_t thread = 0;
#endif
        char *mine = room + wide * (size_t)threads + (apart ? split * thread : 0);
        if (apart) {
            for (ptrdiff_t t = 0; t < tiles; t++) amx_split(a, t, (uint32_t *)(mine + t * AMX_TILE));
        } else { /* a tile has one writer: threads that share its lines would wait for one another */
#pragma omp for schedule(static)
            for (ptrdiff_t t = 0; t < tiles; t++) amx_split(a, t, (uint32_t *)(mine + t * AMX_TILE));
        }
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t c = 0; c < chunks; c++)
            linear_amx(a, type, mine, (bf16 *)(room + wide * thread), c * chunk,
                       (c + 1) * chunk < out ? (c + 1) * chunk : out);
    }
    free(room);
    return 0;
}
