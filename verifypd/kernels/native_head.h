/* Draft heads: features, rows, and a draft loop from confirmed tokens to the last drafted one, in one call each.
 *
 * A draft step is a layer and the output rows of some thousand tokens, half a millisecond; from a caller in Python its
 * dozen operations cost as much again. Nothing is computed here but by the functions of native.c, in the order in which
 * models/head.py calls them, so results are the same to the bit. The structs are laid out as in models/native_head.py.
 * Included by native.c.
 */

typedef struct {
    matrix_weight embedding, fc, output; /* output: rows of the tokens that may be proposed */
    vector_weight embed_norm, hidden_norm;
    const layer_weights *layers; const layer_shape *shape;
    ptrdiff_t count; /* of layers */
    float embed_scale;
} head_weights;

typedef struct {
    char *data; ptrdiff_t layer_bytes, value_bytes; int64_t type; /* keys and, value_bytes behind them, values */
    const int32_t *table; ptrdiff_t table_stride, slots, blocks, block_size;
    const int64_t *first; /* of each slot, the first position that holds anything; NULL: 0 */
} paged_cache;

/* Row `id` of a matrix in float32, times `factor`. */
static void embed_row(const matrix_weight *m, int64_t id, float factor, float *y) {
    const ptrdiff_t K = m->K, type = m->type;
    const float by = m->scale ? m->scale[id] : 1.0f;
    for (ptrdiff_t k = 0; k < K; k++) {
        const ptrdiff_t at = type == HALF ? (id / 4 * (K / 8) + k / 8) * 32 + id % 4 * 8 + k % 8
                           : type == PANELS || type == I8_PANELS ? (id / 16 * (K / 2) + k / 2) * 32 + id % 16 * 2 + k % 2
                           : type == WIDE_PANELS ? (id / 16 * K + k) * 16 + id % 16 : id * K + k;
        const float v = type == F32 || type == WIDE_PANELS ? ((const float *)m->w)[at]
                      : type == BF16 || type == PANELS ? one_bf16(((const bf16 *)m->w)[at])
                      : type == I8 || type == I8_PANELS ? one_i8(((const int8_t *)m->w)[at])
                      : one_f16(((const f16 *)m->w)[at]);
        y[k] = v * by * factor;
    }
}

/* Rows of a matrix [rows, K] in float32, [n, K]. Returns 1 where it has no such row. */
EXPORT int vpd_embed(const int64_t *ids, ptrdiff_t n, const void *w, int type, const float *scale, ptrdiff_t rows,
                     ptrdiff_t K, float *y) {
    const matrix_weight m = {w, scale, rows, K, type, {NULL, 0}};
    for (ptrdiff_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= rows) return 1;
        embed_row(&m, ids[i], 1.0f, y + i * K);
    }
    return 0;
}

/* Features [n, out] of a verifier's streams, each [n, H]: every stream normed, then one matrix over all. */
EXPORT int vpd_project(const float *const *streams, const vector_weight *norms, ptrdiff_t count, ptrdiff_t H, float eps,
                       const matrix_weight *features, float *y, ptrdiff_t n, int threads) {
    float *joint = malloc(sizeof(float) * (size_t)(n * count * H));
    if (!joint) return 1;
    for (ptrdiff_t i = 0; i < n; i++) {
        for (ptrdiff_t s = 0; s < count; s++)
            vpd_norm(streams[s] + i * H, H, NULL, NULL, norms[s].w, (int)norms[s].type, joint + (i * count + s) * H, 1,
                     H, eps, 0.0f, 1);
    }
    const int failed = multiply(joint, n, features, y, threads);
    free(joint);
    return failed;
}

/* Floats of a row in the working space of read_rows. */
static ptrdiff_t head_scratch(const head_weights *h) {
    return 3 * h->shape->H + vpd_scratch(h->shape);
}

/* ids [n] and the features [n, H] of the positions before -> the residual stream behind the head's layers and, normed,
 * x. `features` may be `stream`. Returns 1 where memory is short, 2 where a token has no row. */
static int read_rows(const head_weights *h, const int64_t *ids, const float *features, float *stream, float *x,
                     float *scratch, const int64_t *positions, const paged_cache *c, const int64_t *write_index,
                     const int64_t *offsets, const int64_t *slots, const int64_t *starts, ptrdiff_t n,
                     ptrdiff_t spans, int threads) {
    const layer_shape *s = h->shape;
    const ptrdiff_t H = s->H;
    const vector_weight *of_token = &h->embed_norm, *of_feature = &h->hidden_norm;
    float *joint = scratch, *residual = joint + 2 * n * H;
    int64_t captures[h->count];
    memset(captures, 0, sizeof captures);
    for (ptrdiff_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= h->embedding.out) return 2;
        float *token = joint + 2 * i * H;
        embed_row(&h->embedding, ids[i], h->embed_scale, token);
        vpd_norm(token, H, NULL, NULL, of_token->w, (int)of_token->type, token, 1, H, s->eps, 0.0f, 1);
        vpd_norm(features + i * H, H, NULL, NULL, of_feature->w, (int)of_feature->type, token + H, 1, H, s->eps, 0.0f,
                 1);
    }
    if (multiply(joint, n, &h->fc, residual, threads)) return 1;
    return vpd_layers(h->layers, h->count, s, residual, stream, x, captures, residual + n * H, positions, c->data,
                      c->layer_bytes, c->value_bytes, (int)c->type, NULL, write_index, offsets, slots, starts, c->table,
                      c->table_stride, c->block_size, c->first, n, spans, threads);
}

EXPORT int vpd_read(const head_weights *h, const int64_t *ids, const float *features, float *stream, float *x,
                    const int64_t *positions, const paged_cache *c, const int64_t *write_index, const int64_t *offsets,
                    const int64_t *slots, const int64_t *starts, ptrdiff_t n, ptrdiff_t spans, int threads) {
    float *scratch = malloc(sizeof(float) * (size_t)(n * head_scratch(h)));
    if (!scratch) return 1;
    const int failed = read_rows(h, ids, features, stream, x, scratch, positions, c, write_index, offsets, slots,
                                 starts, n, spans, threads);
    free(scratch);
    return failed;
}

typedef struct { int64_t slot, rows, drafts, start; } draft_span; /* start: of its rows; < 0: that far before the end */

typedef struct {
    const head_weights *head; const paged_cache *cache;
    const draft_span *spans; ptrdiff_t count; /* longest drafts first */
    const int64_t *tokens; ptrdiff_t tokens_stride; const int64_t *lengths; /* of each slot */
    int64_t *draft_lens;
    const float *features;                                                  /* [pool rows, H], kept of the verifier */
    const draw_args *draw;
    int64_t threads;
} draft_args;

typedef struct { int64_t *ids, *positions, *write_index, *offsets, *slots, *starts, *row_span, *within; } draft_rows;

INLINE ptrdiff_t write_index_of(const paged_cache *c, int64_t slot, int64_t position) {
    return c->table[slot * c->table_stride + position / c->block_size] * c->block_size + position % c->block_size;
}

/* The rows that catch up, each with its token and the feature of the position before. */
static int catching_rows(const draft_args *a, const draft_rows *r, float *features, ptrdiff_t n) {
    const paged_cache *c = a->cache;
    const ptrdiff_t H = a->head->shape->H;
    ptrdiff_t row = 0;
    for (ptrdiff_t i = 0; i < a->count; i++) {
        const draft_span *span = a->spans + i;
        r->offsets[i] = row;
        r->slots[i] = span->slot;
        r->starts[i] = span->start < 0 ? a->lengths[span->slot] + span->start : span->start;
        for (ptrdiff_t j = 0; j < span->rows; j++, row++) { r->row_span[row] = i; r->within[row] = j; }
    }
    r->offsets[a->count] = row;
    if (vpd_positions(r->row_span, r->within, r->slots, c->slots, r->starts, c->blocks, c->table, c->table_stride,
                      c->block_size, c->first, n, r->positions, r->write_index))
        return 2;
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t slot = r->slots[r->row_span[i]], at = r->positions[i];
        if (at >= a->tokens_stride) return 2;
        r->ids[i] = a->tokens[slot * a->tokens_stride + at];
        if (at == 0) memset(features + i * H, 0, sizeof(float) * (size_t)H);
        else memcpy(features + i * H, a->features + write_index_of(c, slot, at - 1) * H, sizeof(float) * (size_t)H);
    }
    return 0;
}

static int draft_with(const draft_args *a, const draft_rows *r, float *work, ptrdiff_t n, ptrdiff_t drafting) {
    const head_weights *h = a->head;
    const paged_cache *c = a->cache;
    const ptrdiff_t H = h->shape->H, V = h->output.out;
    const int threads = (int)a->threads;
    float *stream = work, *x = stream + n * H, *logits = x + n * H, *scratch = logits + drafting * V;
    int failed = catching_rows(a, r, stream, n);
    if (failed) return failed;
    failed = read_rows(h, r->ids, stream, stream, x, scratch, r->positions, c, r->write_index, r->offsets, r->slots,
                       r->starts, n, a->count, threads);
    if (failed) return failed;
    for (ptrdiff_t i = 0; i < drafting; i++) { /* the last row of each, to the front */
        const ptrdiff_t last = r->offsets[i + 1] - 1;
        memmove(x + i * H, x + last * H, sizeof(float) * (size_t)H);
        memmove(stream + i * H, stream + last * H, sizeof(float) * (size_t)H);
        a->draft_lens[a->spans[i].slot] = a->spans[i].drafts;
    }
    if (!drafting) return 0;
    for (ptrdiff_t i = 0; i <= drafting; i++) r->offsets[i] = i;
    for (ptrdiff_t depth = 0, some = drafting;; depth++) {
        if (multiply(x, some, &h->output, logits, threads)) return 1;
        for (ptrdiff_t i = 0; i < some; i++) {
            const int64_t slot = a->spans[i].slot;
            if (propose(a->draw, slot, depth, logits + i * V)) return 1;
            r->ids[i] = a->draw->drafts[slot * a->draw->drafts_stride + depth];
        }
        while (some && a->spans[some - 1].drafts <= depth + 1) some--;
        if (!some) return 0;
        for (ptrdiff_t i = 0; i < some; i++) {
            const int64_t slot = a->spans[i].slot, at = a->lengths[slot] + depth;
            if (at / c->block_size >= c->blocks) return 2;
            r->slots[i] = slot;
            r->starts[i] = r->positions[i] = at;
            r->write_index[i] = write_index_of(c, slot, at);
        }
        failed = read_rows(h, r->ids, stream, stream, x, scratch, r->positions, c, r->write_index, r->offsets,
                           r->slots, r->starts, some, some, threads);
        if (failed) return failed;
    }
}

/* A draft loop: confirmed rows, then token by token, each drawn from the step before. Returns 1 where memory
 * is short, 2 where a row lies outside its slot or a token has no row. */
EXPORT int vpd_draft(const draft_args *a) {
    ptrdiff_t n = 0, drafting = 0;
    for (ptrdiff_t i = 0; i < a->count; i++) { n += a->spans[i].rows; drafting += a->spans[i].drafts > 0; }
    const ptrdiff_t row = 2 * a->head->shape->H + head_scratch(a->head), spans = a->count + 1;
    float *work = malloc(sizeof(float) * (size_t)(n * row + drafting * a->head->output.out));
    int64_t *whole = malloc(sizeof(int64_t) * (size_t)(5 * n + 3 * spans));
    int failed = !work || !whole;
    if (!failed) {
        draft_rows r = {whole, whole + n, whole + 2 * n, whole + 5 * n, whole + 5 * n + spans,
                        whole + 5 * n + 2 * spans, whole + 3 * n, whole + 4 * n};
        failed = draft_with(a, &r, work, n, drafting);
    }
    free(work);
    free(whole);
    return failed;
}
