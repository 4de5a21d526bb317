/* Attention of prompt chunks over a paged context, by Hopper's matrix instructions (wgmma).

A block for each processor goes from tile to tile: it takes the next one as soon as it has read all keys of the last. One
warp has queries, keys and values come into shared memory by the copy engine, STAGES steps of KEYS ahead, also those of
the next tile. Two groups of four warps multiply, 64 rows each. While scores of one step are multiplied, so are weights
and values of the step before; while a group finds its weights, the other one multiplies, since they take turns.

Steps are taken from the last to the first: masked ones come first. A tile has at most TILE rows: query rows times the
heads that share a key head. Scores are in base 2. Compiled for one shape of heads at a time; chunks.py sets the
constants, writes `score` and `mix`, whose instructions have an operand for each sum, and says what the arguments are. */

#define GROUP 128                      /* threads that multiply 64 rows */
#define ROW 64                         /* numbers in 128 bytes */
#define HALVES (WIDTH / ROW)           /* of a query, key or value */
#define BLOCKS (KEYS / BLOCK_SIZE)     /* of the pool, in a step */
#define STEP (KEYS * WIDTH)            /* numbers: keys, or values, of a step */
#define HELD (TILE / SHARED * SHARED)  /* rows that are fetched */
#define SCORES (KEYS / 2)              /* of a thread */
#define SUMS (WIDTH / 2)
#define SHUT -__int_as_float(0x7f800000)

static_assert(TILE == 128 && THREADS == 3 * GROUP, "rows of two groups; the third fetches");
static_assert(WIDTH % ROW == 0 && BLOCK_SIZE % 8 == 0 && BLOCKS <= 32, "whole swizzles; a lane for each block");

struct Job {
    Work work;
    int head;
};

struct Shared {
    address key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], known, taken;
    Job job;
    bool merges;
};

/* -- who fetches --------------------------------------------------------------------------------------------------- */

/* A box of queries: `HALVES` times 128 bytes of each head that shares the key head, of the tile's rows. */
__device__ __forceinline__ void fetch_rows(half_word *to, const Map *map, int number, int head, int row, address *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(number), "r"(head), "r"(row)
                 : "memory");
}

__device__ __forceinline__ void fetch_block(half_word *to, const Map *map, int number, int place, address *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(number), "r"(place) : "memory");
}

/* One step of keys or values: each lane has a block of the pool fetched, which begins at `place`. */
__device__ __forceinline__ void fetch_step(
    half_word *memory, const Map *map, address *full, address *empty, int turn, int head, int place, int lane) {
    const int stage = turn % STAGES;
    await(empty + stage, turn / STAGES & 1 ^ 1);
    if (lane == 0) expect_bytes(full + stage, STEP * 2);
    __syncwarp();
    if (lane >= BLOCKS) return;
    half_word *to = memory + stage * STEP + lane * BLOCK_SIZE * ROW;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
        fetch_block(to + half * KEYS * ROW, map, head * WIDTH + half * ROW, place, full + stage);
}

__device__ __forceinline__ void fetch_all(
    const Map &q, const Map &k, const Map &v, const Arguments &a, half_word *queries, half_word *keys, half_word *values,
    Shared &shared, int lane) {
    int key_turn = 0, value_turn = 0;
    for (int item = blockIdx.x, tiles = 0;; tiles++) {
        int next = 0;
        if (lane == 0) next = atomicAdd(a.tickets, 1) + gridDim.x; /* the answer comes while this one is fetched */
        Job job;
        job.head = a.first_head + item % a.held;
        const bool there = item < a.items && read_pair(a, item / a.held, job.work);
        int low = 0, high = 0;
        if (there) find_share(a, job.work, low, high);
        const int *blocks = a.block_table + (there ? job.work.slot * a.table_row : 0);
        const auto place_of = [&](int step) { /* beyond the pool there are zeros */
            const int key = low + step * KEYS + lane * BLOCK_SIZE;
            return step >= 0 && lane < BLOCKS && key < high ? __ldg(blocks + key / BLOCK_SIZE) * BLOCK_SIZE : a.places;
        };
        const int steps = (high - low + KEYS - 1) / KEYS;
        int here = place_of(steps - 1), coming = place_of(steps - 2);
        if (steps > 0) fetch_step(keys, &k, shared.key_full, shared.key_empty, key_turn++, job.head, here, lane);
        await(&shared.taken, tiles & 1 ^ 1);
        if (lane == 0) {
            if (!there) job.work.shares = 0;
            shared.job = job;
            if (there) {
                expect_bytes(&shared.known, HELD * WIDTH * 2);
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    fetch_rows(queries + half * TILE * ROW, &q, half * ROW, job.head * SHARED, (int)job.work.first_row,
                               &shared.known);
            } else {
                arrive(&shared.known);
            }
        }
        __syncwarp();
        if (!there) break;
        for (int step = steps - 1; step >= 0; step--) {
            const int later = place_of(step - 2);
            if (step) fetch_step(keys, &k, shared.key_full, shared.key_empty, key_turn++, job.head, coming, lane);
            fetch_step(values, &v, shared.value_full, shared.value_empty, value_turn++, job.head, here, lane);
            here = coming, coming = later;
        }
        item = __shfl_sync(~0u, next, 0);
    }
    if (lane == 0 && count_up(a.tickets + 1) == gridDim.x - 1) a.tickets[0] = a.tickets[1] = 0; /* for the next layer */
}

/* -- who multiplies ------------------------------------------------------------------------------------------------ */

/* Where values lie for wgmma, whose product reads them across: 16 keys are two times eight rows of 128 bytes. */
__device__ __forceinline__ address described_across(const half_word *matrix) {
    return (address)((shared_address(matrix) & 0x3FFFF) >> 4) | (address)(KEYS * ROW * 2 / 16) << 16 | (address)64 << 32 |
           (address)1 << 62;
}

__device__ __forceinline__ void open_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

/* Sums that were waited for: nothing that reads them comes before this. */
template <int Count> __device__ __forceinline__ void hold(float (&numbers)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(numbers[i]) :: "memory");
}

/* All threads that multiply; those of one group; and turns: a group waits for its own, and gives it to the other. */
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" :: "r"(2 + group) : "memory"); }
__device__ __forceinline__ void take_turn(int group) { asm volatile("bar.sync %0, 256;" :: "r"(4 + group) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" :: "r"(5 - group) : "memory"); }

__device__ __forceinline__ void multiply_keys(float *score_of, const half_word *queries, const half_word *keys) {
    const address left = described(queries), right = described(keys);
#pragma unroll
    for (int part = 0; part < WIDTH / 16; part++) {
        const int half = part / 4, within = part % 4;
        score(score_of, left + half * (TILE * ROW * 2 / 16) + 2 * within, right + half * (KEYS * ROW * 2 / 16) + 2 * within,
              part > 0);
    }
    close_products();
}

__device__ __forceinline__ void multiply_values(float *mixed, const word *weights, const half_word *values) {
    const address right = described_across(values);
#pragma unroll
    for (int part = 0; part < KEYS / 16; part++) mix(mixed, weights + 4 * part, right + part * (16 * ROW * 2 / 16), 1);
    close_products();
}

__device__ __forceinline__ void attend_all(
    const Arguments &a, const half_word *queries, const half_word *keys, half_word *values, Shared &shared) {
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), group = warp / 4, lane = thread % 32;
    const int column = lane % 4 * 2;
    int key_turn = 0, value_turn = 0;
    if (group == 1) give_turn(1); /* the first one is the other group's */
    for (int tiles = 0;; tiles++) {
        await(&shared.known, tiles & 1);
        const Job job = shared.job;
        const Work &work = job.work;
        if (!work.shares) return;
        int low, high;
        find_share(a, work, low, high);
        const int steps = (high - low + KEYS - 1) / KEYS;
        const half_word *own = queries + group * (TILE / 2) * ROW;
        const int open = min(max(work.start + group * (TILE / 2) / SHARED, 0) + 1, high); /* seen by all of its rows */
        int seen[2]; /* keys that a row of the thread's sees, less its column */
        float top[2], total[2], mixed[SUMS], score_of[SCORES];
        word weights[SCORES / 2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int m = group * (TILE / 2) + warp % 4 * 16 + half * 8 + lane / 4;
            seen[half] = min(max(work.start + m / SHARED, 0) + 1, high) - column;
            top[half] = FLOOR, total[half] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) mixed[i] = 0.0f;

        const auto find_weights = [&](int begin, float *fade) {
            if (begin + KEYS > open) {
#pragma unroll
                for (int i = 0; i < SCORES; i++)
                    if (begin + i / 4 * 8 + i % 2 >= seen[i % 4 / 2]) score_of[i] = SHUT;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float higher = top[half], sum = 0.0f;
#pragma unroll
                for (int i = 2 * half; i < SCORES; i += 4) higher = fmaxf(higher, fmaxf(score_of[i], score_of[i + 1]));
                higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
                higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
                const float less = -higher * a.scale;
                fade[half] = power((top[half] - higher) * a.scale);
                top[half] = higher;
#pragma unroll
                for (int i = 2 * half; i < SCORES; i += 4) {
                    score_of[i] = power(fmaf(score_of[i], a.scale, less));
                    score_of[i + 1] = power(fmaf(score_of[i + 1], a.scale, less));
                    sum += score_of[i] + score_of[i + 1];
                }
                total[half] = total[half] * fade[half] + sum; /* of this thread's keys */
            }
        };
        const auto narrow = [&] { /* scores lie as the next product wants its rows */
#pragma unroll
            for (int i = 0; i < SCORES / 2; i++) weights[i] = narrowed(score_of[2 * i], score_of[2 * i + 1]);
        };
        const auto release = [&](address *barrier) {
            if (lane == 0) arrive(barrier);
        };

        float fade[2];
        await(shared.key_full + key_turn % STAGES, key_turn / STAGES & 1);
        open_registers();
        multiply_keys(score_of, own, keys + key_turn % STAGES * STEP);
        wait_for_products();
        hold(score_of);
        release(shared.key_empty + key_turn % STAGES);
        key_turn++;
        find_weights(low + (steps - 1) * KEYS, fade);
        narrow();
        if (high % BLOCK_SIZE) { /* in the last block what lies behind the context is anybody's */
            const int stage = value_turn % STAGES, first = (high - low - 1) % KEYS + 1, count = BLOCK_SIZE - high % BLOCK_SIZE;
            await(shared.value_full + stage, value_turn / STAGES & 1);
            for (int i = thread % GROUP; i < count * HALVES * 8; i += GROUP) {
                half_word *row = values + stage * STEP + i / (8 * count) * KEYS * ROW + (first + i / 8 % count) * ROW;
                ((uint4 *)row)[i % 8] = make_uint4(0, 0, 0, 0);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet_group(group);
        }
        for (int step = steps - 2; step >= 0; step--) {
            const int stage = key_turn % STAGES, before = value_turn % STAGES;
            await(shared.key_full + stage, key_turn / STAGES & 1);
            take_turn(group);
            open_registers();
            multiply_keys(score_of, own, keys + stage * STEP);
            await(shared.value_full + before, value_turn / STAGES & 1);
            open_registers();
            multiply_values(mixed, weights, values + before * STEP);
            give_turn(group);
            wait_for_products();
            hold(score_of), hold(mixed);
            release(shared.key_empty + stage), release(shared.value_empty + before);
            key_turn++, value_turn++;
            find_weights(low + step * KEYS, fade);
            narrow();
#pragma unroll
            for (int i = 0; i < SUMS; i++) mixed[i] *= fade[i % 4 / 2];
        }
        release(&shared.taken);
        await(shared.value_full + value_turn % STAGES, value_turn / STAGES & 1);
        open_registers();
        multiply_values(mixed, weights, values + value_turn % STAGES * STEP);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] += __shfl_xor_sync(~0u, total[half], 1);
            total[half] += __shfl_xor_sync(~0u, total[half], 2);
        }
        wait_for_products();
        hold(mixed);
        release(shared.value_empty + value_turn % STAGES);
        value_turn++;

        int step;
        const int rows = work.rows * SHARED;
        const wide first = first_partial(a, work, job.head, step);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int m = group * (TILE / 2) + warp % 4 * 16 + half * 8 + lane / 4;
            if (m >= rows) continue;
            if (work.shares == 1) {
                const float by = 1.0f / fmaxf(total[half], 1e-30f); /* void rows may have seen nothing */
                const wide place = ((work.first_row + m / SHARED) * a.kv_heads + job.head) * SHARED + m % SHARED;
                word *to = (word *)(a.out + place * WIDTH + column);
#pragma unroll
                for (int i = 0; i < WIDTH / 8; i++)
                    to[4 * i] = narrowed(mixed[4 * i + 2 * half] * by, mixed[4 * i + 2 * half + 1] * by);
                continue;
            }
            const wide at = first + (wide)work.split * step + m;
            float *to = a.partial + at * WIDTH + column;
#pragma unroll
            for (int i = 0; i < WIDTH / 8; i++)
                *(float2 *)(to + 8 * i) = make_float2(mixed[4 * i + 2 * half], mixed[4 * i + 2 * half + 1]);
            if (column == 0) ((float2 *)a.summary)[at] = make_float2(top[half] * a.scale, total[half]);
        }
        if (work.shares == 1) continue;
        meet(); /* all of the block's stores come before its count */
        int *counter = a.counters + work.tile * a.kv_heads + job.head;
        if (thread == 0) shared.merges = count_up(counter) == work.shares - 1;
        meet();
        if (!shared.merges) continue;
        for (int output = thread; output < rows * COLUMNS; output += 2 * GROUP) {
            float4 sum;
            float all;
            merge(a, first, step, work.shares, output / COLUMNS, output % COLUMNS, sum, all);
            write_out(a, work, job.head, output / COLUMNS, output % COLUMNS, sum, all);
        }
        if (thread == 0) *counter = 0; /* for the next layer */
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_chunks(const __grid_constant__ Map q, const __grid_constant__ Map k, const __grid_constant__ Map v,
              const __grid_constant__ Arguments a) {
    extern __shared__ half_word memory[]; /* queries, keys, values; swizzles begin anew every 1,024 bytes */
    __shared__ Shared shared;
    half_word *const queries = memory + (1024 - (shared_address(memory) & 1023)) % 1024 / 2;
    half_word *const keys = queries + TILE * WIDTH, *const values = keys + STAGES * STEP;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(&q) : "memory");
        asm volatile("prefetch.tensormap [%0];" :: "l"(&k) : "memory");
        asm volatile("prefetch.tensormap [%0];" :: "l"(&v) : "memory");
        for (int stage = 0; stage < STAGES; stage++) {
            expect(shared.key_full + stage, 1);
            expect(shared.value_full + stage, 1);
            expect(shared.key_empty + stage, 2 * GROUP / 32);
            expect(shared.value_empty + stage, 2 * GROUP / 32);
        }
        expect(&shared.known, 1);
        expect(&shared.taken, 2 * GROUP / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_the_kernel_before();
    if (threadIdx.x >= 2 * GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x / 32 == 2 * GROUP / 32) fetch_all(q, k, v, a, queries, keys, values, shared, threadIdx.x % 32);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        attend_all(a, queries, keys, values, shared);
    }
}
