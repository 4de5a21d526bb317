/* Attention of few query rows over a paged context, for GPUs that start a kernel before the one before is done.

A pass of few rows waits for its keys and values more than it reads them. What earlier passes wrote of them waits for
nobody: a block of threads has the first of it come into shared memory before the kernel before it is done, which writes
the queries and the keys and values of this pass. Each warp takes KEYS of the context at a time with a softmax of its own,
so that none waits for another until their sums meet in shared memory. Where several blocks share a context, the one that
is done last merges what they found.

A block takes one key head of one tile: the query rows of a span, times the query heads that share the key head, are at
most ROWS. Scores are in base 2. Compiled for one shape of heads at a time; short.py sets the constants and says what the
arguments are. */

#define THREADS (32 * WARPS)
#define HALVES (TALL ? 2 : 1)          /* of eight rows; a thread has one row of each */
#define ROWS (8 * HALVES)
#define TILES (KEYS / 8)               /* of eight keys */
#define ROUNDS (WIDTH / 32)            /* 64 bytes of each key */
#define CHUNKS (WIDTH / 8)             /* of sixteen bytes, in a key or value */
#define VALUES (KEYS * CHUNKS)         /* where they begin in a slot, behind the keys */
#define SLOT (2 * KEYS * CHUNKS)       /* keys and values that a warp takes at a time */
#define STRIDE (WARPS * KEYS)          /* from one step of a warp to the next */
#define PITCH (WIDTH + 4 * HALVES)     /* floats: no two rows of a store meet in a bank */
#define MATRICES (TALL ? CHUNKS : CHUNKS / 2) /* of weighted values */

#define ALL 0 /* keys of a step are fetched: all of them, */
#define OLD 1 /* those that earlier passes wrote, */
#define NEW 2 /* or the others */

/* Have sixteen bytes come into shared memory; zeros where not `there`. */
__device__ __forceinline__ void fetch(uint4 *to, const half_word *from, bool there) {
    word address = (word)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Wait until no more than `Open` of the groups that this thread closed last are under way. */
template <int Open> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" :: "n"(Open) : "memory");
}

/* Sums of rows by eight columns += sixteen rows by sixteen of the depth, times those by eight columns. */
__device__ __forceinline__ void multiply(float *sum, word a0, word a1, word a2, word a3, word b0, word b1) {
    asm(
#if FLOAT16
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Four matrices of eight rows of sixteen bytes, transposed; each lane names a row. */
__device__ __forceinline__ void load_transposed(word *to, const uint4 *row) {
    word address = (word)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ bool find_work(const Arguments &a, int number, Work &work) {
    if (a.pairs) return read_pair(a, number, work);
    int span = a.members ? __ldcg(a.members + number) : number;
    work.first_row = __ldcg(a.row_offsets + span);
    work.rows = (int)(__ldcg(a.row_offsets + span + 1) - work.first_row);
    work.start = (int)__ldcg(a.starts + span);
    work.slot = __ldcg(a.slots + span);
    work.split = 0, work.shares = 1, work.tile = 0;
    return work.rows > 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) attend_short(const __grid_constant__ Arguments a) {
    extern __shared__ uint4 memory[]; /* [WARPS][AHEAD][SLOT]; behind the loop a warp's sums, float [ROWS][PITCH] */
    __shared__ float2 found[WARPS][ROWS]; /* highest score and sum of weights */
    __shared__ bool merges;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    const int head = a.first_head + blockIdx.x % a.held;
    if (!a.early) wait_for_the_kernel_before();
    Work work;
    if (!find_work(a, blockIdx.x / a.held, work)) {
        if (a.early) wait_for_the_kernel_before();
        return;
    }

    int low, high;
    find_share(a, work, low, high);
    const int old = a.early ? max(work.start, 0) : high; /* keys below it are older */
    low += warp * KEYS;

    /* The table is read by one lane for each key of a step, and handed to those that fetch it. */
    const int *blocks = a.block_table + work.slot * a.table_row;
    auto find_places = [&](int begin) {
        int key = begin + lane % KEYS;
        return key < high ? __ldcg(blocks + key / BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE : 0;
    };
    auto source = [&](const half_word *cache, int row) { return cache + ((wide)row * a.kv_heads + head) * WIDTH; };
    auto fetch_step = [&](uint4 *slot, int begin, int places, int which) {
        auto wanted = [&](int key) { return which == ALL || (key >= old && key < high) == (which == NEW); };
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) { /* of a key, a thread fetches what it will multiply itself */
            int row = tile * 8 + group, key = begin + row;
            const half_word *from = source(a.cache_k, __shfl_sync(~0u, places, row)) + place * 8;
#pragma unroll
            for (int round = 0; round < ROUNDS; round++)
                if (wanted(key)) fetch(slot + (tile * ROUNDS + round) * 32 + lane, from + round * 32, key < high);
        }
#pragma unroll
        for (int part = 0; part < VALUES / 32; part++) { /* chunks of eight values in a row lie in different banks */
            int row = part * (32 / CHUNKS) + lane / CHUNKS, chunk = lane % CHUNKS, key = begin + row;
            const half_word *from = source(a.cache_v, __shfl_sync(~0u, places, row)) + chunk * 8;
            if (wanted(key)) fetch(slot + VALUES + row * CHUNKS + (chunk ^ row % 8), from, key < high);
        }
    };

    uint4 *const own = memory + warp * AHEAD * SLOT;
    int places[AHEAD];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) places[ahead] = find_places(low + ahead * STRIDE);
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        int begin = low + ahead * STRIDE;
        if (begin < high) fetch_step(own + ahead * SLOT, begin, places[ahead], OLD);
        close_group();
    }
    if (a.early) wait_for_the_kernel_before();
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        int begin = low + ahead * STRIDE;
        if (begin < high && min(begin + KEYS, high) > old) fetch_step(own + ahead * SLOT, begin, places[ahead], NEW);
        close_group();
    }
    uint4 query[HALVES][ROUNDS]; /* eight of the depth in a row, as of keys: which is which does not matter */
    int position[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        int m = half * 8 + group, row = m / SHARED;
        const half_word *from = a.q + (work.first_row + row) * a.q_row + (head * SHARED + m % SHARED) * WIDTH + place * 8;
        position[half] = max(work.start + row, 0);
#pragma unroll
        for (int round = 0; round < ROUNDS; round++)
            query[half][round] = row < work.rows ? __ldcg((const uint4 *)(from + round * 32)) : make_uint4(0, 0, 0, 0);
    }

    /* Weighted values, rows by columns where TALL: of each eight columns those of a thread's rows. Eight rows do not fill
    an instruction that way; columns by rows do: of each sixteen columns two, of the rows 2 place and 2 place + 1. */
    float top[HALVES], total[HALVES], mixed[MATRICES][4];
#pragma unroll
    for (int half = 0; half < HALVES; half++) top[half] = FLOOR, total[half] = 0.0f;
#pragma unroll
    for (int i = 0; i < MATRICES; i++) mixed[i][0] = mixed[i][1] = mixed[i][2] = mixed[i][3] = 0.0f;

    uint4 *slot = own;
    int next = find_places(low + AHEAD * STRIDE);
    for (int begin = low; begin < high; begin += STRIDE) {
        wait_for_groups<AHEAD - 1>();
        __syncwarp(); /* values were fetched by other lanes */
        float score[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            score[tile][0] = score[tile][1] = score[tile][2] = score[tile][3] = 0.0f;
#pragma unroll
            for (int round = 0; round < ROUNDS; round++) {
                uint4 key = slot[(tile * ROUNDS + round) * 32 + lane], one = query[0][round];
                uint4 two = TALL ? query[HALVES - 1][round] : make_uint4(0, 0, 0, 0);
                multiply(score[tile], one.x, two.x, one.y, two.y, key.x, key.y);
                multiply(score[tile], one.z, two.z, one.w, two.w, key.z, key.w);
            }
        }
        float fade[2];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            float higher = top[half], sum = 0.0f;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int key = begin + tile * 8 + 2 * place + i;
                    float &one = score[tile][2 * half + i];
                    one = key < high && key <= position[half] ? one * a.scale : -__int_as_float(0x7f800000);
                    higher = fmaxf(higher, one);
                }
            higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
            higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
            fade[half] = power(top[half] - higher);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &one = score[tile][2 * half + i];
                    one = power(one - higher);
                    sum += one;
                }
            total[half] = total[half] * fade[half] + sum; /* of this thread's keys */
            top[half] = higher;
        }
#if !TALL
        fade[1] = __shfl_sync(~0u, fade[0], 8 * place + 4);
        fade[0] = __shfl_sync(~0u, fade[0], 8 * place);
#endif
#pragma unroll
        for (int i = 0; i < MATRICES; i++) {
            mixed[i][0] *= fade[0], mixed[i][1] *= fade[TALL ? 0 : 1];
            mixed[i][2] *= fade[TALL ? 1 : 0], mixed[i][3] *= fade[1];
        }
#pragma unroll
        for (int pair = 0; pair < TILES / 2; pair++) { /* scores lie as the next product wants its rows */
            float *one = score[2 * pair], *two = score[2 * pair + 1];
            word a0 = narrowed(one[0], one[1]), a2 = narrowed(two[0], two[1]);
#if TALL
            word a1 = narrowed(one[2], one[3]), a3 = narrowed(two[2], two[3]);
#endif
            int row = pair * 16 + lane % 16;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                word value[4];
                load_transposed(value, slot + VALUES + row * CHUNKS + (chunk + lane / 16 ^ row % 8));
#if TALL
                multiply(mixed[chunk], a0, a1, a2, a3, value[0], value[1]);
                multiply(mixed[chunk + 1], a0, a1, a2, a3, value[2], value[3]);
#else
                multiply(mixed[chunk / 2], value[0], value[2], value[1], value[3], a0, a2);
#endif
            }
        }
        __syncwarp(); /* all lanes have read the values */
        int coming = begin + AHEAD * STRIDE;
        if (coming < high) fetch_step(slot, coming, next, ALL);
        close_group();
        next = find_places(coming + STRIDE);
        slot += SLOT;
        if (slot == own + AHEAD * SLOT) slot = own;
    }

    wait_for_groups<0>();
    __syncwarp();
    float *sums = (float *)own;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        if (place == 0) found[warp][half * 8 + group] = make_float2(top[half], total[half]);
    }
#pragma unroll
    for (int i = 0; i < MATRICES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float one = mixed[i][2 * half], two = mixed[i][2 * half + 1];
#if TALL
            *(float2 *)(sums + (half * 8 + group) * PITCH + 8 * i + 2 * place) = make_float2(one, two);
#else
            sums[2 * place * PITCH + 16 * i + half * 8 + group] = one;
            sums[(2 * place + 1) * PITCH + 16 * i + half * 8 + group] = two;
#endif
        }
    __syncthreads();

    const int outputs = work.rows * SHARED * COLUMNS;
    int step;
    const wide first = first_partial(a, work, head, step);
    for (int output = threadIdx.x; output < outputs; output += THREADS) {
        int m = output / COLUMNS, column = output % COLUMNS;
        float highest = FLOOR, all = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, found[w][m].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float weight = power(found[w][m].x - highest);
            all += weight * found[w][m].y;
            add(sum, weight, *(const float4 *)((const float *)(memory + w * AHEAD * SLOT) + m * PITCH + 4 * column));
        }
        if (work.shares == 1) {
            write_out(a, work, head, m, column, sum, all);
            continue;
        }
        wide at = first + (wide)work.split * step + m;
        *((float4 *)(a.partial + at * WIDTH) + column) = sum;
        if (column == 0) ((float2 *)a.summary)[at] = make_float2(highest, all);
    }
    if (work.shares == 1) return;
    __syncthreads(); /* all of the block's stores come before its count */
    int *counter = a.counters + work.tile * a.kv_heads + head;
    if (threadIdx.x == 0) merges = count_up(counter) == work.shares - 1;
    __syncthreads();
    if (!merges) return;
    for (int output = threadIdx.x; output < outputs; output += THREADS) {
        int m = output / COLUMNS, column = output % COLUMNS;
        float4 sum;
        float all;
        merge(a, first, step, work.shares, m, column, sum, all);
        write_out(a, work, head, m, column, sum, all);
    }
    if (threadIdx.x == 0) *counter = 0; /* for the next layer */
}
