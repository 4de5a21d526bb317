/* What stands before products in CUDA C++: numbers of 16 bits as float32, and gates. FLOAT16: float16, not bfloat16. */

typedef unsigned int word;
typedef unsigned short half_word;
typedef long long wide;

__device__ __forceinline__ float widened(half_word bits) {
#if FLOAT16
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float((word)bits << 16);
#endif
}

__device__ __forceinline__ half_word narrowed(float value) {
    half_word bits;
#if FLOAT16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

__device__ __forceinline__ float rounded(float value) { return widened(narrowed(value)); }

__device__ __forceinline__ float acted(float gate) {
#if SILU
    float small = __expf(-fabsf(gate));
    return gate * (gate >= 0.0f ? 1.0f : small) / (1.0f + small);
#else
    float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    float small = __expf(-2.0f * fabsf(inner));
    return gate * (inner >= 0.0f ? 1.0f : small) / (1.0f + small); /* (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)) */
#endif
}
