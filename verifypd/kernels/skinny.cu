/* Products of up to eight rows, with what stands around them, for GPUs that start a kernel before the one before is done.

A pass of few rows is bound by reading weights. A block of threads has its share of their rows come into shared memory, AHEAD
rounds ahead, and begins before the kernel before it is done: weights wait for nobody. Each warp takes a part of the depth
and all of the block's outputs, and each thread multiplies what it fetched itself, so that none waits for another until the
sums of warps meet in shared memory.

Compiled for one kind of product (MODE) at a time; skinny.py sets the constants and says what the arguments are. */

/* MODE is one of
PLAIN: x W^T
GATED: activation(first half) * second half
ADDED: x W^T + residual, its squares, and the norm behind but for its factor
QKV:   queries, keys and values, rotated; keys and values into the cache
A round is DEPTH numbers, 64 bytes, of each row of weights. */

#define WARPS (THREADS / 32)
#define PAIRED (MODE == GATED || MODE == QKV)
#define TILES (PAIRED ? MATRICES / 2 : MATRICES) /* of outputs, or of pairs of them */
#define ITEMS (8 * TILES)                        /* of a turn */
#define PITCH (8 * MATRICES + 8)                 /* floats: no two rows of a store meet in a bank */
#define OUTPUTS ((ROWS * ITEMS + THREADS - 1) / THREADS) /* of a thread in a turn */
#define SLOT ((MATRICES + 1) * THREADS)          /* what is fetched in a round: weights, and rows */

struct Arguments {
    const half_word *x, *weight, *bias;
    const float *squares;
    const half_word *residual, *norm;
    half_word *out, *stream;
    float *new_squares;
    half_word *cache_k, *cache_v;
    const wide *write_index, *positions;
    const float *cos, *sin;
    wide x_row;
    int rows, depth, items, parts, squares_row, new_squares_row, query_heads, kv_heads, width;
    float eps;
};

/* Have sixteen bytes come into shared memory; zeros where not `there`. Weights are not kept near the processor. */
__device__ __forceinline__ void fetch_weights(uint4 *to, const half_word *from, bool there) {
    word address = (word)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void fetch_row(uint4 *to, const half_word *from, bool there) {
    word address = (word)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Sums of a row and two outputs += rows by sixteen of the depth, times those by eight outputs. An instruction takes sixteen
rows; the others are zero. Which of the depth is which does not matter, as long as both sides agree. */
__device__ __forceinline__ void multiply(float *sum, word a0, word a1, word b0, word b1) {
    float none[2] = {0.0f, 0.0f};
    asm volatile(
#if FLOAT16
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %8, %5, %8}, {%6, %7}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(none[0]), "+f"(none[1])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1), "r"(0));
}

/* The row of the weights that is an item's, or the second of its two. */
__device__ __forceinline__ int weight_row(const Arguments &a, int item, int second) {
#if MODE == QKV
    int half = a.width / 2;
    return item / half * a.width + second * half + item % half;
#else
    return second * a.items + item;
#endif
}

/* What the sums of a row are multiplied by: whoever wrote it left its norm to us. */
__device__ __forceinline__ void find_factors(const Arguments &a, float *factor) {
    const int lanes = THREADS / ROWS, row = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    float sum = 0.0f;
    if (row < a.rows)
        for (int part = lane; part < a.parts; part += lanes) sum += __ldcg(a.squares + part * a.squares_row + row);
    for (int step = lanes / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) factor[row] = a.parts ? rsqrtf(sum / a.depth + a.eps) : 1.0f;
}

/* What an output is made of besides its sums: read while these are under way. */
struct Around {
    float bias, other_bias;
#if MODE == QKV
    float cos, sin;
    wide place;
#elif MODE == ADDED
    half_word residual, norm;
#endif
};

__device__ __forceinline__ void read_around(const Arguments &a, int row, int item, Around &around) {
    around.bias = a.bias ? widened(a.bias[weight_row(a, item, 0)]) : 0.0f;
    if (PAIRED) around.other_bias = a.bias ? widened(a.bias[weight_row(a, item, 1)]) : 0.0f;
#if MODE == QKV
    int half = a.width / 2, head = item / half;
    around.place = head < a.query_heads ? row : a.write_index[row];
    if (head < a.query_heads + a.kv_heads) {
        wide angle = a.positions[row] * half + item % half;
        around.cos = a.cos[angle];
        around.sin = a.sin[angle];
    } else { /* values are not rotated */
        around.cos = 1.0f;
        around.sin = 0.0f;
    }
#elif MODE == ADDED
    around.residual = a.residual[(wide)row * a.items + item];
    around.norm = a.norm[item];
#endif
}

static_assert(MODE != ADDED || ITEMS <= 32, "squares of a row are added up by one warp");
static_assert(DEPTH == 32 && ROWS == 8, "what a matrix instruction takes, twice");

extern "C" __global__ void __launch_bounds__(THREADS, 1) skinny(const __grid_constant__ Arguments a) {
    extern __shared__ uint4 memory[]; /* [AHEAD][MATRICES + 1][THREADS]: a thread reads what it fetched itself */
    float(*sums)[WARPS][ROWS][PITCH] = (float(*)[WARPS][ROWS][PITCH])(memory + AHEAD * SLOT);
    __shared__ float factor[ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int first = (int)((wide)a.items * blockIdx.x / gridDim.x);
    const int last = (int)((wide)a.items * (blockIdx.x + 1) / gridDim.x);
    const int turns = (last - first + ITEMS - 1) / ITEMS;
    const int all = a.depth / DEPTH, own = all * warp / WARPS, rounds = all * (warp + 1) / WARPS - own;
    const int begin = own * DEPTH + quarter * 8; /* in the depth: a thread has eight of it in a row, on both sides */

    const half_word *source[MATRICES]; /* of the turn whose weights are fetched */
    bool known[MATRICES];
    int turn_ahead = 0, round_ahead = 0;
    auto aim = [&]() {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
            int item = first + turn_ahead * ITEMS + matrix % TILES * 8 + group;
            known[matrix] = item < last && rounds > 0; /* none behind the last turn */
            source[matrix] = a.weight + (wide)weight_row(a, known[matrix] ? item : 0, matrix / TILES) * a.depth + begin;
        }
    };
    auto fetch_round = [&](uint4 *to) {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++)
            fetch_weights(to + matrix * THREADS, source[matrix] + round_ahead * DEPTH, known[matrix]);
    };
    const half_word *x = a.x + group * a.x_row + begin;
    auto fetch_rows = [&](uint4 *to, int turn, int round) {
        fetch_row(to + MATRICES * THREADS, x + round * DEPTH, group < a.rows && turn < turns && rounds > 0);
    };
    auto advance = [&]() {
        if (++round_ahead < rounds) return;
        round_ahead = 0, turn_ahead++;
        aim();
    };

    aim();
    uint4 *slot = memory + threadIdx.x;
    uint4 *const end = slot + AHEAD * SLOT;
    for (int ahead = 0; ahead < AHEAD; ahead++, slot += SLOT) {
        fetch_round(slot);
        close_group();
        advance();
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    slot = memory + threadIdx.x;
    for (int ahead = 0; ahead < AHEAD; ahead++, slot += SLOT) {
        fetch_rows(slot, ahead / max(rounds, 1), ahead % max(rounds, 1));
        close_group();
    }
    slot = memory + threadIdx.x;
    find_factors(a, factor);

#if MODE == ADDED
    float squares[OUTPUTS] = {};
#endif
    for (int turn = 0; turn < turns; turn++) {
        float sum[MATRICES][2] = {};
        Around around[OUTPUTS];
#pragma unroll
        for (int index = 0; index < OUTPUTS; index++) {
            int output = threadIdx.x + index * THREADS, row = output / ITEMS, item = first + turn * ITEMS + output % ITEMS;
            if (row < a.rows && item < last) read_around(a, row, item, around[index]);
        }
        for (int round = 0; round < rounds; round++) {
            asm volatile("cp.async.wait_group %0;" :: "n"(AHEAD - 1) : "memory");
            uint4 r = slot[MATRICES * THREADS];
#pragma unroll
            for (int matrix = 0; matrix < MATRICES; matrix++) {
                uint4 w = slot[matrix * THREADS];
                multiply(sum[matrix], r.x, r.y, w.x, w.y);
                multiply(sum[matrix], r.z, r.w, w.z, w.w);
            }
            fetch_round(slot);
            fetch_rows(slot, turn_ahead, round_ahead);
            close_group();
            advance();
            slot += SLOT;
            if (slot == end) slot = memory + threadIdx.x;
        }
        auto part = sums[turn % 2];
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++)
            *(float2 *)&part[warp][group][8 * matrix + 2 * quarter] = make_float2(sum[matrix][0], sum[matrix][1]);
        __syncthreads();
#pragma unroll
        for (int index = 0; index < OUTPUTS; index++) {
            int output = threadIdx.x + index * THREADS, row = output / ITEMS, column = output % ITEMS;
            int item = first + turn * ITEMS + column;
            if (row >= a.rows || item >= last) continue;
            float total = 0.0f, other = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                total += part[w][row][column];
                if (PAIRED) other += part[w][row][8 * TILES + column];
            }
            total = total * factor[row] + around[index].bias;
            if (PAIRED) other = other * factor[row] + around[index].other_bias;
#if MODE == QKV
            int half = a.width / 2, head = item / half, heads = a.query_heads, at = item % half;
            float one = rounded(total), two = rounded(other), c = around[index].cos, s = around[index].sin;
            half_word *written = a.out;
            if (head >= a.query_heads) {
                head -= a.query_heads;
                heads = a.kv_heads;
                written = head < heads ? a.cache_k : a.cache_v;
                head -= head < heads ? 0 : heads;
            }
            written += (around[index].place * heads + head) * a.width + at;
            written[0] = narrowed(one * c - two * s);
            written[half] = narrowed(two * c + one * s);
#else
            wide target = (wide)row * a.items + item;
#if MODE == GATED
            total = rounded(acted(rounded(total))) * rounded(other);
#elif MODE == ADDED
            total = rounded(rounded(total) + widened(around[index].residual));
            a.stream[target] = narrowed(total);
            squares[index] += total * total;
            float scale = widened(around[index].norm);
            total *= UNIT ? 1.0f + scale : scale;
#endif
            a.out[target] = narrowed(total);
#endif
        }
    }
#if MODE == ADDED
#pragma unroll
    for (int index = 0; index < OUTPUTS; index++) {
        int output = threadIdx.x + index * THREADS, row = output / ITEMS;
        float total = squares[index];
        for (int step = ITEMS / 2; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (output % ITEMS == 0 && row < a.rows) a.new_squares[blockIdx.x * a.new_squares_row + row] = total;
    }
#endif
}
