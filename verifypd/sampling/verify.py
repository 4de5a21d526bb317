"""Verification: which drafted tokens stand, the token that follows them, and whether the request ends there.

Every decision is made on the device, for all spans at once; what is vocabulary-wide stays ragged over the rows, only
scalars are padded. Randomness comes in as an argument or from the slot's keyed noise. Knows nothing of models, KV
memory or schedules.

Exactness. Rejection: a draft x stands with probability min(1, p(x) / q(x)), else the token comes from norm(max(p - q,
0)); after the last draft it comes from p. Coupled: the token is argmax(log p + Gumbel noise of the output position),
drafts or not, and a draft stands when it is that token. Greedy: the same without noise. p is the transformed
distribution, q what the drafter drew from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from verifypd.sampling.case import Case, Outcome, Spans, Verdicts
from verifypd.sampling.choose import implementation
from verifypd.sampling.logprobs import padded, token_logprobs
from verifypd.sampling.rows import Rows, clean
from verifypd.sampling.state import Needs, SamplingState, on_device
from verifypd.sampling.torch import outcome, own_choice
from verifypd.sampling.transforms import shaped, transform


def judge(
    logits: Tensor,
    spans: Spans,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
    draft_q: Tensor | None = None,
    point_mass: Sequence[bool] | None = None,
    *,
    mask: Tensor | None = None,
    context: int | None = None,
) -> Verdicts:
    """Judge every span, and write the outcome: tokens and lengths grow, state.alive falls where a request ends.

    logits fp32 [N, >= vocab]; tokens [S, T], lengths [S], drafts [S, Lmax], draft_lens [S] int64; draft_q fp32 [S,
    Lmax, >= vocab], the distribution each draft was drawn from, unless point_mass says for a span that its drafts were
    not drawn at all (n-gram); mask and context as in `transform`. Drafts have a column for each that any span has,
    tokens one for each that any request may have.
    """
    kernels, needs = implementation(state.kernels), state.needs(spans.slot_ids, spans.depth)
    point = point_mass if point_mass is not None else (draft_q is None,) * len(spans.slot_ids)
    by_weight = [drafted > 0 and not given for drafted, given in zip(spans.depth, point, strict=True)]
    if draft_q is None and needs.tried and any(by_weight):
        raise ValueError("draft_q is needed for drafts that were drawn from a distribution")
    verdicts = None
    if kernels.direct is not None and (mask is None or not needs.synthetic):  # those choose from raw logits
        plain = needs.plain and mask is None
        x = logits if plain else shaped(logits, _rows(spans, lengths), state, tokens, drafts, needs, mask, context)

        def again(some: Sequence[int]) -> Outcome:
            part, rows = spans.part(some)
            case = open_case(
                logits[rows], part, state, tokens, lengths, drafts, draft_lens, draft_q, [point[r] for r in some],
                mask if mask is None else mask[rows], context,
            )  # fmt: skip
            return outcome(case, *own_choice(case))

        verdicts = kernels.direct(
            x, spans, needs, state, tokens, lengths, drafts, draft_lens, draft_q, by_weight, again
        )
    if verdicts is None:
        case = open_case(logits, spans, state, tokens, lengths, drafts, draft_lens, draft_q, point, mask, context)
        verdicts = kernels.judge(case, tokens, lengths, drafts, draft_lens)
    return _with_logprobs(logits, spans, needs, state.vocab, verdicts) if needs.logprobs else verdicts


def _rows(spans: Spans, lengths: Tensor) -> Rows:
    slots = spans.slots[spans.row_span]
    return Rows(slots, spans.row_depth, lengths[slots])


def open_case(
    logits: Tensor,
    spans: Spans,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
    draft_q: Tensor | None,
    point: Sequence[bool],
    mask: Tensor | None,
    context: int | None,
) -> Case:
    """Transform the logits and gather what every step needs."""
    needs, span_needs = state.needs(spans.slot_ids, spans.depth), state.needs(spans.slot_ids)
    rows, x = _rows(spans, lengths), logits
    if needs.synthetic.count < needs.rows:
        x = transform(logits, rows, state, tokens, drafts, needs, mask=mask, context=context)
    if all(drafted == 0 or given for drafted, given in zip(spans.depth, point, strict=True)):
        draft_q = None
    drawn = None
    if draft_q is not None and any(point):
        drawn = on_device([not given for given in point], logits.device).bool()
    return Case(logits, x, spans, rows, needs, span_needs, state, lengths, drafts, draft_lens, draft_q, drawn)


def _with_logprobs(logits: Tensor, spans: Spans, needs: Needs, vocab: int, verdicts: Verdicts) -> Verdicts:
    some, width = needs.logprobs, verdicts.tokens.shape[1]
    index = some.of(spans.row_span) * width + some.of(spans.row_depth)
    chosen = verdicts.tokens.flatten()[index].clamp_(0, vocab - 1)
    found = token_logprobs(clean(some.of(logits), vocab), chosen, needs.top_logprobs)
    return replace(verdicts, logprobs=padded(found, index, (len(spans.slot_ids), width)))
