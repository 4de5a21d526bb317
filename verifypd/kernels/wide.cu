/* Products of 33 to 64 rows, with what stands around them, by Hopper's matrix instructions of 64 outputs (wgmma).

A pass of so few rows is bound by reading weights. One block for each processor has its share of them come into shared
memory by the copy engine, STAGES pieces ahead, and begins before the kernel before is done: weights wait for nobody.
Blocks share a tile where tiles are few, or do not go into the processors evenly: then the sums of its parts meet in
device memory, and the block that has the tile's beginning adds them up, in one order.

At the end of a block nothing is fetched, so what can be read before is: residuals, angles, and sums of others.

Threads: two groups of four warps multiply, 64 outputs each; three warps find what norms the rows of x; one fetches.

Compiled for one kind of product (MODE), dtype and number of rows (ROWS) at a time; wide.py sets the constants, writes
`multiply`, whose instruction has an operand for each sum, and says what the arguments are. */

/* MODE is one of
PLAIN: x W^T
GATED: activation(first half) * second half
ADDED: x W^T + residual, its squares, and the norm behind but for its factor
QKV:   queries, keys and values, rotated; keys and values into the cache */

struct Arguments {
    const half_word *bias;
    const float *squares;
    const half_word *residual, *norm;
    half_word *out, *stream;
    float *new_squares;
    half_word *cache_k, *cache_v;
    const wide *write_index, *positions;
    const float *cos, *sin;
    float *partial;
    word *flags;
    int rows, depth, outputs, parts, squares_row, new_squares_row, query_heads, kv_heads, width;
    int splits, later, early;
    float eps;
};

#define K PIECE_DEPTH               /* in a piece: a row of 128 bytes */
#define TILE TILE_OUTPUTS
#define GROUP 128                   /* threads that multiply 64 outputs */
#define PIECE (TILE * K)            /* weights */
#define STAGE (PIECE + ROWS * K)    /* of a piece, and the rows of x beside it */
#define PITCH (TILE + 8)            /* numbers: rows of sums begin in different banks */
#define SUMS (ROWS / 2)             /* of a thread */
#define PAIRED (MODE == GATED || MODE == QKV)
#define EARLY 4                     /* pieces before the end, from which on sums of others are read */
#define FINDERS 96                  /* threads that find the factors of rows */

static_assert(ROWS % 16 == 0 && ROWS <= 64, "what an instruction takes, and registers hold twice");
static_assert(TILE == 128 && K == 64, "outputs of two groups; what a row of 128 bytes holds");
static_assert(THREADS == 2 * GROUP + FINDERS + 32, "the last warp fetches");

#define READ_ONCE 0x12F0000000000000ull  /* weights: first to leave the L2 */
#define READ_AGAIN 0x14F0000000000000ull /* rows: last */

/* Threads of the groups that multiply. */
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

/* -- which outputs ------------------------------------------------------------------------------------------------- */

/* Whether a tile of queries, keys and values is 128 in a row; else 64 dimensions of a head and those they rotate with. */
__device__ __forceinline__ bool in_a_row(const Arguments &a) { return a.width < TILE; }

/* The first row of the weights that a group has of a tile: 64 in a row. */
__device__ __forceinline__ int first_row(const Arguments &a, int tile, int group) {
#if MODE == GATED
    return group * (a.outputs / 2) + tile * (TILE / 2);
#elif MODE == QKV
    if (in_a_row(a)) return tile * TILE + group * (TILE / 2);
    int half = a.width / 2, pair = tile * (TILE / 2);
    return pair / half * a.width + group * half + pair % half;
#else
    return tile * TILE + group * (TILE / 2);
#endif
}

/* -- what follows the sums: eight numbers at a time, of a row of the tile ------------------------------------------ */

union Eight {
    uint4 all;
    half_word each[8];
};

#define LANES (PAIRED ? 8 : 16)          /* threads that have a row of a tile */
#define APART (2 * GROUP / LANES)        /* rows between two of a thread */
#define OWN ((ROWS + APART - 1) / APART) /* rows of a thread */

/* What outputs are made of besides their sums: read while these are under way. */
struct Around {
#if MODE == ADDED
    uint4 residual[OWN], norm;
#elif MODE == QKV
    wide place[OWN];
    float4 cos[OWN][2], sin[OWN][2];
#endif
};

/* Where a thread's eight pairs of a tile lie in the sums, and which dimensions of which head they are. */
struct Pair {
    int low, high, head, at;

    __device__ __forceinline__ Pair(const Arguments &a, int tile, int lane) {
        const int half = a.width / 2, item = 8 * lane, pair = tile * (TILE / 2) + item;
        low = in_a_row(a) ? item / half * a.width + item % half : item;
        high = low + (in_a_row(a) ? half : TILE / 2);
        head = pair / half, at = pair % half;
    }
};

__device__ __forceinline__ void read_around(const Arguments &a, int tile, Around &around, int thread) {
    [[maybe_unused]] const int lane = thread % LANES;
#if MODE == ADDED
    around.norm = *(const uint4 *)(a.norm + tile * TILE + 8 * lane);
#elif MODE == QKV
    const Pair pair(a, tile, lane);
#endif
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int m = thread / LANES + i * APART;
        if (m >= a.rows) continue;
#if MODE == ADDED
        around.residual[i] = *(const uint4 *)(a.residual + (wide)m * a.outputs + tile * TILE + 8 * lane);
#elif MODE == QKV
        around.place[i] = a.write_index[m];
        const wide angle = a.positions[m] * (a.width / 2) + pair.at;
        around.cos[i][0] = *(const float4 *)(a.cos + angle), around.cos[i][1] = *(const float4 *)(a.cos + angle + 4);
        around.sin[i][0] = *(const float4 *)(a.sin + angle), around.sin[i][1] = *(const float4 *)(a.sin + angle + 4);
#endif
    }
}

/* sums [ROWS][PITCH], rounded. */
__device__ __forceinline__ void finish(const Arguments &a, int tile, const half_word *sums, int thread, const Around &around) {
    const int lane = thread % LANES;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int m = thread / LANES + i * APART;
        const half_word *row = sums + m * PITCH;
        [[maybe_unused]] Eight one, two, found;
#if MODE == PLAIN
        one.all = *(const uint4 *)(row + 8 * lane);
        if (m < a.rows) *(uint4 *)(a.out + (wide)m * a.outputs + tile * TILE + 8 * lane) = one.all;
#elif MODE == GATED
        if (m >= a.rows) continue;
        one.all = *(const uint4 *)(row + 8 * lane);
        two.all = *(const uint4 *)(row + TILE / 2 + 8 * lane);
#pragma unroll
        for (int j = 0; j < 8; j++)
            found.each[j] = narrowed(rounded(acted(widened(one.each[j]))) * widened(two.each[j]));
        *(uint4 *)(a.out + (wide)m * (a.outputs / 2) + tile * (TILE / 2) + 8 * lane) = found.all;
#elif MODE == ADDED
        float squares = 0.0f;
        if (m < a.rows) {
            const wide place = (wide)m * a.outputs + tile * TILE + 8 * lane;
            Eight norm;
            one.all = *(const uint4 *)(row + 8 * lane), two.all = around.residual[i], norm.all = around.norm;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float total = rounded(widened(one.each[j]) + widened(two.each[j])), by = widened(norm.each[j]);
                squares += total * total;
                one.each[j] = narrowed(total);
                found.each[j] = narrowed(total * (UNIT ? 1.0f + by : by));
            }
            *(uint4 *)(a.stream + place) = one.all;
            *(uint4 *)(a.out + place) = found.all;
        }
        for (int step = LANES / 2; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        if (lane == 0 && m < a.rows) a.new_squares[tile * a.new_squares_row + m] = squares;
#else
        const Pair pair(a, tile, lane);
        const int heads = a.query_heads + a.kv_heads;
        if (m >= a.rows) continue;
        one.all = *(const uint4 *)(row + pair.low), two.all = *(const uint4 *)(row + pair.high);
        if (pair.head < heads) { /* values are not rotated */
            const float *c = (const float *)around.cos[i], *s = (const float *)around.sin[i];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float x = widened(one.each[j]), y = widened(two.each[j]);
                one.each[j] = narrowed(x * c[j] - y * s[j]);
                two.each[j] = narrowed(y * c[j] + x * s[j]);
            }
        }
        half_word *written = a.out;
        wide place = m;
        int head = pair.head, held = a.query_heads;
        if (head >= a.query_heads) {
            place = around.place[i];
            written = head < heads ? a.cache_k : a.cache_v;
            head -= head < heads ? a.query_heads : heads;
            held = a.kv_heads;
        }
        written += (place * held + head) * a.width + pair.at;
        *(uint4 *)written = one.all;
        *(uint4 *)(written + a.width / 2) = two.all;
#endif
    }
}

/* -- the kernel ---------------------------------------------------------------------------------------------------- */

/* The part of all weights, in pieces, that is a block's. */
struct Share {
    int pieces; /* of a tile */
    int all, splits, later;

    __device__ __forceinline__ Share(const Arguments &a)
        : pieces(a.depth / K), all(a.outputs / TILE * pieces), splits(a.splits), later(a.later) {}

    /* Where it begins. Tiles are split, each into as many parts, of which the first, which adds up, is larger; or, with no
    splits, all pieces are cut into even shares. */
    __device__ __forceinline__ int begin(int block) const {
        if (!splits) return (int)((wide)all * block / gridDim.x);
        const int part = block % splits;
        return block / splits * pieces + (part ? pieces - (splits - part) * ((pieces - later) / splits) : 0);
    }
};

__device__ __forceinline__ void fetch_all(
    const Map &weight, const Map &x, const Arguments &a, half_word *stages, address *full, address *empty) {
    const Share share(a);
    const int first = share.begin(blockIdx.x), count = share.begin(blockIdx.x + 1) - first, ahead = min(STAGES, count);
    int tile = first / share.pieces, piece = first % share.pieces; /* whose weights are fetched next */
    const auto fetch_weights = [&](int stage) {
        half_word *to = stages + stage * STAGE;
        expect_bytes(full + stage, STAGE * 2);
#pragma unroll
        for (int group = 0; group < 2; group++)
            fetch(to + group * (PIECE / 2), &weight, piece * K, first_row(a, tile, group), full + stage, READ_ONCE);
        if (++piece == share.pieces) piece = 0, tile++;
    };
    const auto fetch_rows = [&](int stage, int turn) {
        fetch(stages + stage * STAGE + PIECE, &x, (first + turn) % share.pieces * K, 0, full + stage, READ_AGAIN);
    };
    for (int stage = 0; stage < ahead; stage++) fetch_weights(stage);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int stage = 0; stage < ahead; stage++) fetch_rows(stage, stage);
    for (int turn = STAGES; turn < count; turn++) {
        const int stage = turn % STAGES;
        await(empty + stage, turn / STAGES - 1 & 1);
        fetch_weights(stage);
        fetch_rows(stage, turn);
    }
}

/* What the sums of a row are multiplied by: whoever wrote it left its norm to us. */
__device__ __forceinline__ void find_factors(const Arguments &a, float *factor, int thread) {
    for (int m = thread; m < ROWS; m += FINDERS) {
        float sum = 0.0f;
        if (m < a.rows) {
#pragma unroll 32
            for (int part = 0; part < a.parts; part++) sum += __ldcg(a.squares + part * a.squares_row + m);
        }
        factor[m] = a.parts ? rsqrtf(sum / a.depth + a.eps) : 1.0f;
    }
}

__device__ __forceinline__ float *sums_of(const Arguments &a, int block, int thread) {
    return a.partial + (wide)block * (SUMS * 2 * GROUP) + thread;
}

/* Sums of a tile whose beginning is another block's: for that block. */
__device__ __forceinline__ void give(const Arguments &a, const float *sum, int thread) {
    float *own = sums_of(a, blockIdx.x, thread);
#pragma unroll
    for (int i = 0; i < SUMS; i++) __stcg(own + i * 2 * GROUP, sum[i]);
    __threadfence();
    meet();
    if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(a.flags + blockIdx.x) : "memory");
}

/* Until the `count` blocks behind this one have given. Not all blocks need to run at once, but count + 1 do: they begin
 * in the order of their numbers and give before they wait, so that the first of those that run can end. */
__device__ __forceinline__ void await_others(const Arguments &a, int count, int thread) {
    if (thread < count) {
        word *flag = a.flags + blockIdx.x + 1 + thread, there;
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
        while (!there);
        *flag = 0; /* for the next launch */
    }
    meet();
}

__device__ __forceinline__ void multiply_all(
    const Arguments &a, const half_word *stages, half_word *finished, address *full, address *empty, const float *factor) {
    const Share share(a);
    const int last = share.begin(blockIdx.x + 1);
    const int thread = threadIdx.x, group = thread / GROUP, warp = thread / 32, lane = thread % 32;
    const int n = warp % 4 * 16 + lane / 4; /* of the group's 64 outputs; another is eight behind */
    const int even = lane % 4 * 2;          /* rows 8 i + even and the one behind it are a thread's */
    bool known = false;                     /* the factors */
    int turn = 0;
    for (int unit = share.begin(blockIdx.x); unit < last;) {
        const int tile = unit / share.pieces, begin = unit % share.pieces, end = min(share.pieces, begin + last - unit);
        int others = 0; /* blocks behind this one that have a part of the tile */
        while (end < share.pieces && share.begin(blockIdx.x + 1 + others) < (tile + 1) * share.pieces) others++;
        const bool early = others && a.early;
        Around around;
        float bias = 0.0f, next_bias = 0.0f;
        if (!begin) {
            read_around(a, tile, around, thread);
            if (a.bias) {
                const half_word *own = a.bias + first_row(a, tile, group) + n;
                bias = widened(own[0]), next_bias = widened(own[8]);
            }
        }
        float sum[SUMS] = {}, given[SUMS] = {};
        for (int piece = begin; piece < end; piece++, turn++) {
            if (early && piece == max(begin, end - EARLY)) {
                await_others(a, 1, thread);
#pragma unroll
                for (int i = 0; i < SUMS; i++) given[i] = __ldcg(sums_of(a, blockIdx.x + 1, thread) + i * 2 * GROUP);
            }
            const int stage = turn % STAGES;
            await(full + stage, turn / STAGES & 1);
            __syncwarp();
            const half_word *w = stages + stage * STAGE + group * (PIECE / 2);
            address left = described(w), right = described(stages + stage * STAGE + PIECE);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < K / 16; k++) multiply(sum, left + 2 * k, right + 2 * k, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane == 0) arrive(empty + stage);
        }
        unit += end - begin;
        if (begin) { /* the block with the tile's beginning finishes it */
            give(a, sum, thread);
            continue;
        }
        if (others && !early) {
            await_others(a, others, thread);
#pragma unroll 2
            for (int other = 1; other <= others; other++)
#pragma unroll
                for (int i = 0; i < SUMS; i++) sum[i] += __ldcg(sums_of(a, blockIdx.x + other, thread) + i * 2 * GROUP);
        }
        if (!known) asm volatile("bar.sync 2, %0;" :: "n"(2 * GROUP + FINDERS) : "memory");
        known = true;
        meet(); /* whoever read the tile before is done */
#pragma unroll
        for (int i = 0; i < SUMS; i++) { /* sums of a thread: two rows, then the same of the output eight behind */
            const int m = i / 4 * 8 + even + i % 2, behind = i % 4 / 2;
            finished[m * PITCH + group * (TILE / 2) + n + 8 * behind] =
                narrowed((sum[i] + given[i]) * factor[m] + (behind ? next_bias : bias));
        }
        meet();
        finish(a, tile, finished, thread, around);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
wide_product(const __grid_constant__ Map weight, const __grid_constant__ Map x, const __grid_constant__ Arguments a) {
    extern __shared__ half_word memory[];
    /* STAGES of weights and rows, where swizzles begin anew, and rows of sums behind them */
    half_word *const stages = memory + (1024 - (shared_address(memory) & 1023)) % 1024 / 2;
    __shared__ address full[STAGES], empty[STAGES];
    __shared__ float factor[ROWS];
    const int thread = threadIdx.x;
    if (thread == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(&weight) : "memory");
        asm volatile("prefetch.tensormap [%0];" :: "l"(&x) : "memory");
        for (int stage = 0; stage < STAGES; stage++) {
            expect(full + stage, 1);
            expect(empty + stage, 2 * GROUP / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (thread >= 2 * GROUP + FINDERS) {
        if (thread % 32 == 0) fetch_all(weight, x, a, stages, full, empty);
        return;
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); /* who comes early counts on what is done before us */
    if (thread >= 2 * GROUP) {
        find_factors(a, factor, thread - 2 * GROUP);
        asm volatile("bar.arrive 2, %0;" :: "n"(2 * GROUP + FINDERS) : "memory");
    } else {
        multiply_all(a, stages, stages + STAGES * STAGE, full, empty, factor);
    }
}
