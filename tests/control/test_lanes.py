"""Lanes as queues: what prompts get beside the others; and the path of a request through them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.test_architectures import slots, snapshot, view
from verifypd.batch import VerifyBatch
from verifypd.config import LANES
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel, Work
from verifypd.control.factory import make_architecture
from verifypd.control.lanes import prompt_tokens
from verifypd.inflight import Draft
from verifypd.metrics.stats import LaneStats
from verifypd.request import PATH, Request, SamplingParams, State


def request() -> Request:
    return Request("r", [1, 2], SamplingParams(), seed=0, max_length=10, arrival=5.0)


def tokens(prompts: int, verify: int = 0, decode: int = 0, waited: float = 0.0, **changes: Any) -> int:
    """Prompt tokens of a step of 200 beside so many requests in each lane; drafts are of nine."""
    views = [view(n, prefill_left=500, waited=waited) for n in range(prompts)]
    views += [view(prompts + n, pending=9) for n in range(verify)]
    views += [view(prompts + verify + n) for n in range(decode)]
    return prompt_tokens(snapshot(*views, **{"batch_size": 20, "prefill_chunk": 180} | changes))


def test_prompts_get_what_the_lanes_of_higher_priority_leave() -> None:
    assert tokens(1) == 180, "no more than a pass takes"
    assert tokens(1, decode=30) == 170
    assert tokens(1, verify=5, decode=30) == 120


def test_a_longer_queue_and_a_greater_weight_get_more() -> None:
    shares = [tokens(prompts, verify=20) for prompts in (1, 5, 20, 60)]
    assert shares == [9, 40, 100, 150], "their part of those who wait, though drafts alone would fill the step"
    assert tokens(5, verify=20, lane_weights=(("prefill", 3.0),)) == 85
    assert tokens(5, verify=20, lane_weights=(("verify", 4.0),)) == 11
    assert tokens(5, verify=20, lane_weights=(("decode", 4.0),)) == 40, "nobody waits there"


def test_ageing_gives_prompts_half_of_a_step() -> None:
    assert tokens(1, verify=20, waited=0.2, slo_ttft=500.0) == 9
    assert tokens(1, verify=20, waited=0.3, slo_ttft=500.0) == 100
    assert tokens(60, verify=20, waited=0.3, slo_ttft=500.0) == 150


@given(
    depths=st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(0, 40)),
    weights=st.lists(st.tuples(st.sampled_from(LANES), st.floats(0.1, 10)), max_size=3),
)
def test_no_lane_starves(depths: tuple[int, int, int], weights: list[tuple[str, float]]) -> None:
    prompts, verify, decode = depths
    found = tokens(prompts, verify, decode, lane_weights=tuple(weights))
    assert 1 <= found <= 180
    assert found < 200 or not verify + decode
    assert found >= min(180, 200 - 10 * verify - decode), "nothing is left lying that prompts could have"


@pytest.mark.parametrize("name", ["unified", "pd", "pdv", "table", "auto", "plain"])
@pytest.mark.parametrize("verify_batch", [4, 16])
@pytest.mark.parametrize("proposer", [None, "ngram"])
def test_prompts_displace_nobody_who_decodes(name: str, verify_batch: int, proposer: str | None) -> None:
    """The prefill lane comes last: eight who decode all draft or are verified, and long prompts fill up the step."""
    cost = CostModel(Coefficients())
    policy = make_architecture(name, FixedController(2), cost)
    prompts = [view(10 + i, prefill_left=4000, length_bound=4000, max_length=5000) for i in range(4)]
    state = snapshot(
        *(view(slot, proposer=proposer) for slot in range(8)),
        *prompts,
        batch_size=16,
        prefill_chunk=4096,
        verify_batch=verify_batch,
        slo_gap=30.0,
        verifier_bytes=14_000_000_000,
    )
    plan = policy.plan(state)
    assert {*slots(plan, "draft"), *slots(plan, "verify")} >= set(range(8))
    chunks = [s.rows for b in (plan.verify, plan.prefill) if b for s in b.spans if s.start is not None]
    assert 0 < sum(chunks) < 4000
    passes = [Work(b.rows, sum(s.context for s in b.spans), *_chunks(b)) for b in (plan.verify, plan.prefill) if b]
    work = plan.work()
    loop = cost.draft_seconds(work.draft_steps, work.draft_rows, work.draft_context)
    assert loop + sum(map(cost.pass_seconds, passes)) <= 30e-3


def _chunks(batch: VerifyBatch) -> tuple[int, int]:
    """Rows of prompt chunks, and those times their contexts."""
    spans = [span for span in batch.spans if span.start is not None]
    return sum(span.rows for span in spans), sum(span.rows * span.context for span in spans)


# -- the path ----------------------------------------------------------------------------------------------------------


def test_the_path_of_a_request_that_is_preempted_once() -> None:
    one = request()
    way = [State.PREFILL, State.DECODE, State.VERIFY, State.DECODE, State.VERIFY, State.WAITING, State.PREFILL]
    for now, state in enumerate([*way, State.FINISHED], 6):
        assert one.enter(state, float(now)) == 1.0
        assert one.state is state and one.entered == now


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_only_the_steps_of_the_path_are_possible(before: State, after: State) -> None:
    one = request()
    one.state = before
    if after in PATH[before]:
        one.enter(after, 9.0)
        assert one.state is after
    else:
        with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
            one.enter(after, 9.0)
        assert one.state is before and one.entered == 5.0


def test_every_state_can_end_and_only_lanes_are_preempted() -> None:
    assert set(PATH) == set(State)
    for state, following in PATH.items():
        assert (State.FINISHED in following) == (state is not State.FINISHED)
        assert (State.WAITING in following) == (state.value in LANES)


@pytest.mark.parametrize("after", [State.DECODE, State.WAITING, State.FINISHED])
def test_leaving_the_verify_lane_leaves_the_draft_behind(after: State) -> None:
    one = request()
    one.state = State.VERIFY
    one.drafted(Draft(3, "model"))
    one.enter(after, 6.0)
    assert one.pending == 0 and one.draft.drafter is None


def test_lane_statistics() -> None:
    lane = LaneStats()
    for _ in range(3):
        lane.enter()
    for waited in (0.1, 0.2):
        lane.leave(waited)
    lane.ran(2)
    assert (lane.depth, lane.deepest, lane.passed, lane.batches, lane.largest) == (1, 3, 2, 1, 2)
    assert lane.wait(0.5) == 0.1 and lane.wait(0.99) == 0.2
    assert lane.summary()["wait_p99_ms"] == 200.0
    assert LaneStats().wait(0.95) == 0.0
