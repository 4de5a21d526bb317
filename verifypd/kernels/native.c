/* CPU kernels: norms, gated activations, rotary embedding, paged rows, and the layers of a whole pass; the headers hold
 * linear layers, attention, verdicts, sampling and draft heads.
 *
 * Portable C with GCC/Clang vector extensions; the vector width follows the compiler's target. Knows raw pointers and
 * strides (in elements) only; callers own every buffer and have checked shapes and dtypes.
 *
 * Every result of one row is summed in an order that depends on nothing but that row and the weights: one vector
 * accumulator per dot product, lanes folded at the end, or one lane of it (panels), whatever the tile. So results do not
 * depend, to the bit, on how many rows a call has or on the number of threads.
 */
#include "native_vectors.h"
#include "native_linear.h"

/* ---- norms, gates, rotation ------------------------------------------------------------------------------------ */

INLINE vf load_any(const void *p, int type, ptrdiff_t i) {
    if (type == F32) return load_f32((const float *)p + i);
    if (type == BF16) return load_bf16((const bf16 *)p + i);
    return load_f16((const f16 *)p + i);
}

INLINE void norm_row(const int type, const float *x, const float *r, float *total, const void *w, float *y,
                     ptrdiff_t H, float eps, float offset) {
    vf acc = splat(0.0f);
    ptrdiff_t i = 0;
    float tail = 0.0f;
    if (r) {
        for (; i + VL <= H; i += VL) {
            vf v = load_f32(x + i) + load_f32(r + i);
            store_f32(total + i, v);
            acc = fused(v, v, acc);
        }
        for (; i < H; i++) { total[i] = x[i] + r[i]; tail += total[i] * total[i]; }
        x = total;
    } else {
        for (; i + VL <= H; i += VL) { vf v = load_f32(x + i); acc = fused(v, v, acc); }
        for (; i < H; i++) tail += x[i] * x[i];
    }
    float s = 1.0f / sqrtf((sum(acc) + tail) / (float)H + eps);
    vf vs = splat(s), vo = splat(offset);
    for (i = 0; i + VL <= H; i += VL) store_f32(y + i, load_f32(x + i) * vs * (load_any(w, type, i) + vo));
    for (; i < H; i++) y[i] = x[i] * s * (bias_at(w, type, i) + offset);
}

/* y = norm(x + residual) * (weight + offset), total = x + residual; residual and total may be NULL. */
EXPORT void vpd_norm(const float *x, ptrdiff_t xs, const float *residual, float *total, const void *w, int type,
                     float *y, ptrdiff_t n, ptrdiff_t H, float eps, float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * H > 65536)
    for (ptrdiff_t i = 0; i < n; i++) {
        const float *r = residual ? residual + i * H : NULL;
        float *t = total ? total + i * H : NULL;
        if (type == F32) norm_row(F32, x + i * xs, r, t, w, y + i * H, H, eps, offset);
        else if (type == BF16) norm_row(BF16, x + i * xs, r, t, w, y + i * H, H, eps, offset);
        else norm_row(F16, x + i * xs, r, t, w, y + i * H, H, eps, offset);
    }
}

INLINE vf gate(const int gelu, vf g) {
    if (gelu) {
        vf inner = splat(2 * 0.7978845608028654f) * (g + splat(0.044715f) * g * g * g);
        return g / (splat(1.0f) + vexp(-inner)); /* (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), without cancellation */
    }
    return g / (splat(1.0f) + vexp(-g));
}

INLINE void gated_row(const int gelu, const float *g, const float *u, float *y, ptrdiff_t I) {
    ptrdiff_t i = 0;
    for (; i + VL <= I; i += VL) store_f32(y + i, gate(gelu, load_f32(g + i)) * load_f32(u + i));
    if (i < I) {
        vf v = splat(0.0f);
        for (ptrdiff_t j = i; j < I; j++) v[j - i] = g[j];
        v = gate(gelu, v);
        for (ptrdiff_t j = i; j < I; j++) y[j] = v[j - i] * u[j];
    }
}

EXPORT void vpd_gated(const float *x, ptrdiff_t xs, float *y, ptrdiff_t n, ptrdiff_t I, int gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * I > 16384)
    for (ptrdiff_t i = 0; i < n; i++) {
        if (gelu) gated_row(1, x + i * xs, x + i * xs + I, y + i * I, I);
        else gated_row(0, x + i * xs, x + i * xs + I, y + i * I, I);
    }
}

INLINE void rotate_row(float *x, const float *c, const float *s, ptrdiff_t half) {
    ptrdiff_t i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load_f32(x + i), b = load_f32(x + half + i), vc = load_f32(c + i), vs = load_f32(s + i);
        store_f32(x + i, a * vc - b * vs);
        store_f32(x + half + i, b * vc + a * vs);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * c[i] - b * s[i];
        x[half + i] = b * c[i] + a * s[i];
    }
}

EXPORT void vpd_rotate(float *q, ptrdiff_t qs, ptrdiff_t Hq, float *k, ptrdiff_t ks, ptrdiff_t Hk, const int64_t *pos,
                       const float *cos, const float *sin, ptrdiff_t n, ptrdiff_t D, ptrdiff_t half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * (Hq + Hk) * D > 65536)
    for (ptrdiff_t i = 0; i < n; i++) {
        const float *c = cos + pos[i] * half, *s = sin + pos[i] * half;
        for (ptrdiff_t h = 0; h < Hq; h++) rotate_row(q + i * qs + h * D, c, s, half);
        for (ptrdiff_t h = 0; h < Hk; h++) rotate_row(k + i * ks + h * D, c, s, half);
    }
}

/* ---- rows of a paged cache ------------------------------------------------------------------------------------- */

/* Row i is entry within[i] of a span that begins at starts[row_span[i]] of its slot: where that is in the text and in
 * the cache. Before the text begins: at position 0, and in the null block, as is what lies before first[slot] (NULL: 0).
 * Returns 1 where the table has no such position. */
EXPORT int vpd_positions(const int64_t *row_span, const int64_t *within, const int64_t *slots, ptrdiff_t all_slots,
                         const int64_t *starts, ptrdiff_t blocks, const int32_t *table, ptrdiff_t table_stride,
                         ptrdiff_t block_size, const int64_t *first, ptrdiff_t n, int64_t *positions,
                         int64_t *write_index) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t span = row_span[i], at = starts[span] + within[i], position = at < 0 ? 0 : at;
        const int64_t slot = slots[span], index = position / block_size;
        if (slot < 0 || slot >= all_slots || index >= blocks) return 1;
        positions[i] = position;
        const int none = at < (first ? first[slot] : 0);
        write_index[i] = none ? 0 : table[slot * table_stride + index] * (int64_t)block_size + position % block_size;
    }
    return 0;
}

/* The same for spans that begin at the last of the lengths[slot] tokens of their slots; their starts come out too. */
EXPORT int vpd_decode_positions(const int64_t *row_span, const int64_t *within, const int64_t *slots,
                                ptrdiff_t all_slots, const int64_t *lengths, ptrdiff_t spans, ptrdiff_t blocks,
                                const int32_t *table, ptrdiff_t table_stride, ptrdiff_t block_size,
                                const int64_t *first, ptrdiff_t n, int64_t *starts, int64_t *positions,
                                int64_t *write_index) {
    for (ptrdiff_t i = 0; i < spans; i++) {
        if (slots[i] < 0 || slots[i] >= all_slots) return 1;
        starts[i] = lengths[slots[i]] - 1;
    }
    return vpd_positions(row_span, within, slots, all_slots, starts, blocks, table, table_stride, block_size, first, n,
                         positions, write_index);
}

/* Tokens of such a pass: the last confirmed one of each span, then its drafts. Returns 1 where a row has none. */
EXPORT int vpd_ids(const int64_t *row_span, const int64_t *slots, const int64_t *starts, const int64_t *positions,
                   const int64_t *tokens, ptrdiff_t tokens_stride, const int64_t *drafts, ptrdiff_t drafts_stride,
                   ptrdiff_t n, int64_t *ids) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t slot = slots[row_span[i]], depth = positions[i] - starts[row_span[i]];
        if (positions[i] >= tokens_stride + drafts_stride || depth > drafts_stride) return 1;
        if (depth <= 0 && positions[i] >= tokens_stride) return 1;
        ids[i] = depth > 0 ? drafts[slot * drafts_stride + depth - 1] : tokens[slot * tokens_stride + positions[i]];
    }
    return 0;
}

/* Row i goes where the cache holds position positions[i] of slot slots[row_span[i]]; a void row, which writes its keys to
 * index 0, goes nowhere. */
EXPORT void vpd_keep(float *data, const float *rows, ptrdiff_t width, const int32_t *table, ptrdiff_t table_stride,
                     ptrdiff_t block_size, const int64_t *slots, const int64_t *row_span, const int64_t *positions,
                     const int64_t *write_index, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) {
        if (!write_index[i]) continue;
        const int64_t at = positions[i], block = table[slots[row_span[i]] * table_stride + at / block_size];
        memcpy(data + (block * block_size + at % block_size) * width, rows + i * width, sizeof(float) * (size_t)width);
    }
}

#include "native_attention.h"
#include "native_tokens.h"
#include "native_sampling.h"

/* ---- decoder layers --------------------------------------------------------------------------------------------- */

/* The layers of a pass in one call: from a caller in Python each of their operations costs 20 us beside its work, since
 * the weights that stream by leave it cold caches. Nothing is computed here but by the functions above, in the order in
 * which the models call them, so results are the same to the bit. The structs are laid out as in models/native.py. */

typedef struct { const void *w; int64_t type; } vector_weight; /* w NULL: there is none */
typedef struct { const void *w; const float *scale; ptrdiff_t out, K; int64_t type; vector_weight bias; } matrix_weight;
typedef struct {
    matrix_weight qkv, output, gate_up, down;
    vector_weight q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm, next_norm;
    const float *cos, *sin;
    ptrdiff_t window;
} layer_weights;
typedef struct {
    ptrdiff_t H, I, Hq, Hk, D, half; /* half: columns of the rotary tables */
    int64_t gelu;
    float eps, offset, scale, softcap;
    vector_weight first_norm;
} layer_shape;

static int multiply(const float *x, ptrdiff_t n, const matrix_weight *m, float *y, int threads) {
    return vpd_linear(x, m->K, n, m->w, (int)m->type, m->scale, m->bias.w, (int)m->bias.type, y, m->K, m->out, threads);
}

static void normed(const float *x, const float *residual, float *total, const vector_weight *w, const layer_shape *s,
                   float *y, ptrdiff_t n, int threads) {
    vpd_norm(x, s->H, residual, total, w->w, (int)w->type, y, n, s->H, s->eps, s->offset, threads);
}

/* Each of a row's heads is normed where it lies. */
static void normed_heads(float *x, ptrdiff_t xs, ptrdiff_t heads, const vector_weight *w, const layer_shape *s,
                         ptrdiff_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * heads * s->D > 65536)
    for (ptrdiff_t i = 0; i < n; i++)
        vpd_norm(x + i * xs, s->D, NULL, NULL, w->w, (int)w->type, x + i * xs, heads, s->D, s->eps, s->offset, 1);
}

/* residual [n, H] in; the residual stream behind the last layer and, normed, x out, both [n, H]. captures: a place for
 * the stream behind each layer, or 0. scratch: n * vpd_scratch(shape) floats. cache: the layers' keys and, value_bytes behind them,
 * values; scales: [count, 2, Hk] of e4m3. Returns 1 where memory is short. */
EXPORT int vpd_layers(const layer_weights *layers, ptrdiff_t count, const layer_shape *s, const float *residual,
                      float *stream, float *x, const int64_t *captures, float *scratch, const int64_t *positions,
                      char *cache, ptrdiff_t layer_bytes, ptrdiff_t value_bytes, int type, const float *scales,
                      const int64_t *write_index, const int64_t *offsets, const int64_t *slots, const int64_t *starts, const int32_t *table,
                      ptrdiff_t table_stride, ptrdiff_t block_size, const int64_t *begins, ptrdiff_t n,
                      ptrdiff_t spans, int threads) {
    const ptrdiff_t q_width = s->Hq * s->D, width = q_width + 2 * s->Hk * s->D;
    float *added = scratch, *gated = added + n * s->H, *gate_up = gated + n * s->I;
    float *qkv = gate_up, *mixed = qkv + n * width; /* done with when the MLP begins */
    normed(residual, NULL, NULL, &s->first_norm, s, x, n, threads);
    for (ptrdiff_t i = 0; i < count; i++, cache += layer_bytes) {
        const layer_weights *l = layers + i;
        if (multiply(x, n, &l->qkv, qkv, threads)) return 1;
        if (l->q_norm.w) {
            normed_heads(qkv, width, s->Hq, &l->q_norm, s, n, threads);
            normed_heads(qkv + q_width, width, s->Hk, &l->k_norm, s, n, threads);
        }
        float *k = qkv + q_width, *v = k + s->Hk * s->D;
        vpd_rotate(qkv, width, s->Hq, k, width, s->Hk, positions, l->cos, l->sin, n, s->D, s->half, threads);
        if (vpd_attend(qkv, width, k, width, v, width, cache, cache + value_bytes, type,
                       scales ? scales + i * 2 * s->Hk : NULL, write_index, offsets, slots, starts, table, table_stride, block_size, begins, mixed, n, spans, s->Hq, s->Hk, s->D, l->window,
                       s->scale, s->softcap, threads))
            return 1;
        if (multiply(mixed, n, &l->output, added, threads)) return 1;
        if (l->post_attention_norm.w)
            normed(added, NULL, NULL, &l->post_attention_norm, s, added, n, threads);
        normed(added, residual, stream, &l->mlp_norm, s, x, n, threads);
        if (multiply(x, n, &l->gate_up, gate_up, threads)) return 1;
        vpd_gated(gate_up, 2 * s->I, gated, n, s->I, (int)s->gelu, threads);
        if (multiply(gated, n, &l->down, added, threads)) return 1;
        if (l->post_mlp_norm.w) normed(added, NULL, NULL, &l->post_mlp_norm, s, added, n, threads);
        normed(added, stream, stream, &l->next_norm, s, x, n, threads);
        if (captures[i]) memcpy((float *)(intptr_t)captures[i], stream, sizeof(float) * (size_t)(n * s->H));
        residual = stream;
    }
    return 0;
}

/* Floats of a row in the working space of vpd_layers. */
EXPORT ptrdiff_t vpd_scratch(const layer_shape *s) {
    const ptrdiff_t attention = 2 * (s->Hq + s->Hk) * s->D, mlp = 2 * s->I;
    return s->H + s->I + (attention > mlp ? attention : mlp);
}

#include "native_head.h"
