"""How much work a plan is, in the numbers of the cost model. The engine and the simulator count it alike."""

from __future__ import annotations

from verifypd.control.observe import StepTiming
from verifypd.control.snapshot import Plan


def work_of(plan: Plan) -> StepTiming:
    """Rows and contexts of a plan as the host knows them, bounds; seconds are not filled in."""
    # what is looked up costs next to nothing: the steps are those of the model
    main = plan.draft.drafter if plan.draft else None
    drafts = [span for span in plan.draft.spans if span.drafter in (None, main)] if plan.draft else []
    verify = plan.verify.spans if plan.verify else ()
    beside = [span for span in verify if span.start is not None]
    chunks = [*beside, *(plan.prefill.spans if plan.prefill else ())]
    return StepTiming(
        draft_requests=len(drafts),
        draft_steps=max([span.drafts for span in drafts], default=0),
        draft_rows=sum([span.rows for span in drafts]),
        draft_context=sum([span.context for span in drafts]),
        verify_requests=len(verify) - len(beside),
        verify_rows=sum([span.rows for span in verify]),
        verify_context=sum([span.context for span in verify]),
        chunk_rows=sum([span.rows for span in chunks]),
        chunk_context=sum([span.rows * span.context for span in chunks]),
    )
