/* Sampling: where a top_p cut lies, and the noise of coupled draws. Included by native.c. */

/* ---- top_p -------------------------------------------------------------------------------------------------------- */

enum { ONE = 0x3F800000, LOW_BITS = 15, LOWER = 1 << LOW_BITS, UPPER = (ONE >> LOW_BITS) + 1 }; /* bits of a float */

static int64_t mass_of(float weight) { return (int64_t)(weight * 0x1p40f); }

static uint32_t bits_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits;
}

/* The first bucket that cannot be dropped whole when all below it are; what of `spare` is left for its inside. */
static uint32_t bucket_of(const int64_t *held, uint32_t buckets, int64_t *spare) {
    int64_t below = 0;
    for (uint32_t b = 0; b < buckets; b++) {
        if (below + held[b] > *spare) { *spare -= below; return b; }
        below += held[b];
    }
    *spare -= below - held[buckets - 1];
    return buckets - 1;
}

/* Largest threshold such that the weights of a row from there on sum to its share at least: `histogram_threshold` of
 * sampling/cuts.py. `held` has room for UPPER + LOWER sums. */
static float top_p_threshold(const float *weight, ptrdiff_t vocab, float share, int64_t *held) {
    int64_t *inside = held + UPPER, total = 0;
    memset(held, 0, sizeof(int64_t) * (UPPER + LOWER));
    for (ptrdiff_t i = 0; i < vocab; i++) {
        const uint32_t bits = bits_of(weight[i]);
        if (bits > ONE) continue; /* no weight is, but for NaN */
        const int64_t mass = mass_of(weight[i]);
        held[bits >> LOW_BITS] += mass;
        total += mass;
    }
    const int64_t asked = (int64_t)ceil((double)total * (double)share), needed = asked > 1 ? asked : 1;
    int64_t spare = total > needed ? total - needed : 0;
    const uint32_t upper = bucket_of(held, UPPER, &spare);
    for (ptrdiff_t i = 0; i < vocab; i++) {
        const uint32_t bits = bits_of(weight[i]);
        if (bits >> LOW_BITS == upper) inside[bits & (LOWER - 1)] += mass_of(weight[i]);
    }
    const uint32_t bits = upper << LOW_BITS | bucket_of(inside, LOWER, &spare);
    float threshold;
    memcpy(&threshold, &bits, sizeof bits);
    return threshold;
}

/* Of each row of weight [n, vocab] in [0, 1], dense. Returns 1 where memory is short. */
EXPORT int vpd_top_p(const float *weight, ptrdiff_t n, ptrdiff_t vocab, const float *share, float *threshold,
                     int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 1 && n * vocab > 65536)
    for (ptrdiff_t i = 0; i < n; i++) {
        int64_t *held = malloc(sizeof(int64_t) * (UPPER + LOWER));
        if (held) threshold[i] = top_p_threshold(weight + i * vocab, vocab, share[i], held);
        else failed = 1;
        free(held);
    }
    return failed;
}

/* ---- noise -------------------------------------------------------------------------------------------------------- */

enum { GROUPS = 64, ROUNDS = 10 }; /* counters made side by side; each gives words for four tokens */

/* Uniforms [n, 4 * groups] in (-1, 0) of Philox words, of which `gumbel` in sampling/philox.py takes its logarithms. */
EXPORT void vpd_noise(const int64_t *seeds, const int64_t *choices, const int64_t *indices, ptrdiff_t n,
                      ptrdiff_t groups, int role, float *noise, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1 && n * groups > 4096)
    for (ptrdiff_t i = 0; i < n; i++) {
        for (ptrdiff_t first = 0; first < groups; first += GROUPS) {
            uint32_t c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS];
            uint32_t k0 = (uint32_t)seeds[i], k1 = (uint32_t)((uint64_t)seeds[i] >> 32);
            for (int g = 0; g < GROUPS; g++) {
                c0[g] = (uint32_t)indices[i], c1[g] = (uint32_t)choices[i];
                c2[g] = (uint32_t)(first + g), c3[g] = (uint32_t)role;
            }
            for (int round = 0; round < ROUNDS; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
                for (int g = 0; g < GROUPS; g++) {
                    const uint64_t low = (uint64_t)c0[g] * 0xD2511F53u, high = (uint64_t)c2[g] * 0xCD9E8D57u;
                    c0[g] = (uint32_t)(high >> 32) ^ c1[g] ^ k0, c2[g] = (uint32_t)(low >> 32) ^ c3[g] ^ k1;
                    c1[g] = (uint32_t)high, c3[g] = (uint32_t)low;
                }
            }
            const ptrdiff_t there = groups - first < GROUPS ? groups - first : GROUPS;
            float *out = noise + (i * groups + first) * 4;
            for (ptrdiff_t g = 0; g < there; g++) {
                const uint32_t words[4] = {c0[g], c1[g], c2[g], c3[g]};
                for (int lane = 0; lane < 4; lane++) {
                    const float u = ((float)words[lane] + 0.5f) * -0x1p-32f;
                    out[4 * g + lane] = u > -(1.0f - 0x1p-24f) ? u : -(1.0f - 0x1p-24f);
                }
            }
        }
    }
}
