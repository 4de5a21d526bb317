/* Token ids: what stands of drafts, and what a look-up in a text proposes. Included by native.c. */

/* ---- verdicts --------------------------------------------------------------------------------------------------- */

enum { RUNNING = 0, STOP = 1, LENGTH = 2, ERROR = 3 }; /* Finish in sampling/case.py */

typedef struct {
    const int64_t *slots, *depth, *first_row; ptrdiff_t spans, widest; /* widest: most drafts of a span */
    int64_t *tokens; ptrdiff_t tokens_stride; int64_t *lengths;
    const int64_t *drafts; ptrdiff_t drafts_stride; const int64_t *draft_lens;
    const int64_t *stop_ids; ptrdiff_t stop_stride, stop_width;
    const int64_t *max_len; ptrdiff_t max_len_stride;
    uint8_t *alive; int64_t vocab; int64_t *out; /* [spans, widest + 6] */
} verdict_args;

/* How many drafts of a span there are to judge. */
INLINE int64_t drafted_of(const verdict_args *a, ptrdiff_t r) {
    const int64_t there = a->draft_lens[a->slots[r]];
    return there < a->depth[r] ? there : a->depth[r];
}

/* What is emitted of a span, cut at the first stop id and at the greatest length; tokens, lengths and life with it. Its
 * row of `out` holds how many drafts stand, the token behind them, and whether there is none; it becomes: tokens
 * emitted, drafts among them, drafts judged, why it ends, the id that ended it, the tokens. */
static void emit(const verdict_args *a, ptrdiff_t r) {
    const int64_t width = a->widest + 1, slot = a->slots[r], drafted = drafted_of(a, r);
    const int64_t length = a->lengths[slot], most = a->max_len[slot * a->max_len_stride];
    const int64_t *draft = a->drafts + slot * a->drafts_stride;
    int64_t *out = a->out + r * (width + 5), *emitted = out + 5, stop_at = width;
    const int64_t accepted = out[0], following = out[1];
    const int hopeless = (int)out[2], alive = a->alive[slot];
    for (int64_t j = 0; j < a->widest; j++) emitted[j] = draft[j];
    emitted[a->widest] = emitted[accepted] = following;
    for (int64_t j = 0; j < width && j + hopeless <= accepted && stop_at == width; j++) {
        for (ptrdiff_t i = 0; i < a->stop_width; i++)
            if (emitted[j] == a->stop_ids[slot * a->stop_stride + i]) stop_at = j;
    }
    const int64_t room = most > length ? most - length : 0, limit = stop_at + 1 < room ? stop_at + 1 : room;
    const int64_t whole = accepted + 1 < limit ? accepted + 1 : limit;
    const int error = hopeless && limit > accepted; /* the missing token is one that would have been emitted */
    const int stopped = stop_at < whole;
    const int64_t count = !alive ? 0 : error ? accepted : whole; /* drafts before the missing token stand */
    out[0] = count;
    out[1] = accepted < count ? accepted : count;
    out[2] = alive ? drafted : 0;
    out[3] = !alive ? RUNNING : error ? ERROR : stopped ? STOP : length + whole >= most ? LENGTH : RUNNING;
    out[4] = stopped && alive && !error ? emitted[stop_at] : -1;
    memcpy(a->tokens + slot * a->tokens_stride + length, emitted, sizeof(int64_t) * (size_t)count);
    a->lengths[slot] = length + count;
    a->alive[slot] = alive && out[3] == RUNNING;
}

/* ---- look-up ---------------------------------------------------------------------------------------------------- */

/* Whoever has drafts to find, a pair of slot and drafts each: what followed the latest of the longest earlier
 * occurrences of its last tokens, `shortest` to `longest` of them, in the first `width` of its row; a draft that runs
 * past the end goes on with itself. `depth` drafts are written of each; how many count: those it has, or none where
 * nothing was found, unless `always`. */
EXPORT void vpd_look_up(const int64_t *tokens, ptrdiff_t tokens_stride, ptrdiff_t width, const int64_t *lengths,
                        const int64_t *wanted, ptrdiff_t count, ptrdiff_t shortest, ptrdiff_t longest, ptrdiff_t depth,
                        int always, int64_t *drafts, ptrdiff_t drafts_stride, int64_t *draft_lens) {
    for (ptrdiff_t r = 0; r < count; r++) {
        const int64_t slot = wanted[2 * r], length = lengths[slot], last = length - 1;
        const int64_t *text = tokens + slot * tokens_stride;
        ptrdiff_t best = 0, size = 0; /* where the best match ends, and its tokens */
        for (ptrdiff_t end = 0; end < width && end < last; end++) {
            if (text[end] != text[last]) continue;
            ptrdiff_t same = 1;
            while (same < longest && same <= end && text[end - same] == text[last - same]) same++;
            if (same >= shortest && same >= size) { size = same; best = end; }
        }
        const int64_t start = best + 1, period = length - start > 1 ? length - start : 1;
        for (ptrdiff_t j = 0; j < depth; j++) {
            const int64_t at = start + j % period;
            drafts[slot * drafts_stride + j] = text[at < width ? at : width - 1];
        }
        draft_lens[slot] = size || always ? wanted[2 * r + 1] : 0;
    }
}
