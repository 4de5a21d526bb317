"""Lanes as queues: views, order of service, token budgets; and the path of a request through them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.test_architectures import snapshot, view
from verifypd.config import LANES
from verifypd.control.lanes import LaneView, allot, in_turn, lane_views
from verifypd.inflight import Draft
from verifypd.metrics.stats import LaneStats
from verifypd.request import PATH, Request, SamplingParams, State


def request() -> Request:
    return Request("r", [1, 2], SamplingParams(), seed=0, max_length=10, arrival=5.0)


def test_lanes_see_depth_rows_and_the_oldest_wait() -> None:
    lanes = lane_views(
        snapshot(
            view(0, lane="prefill", prefill_left=40, waited=0.2),
            view(1, lane="prefill", prefill_left=2, waited=0.3),
            view(2, lane="verify", pending=3, waited=0.01),
            view(3),
        )
    )
    assert set(lanes) == set(LANES)
    assert (lanes["prefill"].depth, lanes["prefill"].tokens, lanes["prefill"].oldest) == (2, 42, 0.3)
    assert (lanes["verify"].depth, lanes["verify"].tokens) == (1, 4)
    assert (lanes["decode"].depth, lanes["decode"].tokens) == (1, 1)
    assert lanes["prefill"].overdue and not lanes["decode"].overdue


def test_strict_priority_until_a_lane_is_overdue() -> None:
    lanes = {name: LaneView(depth=1, tokens=10, oldest=0.1, patience=1.0) for name in LANES}
    assert in_turn(lanes) == ["decode", "verify", "prefill"]
    lanes["prefill"] = LaneView(depth=1, tokens=10, oldest=1.5, patience=1.0)
    assert in_turn(lanes) == ["prefill", "decode", "verify"]
    lanes["verify"] = LaneView(depth=1, tokens=10, oldest=2.0, patience=1.0)
    assert in_turn(lanes) == ["verify", "prefill", "decode"]
    assert in_turn({"verify": LaneView()}) == []


def test_what_higher_lanes_leave_goes_down() -> None:
    lanes = {
        "decode": LaneView(depth=4, tokens=4),
        "verify": LaneView(depth=8, tokens=40),
        "prefill": LaneView(depth=2, tokens=1000),
    }
    assert allot(lanes, 100) == {"decode": 4, "verify": 40, "prefill": 56}
    assert allot(lanes, 40)["prefill"] >= 5, "a lane with work is never left without tokens"


def test_a_longer_queue_and_a_greater_weight_get_more() -> None:
    def share(depth: int, weight: float) -> int:
        lanes = {
            "verify": LaneView(depth=30, tokens=1000),
            "prefill": LaneView(depth=depth, tokens=1000),
        }
        return allot(lanes, 200, [("prefill", weight), ("verify", 1.0)])["prefill"]

    assert share(1, 1.0) < share(10, 1.0) < share(20, 1.0)
    assert share(5, 1.0) < share(5, 3.0)
    assert share(30, 1.0) == 100


def test_ageing_puts_an_overdue_lane_first() -> None:
    young = {
        "verify": LaneView(depth=8, tokens=500),
        "prefill": LaneView(depth=1, tokens=500, oldest=0.1, patience=0.25),
    }
    old = {**young, "prefill": LaneView(depth=1, tokens=500, oldest=0.3, patience=0.25)}
    assert allot(young, 128) == {"verify": 114, "prefill": 14}, "a ninth: one of nine waits for it"
    assert allot(old, 128) == {"verify": 64, "prefill": 64}


LANE = st.builds(
    LaneView,
    depth=st.integers(0, 20),
    tokens=st.integers(1, 500),
    oldest=st.floats(0, 2),
    patience=st.floats(0, 2),
)


@given(
    parts=st.tuples(LANE, LANE, LANE),
    tokens=st.integers(3, 400),
    weights=st.lists(st.tuples(st.sampled_from(LANES), st.floats(0.1, 10)), max_size=3),
)
def test_no_lane_starves_and_the_budget_holds(parts, tokens, weights) -> None:
    lanes = dict(zip(LANES, parts, strict=True))
    shares = allot(lanes, tokens, weights)
    assert sum(shares.values()) <= tokens
    for name, lane in lanes.items():
        if lane.depth:
            assert 1 <= shares[name] <= lane.tokens
        else:
            assert name not in shares
    wanted = sum(lane.tokens for lane in lanes.values() if lane.depth)
    assert sum(shares.values()) == min(tokens, wanted), "nothing is left lying that somebody wants"


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
