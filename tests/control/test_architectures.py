"""Plans as pure data: what `unified` and `plain` put into a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verifypd.control.architectures import Plain, Unified, make_architecture
from verifypd.control.controller import FixedController
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.errors import ConfigError

DECODING = RequestView(
    slot=0,
    rank=(0, 0),
    served=0,
    chunk_start=0,
    prefill_left=0,
    length_floor=10,
    length_bound=10,
    max_length=100,
    draft_limit=8,
    draft_lag=2,
    promise=8,
    prompt_logprobs=-1,
)


def view(slot: int, **changes: Any) -> RequestView:
    return replace(DECODING, slot=slot, rank=(0, slot), **changes)


def snapshot(*views: RequestView, **changes: Any) -> Snapshot:
    base = Snapshot(
        step=1, requests=views, batch_size=4, prefill_chunk=32, draft_chunk=64, drafter="model", drafter_has_cache=True
    )
    return replace(base, **changes)


def test_one_pass_mixes_verify_spans_plain_tokens_and_a_prompt_chunk() -> None:
    plan = Unified(FixedController(4)).plan(
        snapshot(view(0), view(1, draft_limit=0), view(2, chunk_start=5, prefill_left=50))
    )
    assert plan.verify and plan.draft
    drafted, plain, chunk = plan.verify.spans
    assert (drafted.rows, drafted.drafts, drafted.start, drafted.emits) == (5, 4, None, True)
    assert (plain.rows, plain.drafts, plain.drafter) == (1, 0, None)
    assert (chunk.rows, chunk.start, chunk.emits) == (32, 5, False)
    assert [span.slot for span in plan.draft.spans] == [0]


def test_the_last_chunk_emits() -> None:
    plan = Plain().plan(snapshot(view(0, chunk_start=16, prefill_left=20)))
    assert plan.verify and plan.verify.spans[0].emits and plan.draft is None


def test_plain_never_drafts() -> None:
    plan = Plain().plan(snapshot(view(0), view(1)))
    assert plan.draft is None and plan.verify and all(span.rows == 1 for span in plan.verify.spans)


def test_a_lagging_draft_catches_up_in_chunks_before_it_drafts() -> None:
    plan = Unified(FixedController(4)).plan(snapshot(view(0, draft_lag=100), view(1)))
    assert plan.draft and plan.verify
    level, catching = plan.draft.spans
    assert (catching.slot, catching.rows, catching.lag, catching.drafts) == (0, 66, 100, 0)
    assert (level.slot, level.rows, level.drafts) == (1, 2, 4), "one far behind does not hold up one that is level"
    assert [span.drafts for span in plan.verify.spans] == [0, 4]


def test_everybody_who_is_level_drafts() -> None:
    plan = Unified(FixedController(4)).plan(snapshot(*(view(slot) for slot in range(200)), batch_size=200))
    assert plan.draft and len(plan.draft.spans) == 200


def test_a_drafter_without_a_cache_never_catches_up() -> None:
    plan = Unified(FixedController(4)).plan(snapshot(view(0, draft_lag=100), drafter="ngram", drafter_has_cache=False))
    assert plan.draft and plan.draft.spans[0].rows == 0 and plan.draft.spans[0].drafts == 4


def test_the_batch_goes_to_those_who_waited_longest() -> None:
    views = [view(slot, served=9 - slot) for slot in range(6)]
    plan = Plain().plan(snapshot(*views))
    assert plan.verify and [span.slot for span in plan.verify.spans] == [5, 4, 3, 2]


def test_priority_goes_before_waiting() -> None:
    views = [replace(view(slot), rank=(slot == 0, slot), served=slot) for slot in range(5)]
    plan = Plain().plan(snapshot(*views))
    assert plan.verify and [span.slot for span in plan.verify.spans] == [1, 2, 3, 4]


def test_a_full_batch_still_lets_prefill_progress() -> None:
    plan = Plain().plan(snapshot(*(view(s) for s in range(4)), view(4, prefill_left=10)))
    assert plan.verify and plan.verify.spans[-1].slot == 4


def test_a_request_that_verdicts_in_flight_will_end_is_left_out() -> None:
    plan = Plain().plan(snapshot(view(0, length_floor=100, length_bound=104)))
    assert plan.empty


@pytest.mark.parametrize(
    ("changes", "length"),
    [({}, 4), ({"draft_limit": 2}, 2), ({"promise": 0}, 0), ({"max_length": 13}, 2), ({"max_length": 11}, 0)],
)
def test_fixed_length_is_cut_to_what_can_be_used(changes: dict[str, int], length: int) -> None:
    assert FixedController(4).draft_length(view(0, **changes)) == length


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="plain, unified"):
        make_architecture("magic", FixedController(1))
