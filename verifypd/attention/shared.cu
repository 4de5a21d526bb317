/* What attention kernels in CUDA C++ share: their arguments, what a block does, and the merging of splits.

Scores are in base 2. */

#define COLUMNS (WIDTH / 4) /* of four floats */
#define MERGED 8            /* splits that are read at once */
#define PAIR 8              /* numbers of a pair */
#define FLOOR -1e30f        /* stands for -inf where a difference is taken */

typedef unsigned int word;
typedef unsigned short half_word;
typedef long long wide;

struct Arguments {
    const half_word *q, *cache_k, *cache_v;
    half_word *out;
    float *partial, *summary;
    const int *pairs;
    int *counters, *tickets;
    const int *members;
    const wide *row_offsets, *slots, *starts;
    const int *block_table;
    wide q_row, table_row;
    int kv_heads, first_head, held, splits, tile_rows, block_n, early, items, places;
    float scale;
};

/* What a block does: see `attend_tile` in triton_kernels.py. */
struct Work {
    wide first_row, slot;
    int rows, start, split, shares, tile;
};

__device__ __forceinline__ void wait_for_the_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Two numbers as they are stored, the first in the lower half. */
__device__ __forceinline__ word narrowed(float first, float second) {
    word both;
#if FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
    return both;
}

__device__ __forceinline__ float power(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

/* The count before; what the block wrote before is seen by whoever counts after it. */
__device__ __forceinline__ int count_up(int *counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/* The tile and split of a pair; false: there is no such pair, nor any behind it. */
__device__ __forceinline__ bool read_pair(const Arguments &a, int number, Work &work) {
    const int4 *pair = (const int4 *)(a.pairs + number * PAIR);
    int4 one = __ldcg(pair), two = __ldcg(pair + 1);
    work.first_row = one.x, work.rows = one.y, work.start = one.z, work.slot = one.w;
    work.split = two.y, work.shares = two.z, work.tile = two.w;
    return work.shares > 0;
}

/* Keys that a block reads: its share of what rows of the tile may see, one block_n or more, since tiling.py gives no share
fewer keys. */
__device__ __forceinline__ void find_share(const Arguments &a, const Work &work, int &low, int &high) {
    low = 0, high = max(work.start + work.rows, 1);
    if (work.shares > 1) {
        const int blocks = (high + a.block_n - 1) / a.block_n;
        low = work.split * blocks / work.shares * a.block_n;
        high = min(high, (work.split + 1) * blocks / work.shares * a.block_n);
    }
}

/* Where what a tile's splits found begins, and how far it is from one split to the next. */
__device__ __forceinline__ wide first_partial(const Arguments &a, const Work &work, int head, int &step) {
    step = a.held * a.tile_rows * SHARED;
    return (wide)work.tile * a.splits * step + (wide)(head - a.first_head) * a.tile_rows * SHARED;
}

__device__ __forceinline__ void add(float4 &sum, float weight, float4 value) {
    sum.x += weight * value.x, sum.y += weight * value.y, sum.z += weight * value.z, sum.w += weight * value.w;
}

__device__ __forceinline__ void write_out(const Arguments &a, const Work &work, int head, int m, int column,
                                          float4 mixed, float total) {
    float by = 1.0f / fmaxf(total, 1e-30f); /* void rows may have seen nothing */
    wide place = ((work.first_row + m / SHARED) * a.kv_heads + head) * SHARED + m % SHARED;
    *(uint2 *)(a.out + place * WIDTH + 4 * column) =
        make_uint2(narrowed(mixed.x * by, mixed.y * by), narrowed(mixed.z * by, mixed.w * by));
}

/* What all splits of a tile found, of four columns of a row; in order, whoever merges. */
__device__ __forceinline__ void merge(const Arguments &a, wide first, int step, int shares, int m, int column,
                                      float4 &mixed, float &total) {
    float top = FLOOR;
    mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f), total = 0.0f;
    for (int begin = 0; begin < shares; begin += MERGED) {
        float4 parts[MERGED];
        float2 found[MERGED];
        float higher = top;
#pragma unroll
        for (int i = 0; i < MERGED; i++) {
            wide at = first + (wide)min(begin + i, shares - 1) * step + m;
            parts[i] = __ldcg((const float4 *)(a.partial + at * WIDTH) + column);
            found[i] = __ldcg((const float2 *)a.summary + at);
        }
#pragma unroll
        for (int i = 0; i < MERGED; i++) higher = fmaxf(higher, found[i].x);
        float fade = power(top - higher);
        mixed.x *= fade, mixed.y *= fade, mixed.z *= fade, mixed.w *= fade, total *= fade;
#pragma unroll
        for (int i = 0; i < MERGED; i++) {
            float weight = begin + i < shares ? power(found[i].x - higher) : 0.0f;
            add(mixed, weight, parts[i]);
            total += weight * found[i].y;
        }
        top = higher;
    }
}
