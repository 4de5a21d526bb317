/* What kernels for Hopper share: barriers in shared memory, the copy engine, and matrices as wgmma reads them. */

typedef unsigned int word;
typedef unsigned short half_word;
typedef unsigned long long address;

struct alignas(64) Map { address words[16]; }; /* CUtensorMap */

__device__ __forceinline__ word shared_address(const void *p) { return (word)__cvta_generic_to_shared(p); }

/* -- barriers in shared memory ------------------------------------------------------------------------------------- */

__device__ __forceinline__ void expect(address *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(address *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(address *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void await(address *barrier, int phase) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\nbra again;\nover:\n}"
                 :: "r"(shared_address(barrier)), "r"(phase) : "memory");
}

/* -- the copy engine ----------------------------------------------------------------------------------------------- */

/* A box of a matrix from column k and row `row` on; its rows lie 128 bytes apart, in the order that wgmma reads. */
__device__ __forceinline__ void fetch(half_word *to, const Map *map, int k, int row, address *barrier, address policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4}], [%2], %5;"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "l"(policy)
                 : "memory");
}

/* Where a matrix of rows of 128 bytes lies in shared memory, for wgmma: swizzled, eight rows to 1,024 bytes. */
__device__ __forceinline__ address described(const half_word *matrix) {
    return (address)((shared_address(matrix) & 0x3FFFF) >> 4) | (address)1 << 16 | (address)64 << 32 | (address)1 << 62;
}
