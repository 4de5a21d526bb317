"""What is left of a plan where memory is short."""

from __future__ import annotations

from verifypd.batch import DraftBatch, VerifyBatch, VerifySpan
from verifypd.control.snapshot import Plan


def keep(plan: Plan, drafts: dict[int, int]) -> Plan:
    """The part of a plan whose slots have room, with the draft lengths that fit.

    Who was to draft and wait, and has no room for it, is verified at once with its one token: everyone gets on.
    """
    batches = [batch.spans for batch in (plan.draft, plan.verify, plan.prefill) if batch]
    if all(drafts.get(span.slot) == span.drafts for spans in batches for span in spans):
        return plan
    verify = [
        span if span.drafts == drafts[span.slot] else span._replace(drafts=0, rows=1, drafter=None)
        for span in (plan.verify.spans if plan.verify else ())
        if span.slot in drafts
    ]
    verified = {span.slot for span in plan.verify.spans} if plan.verify else set()
    draft_spans = []
    for span in plan.draft.spans if plan.draft else ():
        if span.slot not in drafts:
            continue
        kept = span._replace(drafts=min(span.drafts, drafts[span.slot]))
        if span.drafts and not kept.drafts and span.slot not in verified:
            verify.append(VerifySpan(span.slot, rows=1, drafts=0, start=None, emits=True, context=span.context))
        if kept.rows or kept.drafts:
            draft_spans.append(kept)
    chunks = tuple(span for span in plan.prefill.spans if span.slot in drafts) if plan.prefill else ()
    return Plan(
        draft=DraftBatch(plan.draft.drafter, tuple(draft_spans)) if plan.draft and draft_spans else None,
        verify=VerifyBatch(tuple(verify)) if verify else None,
        prefill=VerifyBatch(chunks) if chunks else None,
    )
