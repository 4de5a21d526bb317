"""Plans as pure data: what each architecture puts into a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.views import VIEW
from verifypd.control.architectures import Baseline, Unified
from verifypd.control.controller import FixedController, allowed
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.control.throughput import ThroughputController
from verifypd.errors import ConfigError

PLAIN = make_architecture("plain", FixedController(4))
DECODING = VIEW._replace(length_floor=10, length_bound=10, max_length=100, slo_tpot=15.0)


def view(slot: int, **changes: Any) -> RequestView:
    drafter = "model" if changes.get("pending") else None
    return DECODING._replace(**{"slot": slot, "request_id": slot, "rank": (0, slot), "drafter": drafter, **changes})


def slots(plan: Plan, part: str) -> list[int]:
    """Slots of one batch of a plan."""
    batch = getattr(plan, part)
    return [span.slot for span in batch.spans] if batch else []


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
    plan = PLAIN.plan(snapshot(view(0, chunk_start=16, prefill_left=20)))
    assert plan.verify and plan.verify.spans[0].emits and plan.draft is None


def test_plain_never_drafts() -> None:
    plan = PLAIN.plan(snapshot(view(0), view(1)))
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
    plan = PLAIN.plan(snapshot(*views))
    assert plan.verify and [span.slot for span in plan.verify.spans] == [5, 4, 3, 2]


def test_priority_goes_before_waiting() -> None:
    views = [view(slot)._replace(rank=(slot == 0, slot), served=slot) for slot in range(5)]
    plan = PLAIN.plan(snapshot(*views))
    assert plan.verify and [span.slot for span in plan.verify.spans] == [1, 2, 3, 4]


def test_a_full_batch_still_lets_prefill_progress() -> None:
    plan = PLAIN.plan(snapshot(*(view(s) for s in range(4)), view(4, prefill_left=10)))
    assert plan.verify and plan.verify.spans[-1].slot == 4


def test_a_request_that_verdicts_in_flight_will_end_is_left_out() -> None:
    plan = PLAIN.plan(snapshot(view(0, length_floor=100, length_bound=104)))
    assert plan.empty


@pytest.mark.parametrize(
    ("changes", "length"),
    [({}, 4), ({"draft_limit": 2}, 2), ({"expected": 0}, 0), ({"max_length": 13}, 2), ({"max_length": 11}, 0)],
)
def test_fixed_length_is_cut_to_what_can_be_used(changes: dict[str, int], length: int) -> None:
    assert allowed(view(0, **changes), 4) == length


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="baseline, pd, pdv"):
        make_architecture("magic", FixedController(1))


# -- unified -----------------------------------------------------------------------------------------------------------


def test_a_full_decode_queue_holds_prompts_back_one_token_short() -> None:
    full = [view(slot) for slot in range(5)]  # 5 = 1.2 × 4, rounded up
    plan = Unified(FixedController(0)).plan(snapshot(*full, view(5, prefill_left=10)))
    assert plan.verify
    chunk = plan.verify.spans[-1]
    assert (chunk.slot, chunk.rows, chunk.emits) == (5, 9, False)
    plan = Unified(FixedController(0)).plan(snapshot(*full, view(5, chunk_start=9, prefill_left=1)))
    assert 5 not in slots(plan, "verify")
    plan = Unified(FixedController(0)).plan(
        snapshot(*full[1:], view(5, prefill_left=10), view(6, prefill_left=5), batch_size=6, queue_factor=5 / 6)
    )
    assert plan.verify
    ended, held = plan.verify.spans[-2:]  # one more may join: the shorter prompt
    assert (ended.slot, ended.emits, held.slot, held.rows, held.emits) == (6, True, 5, 9, False)
    plan = Unified(FixedController(0)).plan(snapshot(*full, view(5, prefill_left=10), queue_factor=2.0))
    assert plan.verify and plan.verify.spans[-1].emits


# -- baseline ----------------------------------------------------------------------------------------------------------


def test_baseline_carries_one_request_and_takes_turns() -> None:
    views = [view(0, served=3), view(1, served=2), view(2, served=1, prefill_left=50)]
    baseline = Baseline(FixedController(3))
    plan = baseline.plan(snapshot(*views, workers=3))
    assert plan.draft is None and plan.verify is None and slots(plan, "prefill") == [2]
    plan = baseline.plan(snapshot(*views, workers=2))
    assert slots(plan, "draft") == slots(plan, "verify") == [1] and plan.prefill is None


def test_baseline_finishes_what_its_workers_hold_before_it_starts_another() -> None:
    views = [view(0), view(1, served=7), view(2, served=8)]
    plan = Baseline(FixedController(3)).plan(snapshot(*views, workers=2))
    assert slots(plan, "verify") == [1], "the first in line has no worker yet"


def test_baseline_has_nothing_to_do() -> None:
    assert Baseline(FixedController(3)).plan(snapshot(workers=2)).empty


# -- all of them -------------------------------------------------------------------------------------------------------

NAMES = ("plain", "baseline", "pd", "pdv", "unified", "table", "auto")


@pytest.mark.parametrize("name", NAMES)
def test_pending_drafts_are_verified_as_they_stand(name: str) -> None:
    plan = make_architecture(name, FixedController(5)).plan(snapshot(view(0, pending=2)))
    assert plan.draft is None and plan.verify
    [span] = plan.verify.spans
    assert (span.slot, span.drafts, span.rows, span.drafter) == (0, 2, 3, "model")


class Spy(FixedController):
    """A controller that notes what it is told."""

    def __init__(self) -> None:
        super().__init__(2)
        self.heard: list[Any] = []

    def temperature(self, view: RequestView) -> float:
        return 0.8

    def observe(self, observation: Any) -> None:
        self.heard.append(observation)

    def observe_step(self, timing: Any) -> None:
        self.heard.append(timing)

    def forget(self, request_id: int) -> None:
        self.heard.append(request_id)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "plain"])
def test_the_controller_hears_what_happened_and_sets_the_drafters_temperature(name: str) -> None:
    spy = Spy()
    architecture: Any = make_architecture(name, spy)
    plan = architecture.plan(snapshot(view(0)))
    assert plan.draft and plan.draft.spans[0].temperature == 0.8 and plan.draft.spans[0].drafts == 2
    verdict = Observation(0, 2, 1, 2, coupled=False, greedy=True, temperature=0.0, drafter="model")
    timing = StepTiming(draft_requests=1, draft_steps=2, verify_rows=3, draft_seconds=0.1, verify_seconds=0.2)
    architecture.observe(verdict)
    architecture.observe_step(timing)
    architecture.forget(7)
    assert spy.heard == [verdict, timing, 7]


def test_plain_tells_the_controller_of_the_others_who_has_gone() -> None:
    """They take turns in one engine: whoever drafted under another and ends under `plain` must not be kept."""
    controller = make_controller("throughput", 4, CostModel(Coefficients()))
    assert isinstance(controller, ThroughputController)
    unified, plain = [make_architecture(name, controller) for name in ("unified", "plain")]
    unified.plan(snapshot(view(0), view(1)))
    known = controller.acceptance._requests
    assert set(known) == {0, 1}
    plain.plan(snapshot(view(0), view(1)))
    plain.forget(0)
    assert set(known) == {1}


VIEWS = st.lists(
    st.fixed_dictionaries(
        {
            "prefill_left": st.sampled_from([0, 0, 0, 1, 9, 70]),
            "pending": st.sampled_from([0, 0, 1, 3]),
            "draft_limit": st.sampled_from([0, 4]),
            "draft_lag": st.sampled_from([1, 2, 50, 200]),
            "length_floor": st.sampled_from([10, 99, 100]),
            "served": st.integers(0, 3),
            "waited": st.floats(0, 1),
        }
    ),
    max_size=9,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(
    made=VIEWS,
    batch=st.integers(1, 6),
    wanted=st.integers(1, 4),
    workers=st.integers(1, 4),
    fitted=st.booleans(),
    gap=st.sampled_from([1.0, 30.0]),
)
def test_plans_hold_together(
    name: str, made: list[dict[str, Any]], batch: int, wanted: int, workers: int, fitted: bool, gap: float
) -> None:
    views = [view(slot, **({**each, "pending": 0} if each["prefill_left"] else each)) for slot, each in enumerate(made)]
    taken = snapshot(*views, batch_size=batch, verify_batch=min(wanted, batch), verify_wait_ms=5.0, workers=workers)
    cost = CostModel(Coefficients(steep=1e-3, knee=8.0) if fitted else None)
    plan = make_architecture(name, FixedController(3), cost).plan(replace(taken, slo_gap=gap))
    by_slot = {each.slot: each for each in views}
    passes = slots(plan, "verify") + slots(plan, "prefill")
    assert len(set(passes)) == len(passes), "a request is in one pass only"
    runnable = any(each.prefill_left or each.room > 0 for each in views)
    held_back = name in ("unified", "plain", "auto") and len([v for v in views if not v.prefill_left]) >= 1.2 * batch
    assert plan.empty != runnable or held_back, "whatever can run makes a plan"
    for part in ("verify", "prefill"):
        for span in getattr(plan, part).spans if getattr(plan, part) else ():
            each = by_slot[span.slot]
            if each.prefill_left:
                assert span.start == each.chunk_start and 1 <= span.rows <= each.prefill_left
                assert span.emits == (span.rows == each.prefill_left)
            else:
                assert each.room > 0 and span.emits and span.rows == span.drafts + 1
                assert not each.pending or span.drafts == each.pending
    for draft in plan.draft.spans if plan.draft else ():
        each = by_slot[draft.slot]
        assert not each.pending and not each.prefill_left and draft.drafts <= min(each.draft_limit, each.room - 1)
        assert not draft.drafts or draft.rows == draft.lag, "a draft model that lags does not draft"
    drafts = slots(plan, "draft")
    if name == "baseline":
        assert len({*passes, *drafts}) <= 1
    if name in ("pd", "unified", "plain"):
        assert set(drafts) <= set(slots(plan, "verify"))
    chunk_rows = [s.rows for b in (plan.verify, plan.prefill) if b for s in b.spans if s.start is not None]
    assert sum(chunk_rows) <= taken.prefill_chunk


def test_a_pass_takes_chunks_of_as_many_prompts_as_it_may() -> None:
    views = [view(slot, prefill_left=10) for slot in range(6)]
    settings = {"prefill_chunk": 100, "batch_size": 8}
    assert slots(PLAIN.plan(snapshot(*views, **settings)), "verify") == list(range(6))
    assert slots(PLAIN.plan(snapshot(*views, **settings, most_chunks=4)), "verify") == list(range(4))
