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

from verifypd.sampling.case import Case, Spans, Verdicts
from verifypd.sampling.choose import implementation
from verifypd.sampling.logprobs import padded, token_logprobs
from verifypd.sampling.rows import Rows, clean
from verifypd.sampling.state import SamplingState, on_device
from verifypd.sampling.transforms import transform


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
    if needs.likeliest and mask is None and kernels.greedy is not None:
        found = kernels.greedy(logits, spans, needs, state, tokens, lengths, drafts, draft_lens)
        if found is not None:
            return found
    case = open_case(logits, spans, state, tokens, lengths, drafts, draft_lens, draft_q, point_mass, mask, context)
    verdicts = kernels.judge(case, tokens, lengths, drafts, draft_lens)
    return _with_logprobs(case, verdicts) if case.needs.logprobs else verdicts


def open_case(
    logits: Tensor,
    spans: Spans,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
    draft_q: Tensor | None,
    point_mass: Sequence[bool] | None,
    mask: Tensor | None,
    context: int | None,
) -> Case:
    """Transform the logits and gather what every step needs."""
    needs, span_needs = state.needs(spans.slot_ids, spans.depth), state.needs(spans.slot_ids)
    row_slots = spans.slots[spans.row_span]
    rows = Rows(row_slots, spans.row_depth, lengths[row_slots])
    x = logits
    if needs.synthetic.count < needs.rows:
        x = transform(logits, rows, state, tokens, drafts, needs, mask=mask, context=context)
    point = point_mass if point_mass is not None else (draft_q is None,) * len(spans.slot_ids)
    if all(drafted == 0 or given for drafted, given in zip(spans.depth, point, strict=True)):
        draft_q = None
    elif draft_q is None and needs.tried:
        raise ValueError("draft_q is needed for drafts that were drawn from a distribution")
    drawn = None
    if draft_q is not None and any(point):
        drawn = on_device([not given for given in point], logits.device).bool()
    return Case(logits, x, spans, rows, needs, span_needs, state, lengths, drafts, draft_lens, draft_q, drawn)


def _with_logprobs(case: Case, verdicts: Verdicts) -> Verdicts:
    some, width = case.needs.logprobs, verdicts.tokens.shape[1]
    index = some.of(case.spans.row_span) * width + some.of(case.spans.row_depth)
    chosen = verdicts.tokens.flatten()[index].clamp_(0, case.state.vocab - 1)
    raw = clean(some.of(case.logits), case.state.vocab)
    found = token_logprobs(raw, chosen, case.needs.top_logprobs)
    return replace(verdicts, logprobs=padded(found, index, (len(case.spans.slot_ids), width)))
