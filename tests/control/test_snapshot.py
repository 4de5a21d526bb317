"""Facts in, plan out: a snapshot is a value that no policy can change, and a plan is a value too."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests.control.views import snapshot, view
from verifypd.batch import DraftBatch, DraftSpan, VerifyBatch, VerifySpan
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import SHAPES, make_architecture, make_controller
from verifypd.control.snapshot import Plan, RequestView, Snapshot

SPAN = VerifySpan(slot=0, rows=1, drafts=0, start=None, emits=True, context=9)


@pytest.mark.parametrize("kind", [RequestView, Snapshot, Plan])
def test_what_crosses_the_border_is_frozen(kind: type) -> None:
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert frozen or issubclass(kind, tuple)


@pytest.mark.parametrize("name", ["plain", *SHAPES])
def test_a_policy_leaves_its_snapshot_as_it_was(name: str) -> None:
    cost = CostModel(Coefficients())
    policy = make_architecture(name, make_controller("throughput", 4, cost), cost)
    state = snapshot([view(0), view(1), view(2, prefill_left=300)], verify_batch=2)
    before = pickle.dumps(state)
    policy.plan(state)
    assert pickle.dumps(state) == before


@pytest.mark.parametrize("name", ["plain", *SHAPES])
def test_two_policies_that_saw_the_same_plan_the_same(name: str) -> None:
    """No clock, no chance: a plan follows from what was seen."""
    plans = []
    for _ in range(2):
        cost = CostModel(Coefficients())
        policy = make_architecture(name, make_controller("throughput", 4, cost), cost)
        views = [*(view(slot) for slot in range(9)), view(20, prefill_left=300)]
        plans.append([policy.plan(snapshot(views, step=step, verify_batch=2)) for step in range(40)])
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"emitted": 0}, 100.0),  # as much as others wrote
        ({"emitted": 30}, 70.0),
        ({"emitted": 300}, 300.0),  # as much again
        ({"emitted": 30, "max_length": 532}, 20.0),  # no more than there is room for
        ({"emitted": 30, "max_length": 512}, 1.0),
    ],
)
def test_how_much_a_request_is_expected_to_write_yet(changes: dict[str, int], left: float) -> None:
    assert view(0, **changes).expected_left(100.0) == left


def test_room_and_context_are_bounds() -> None:
    ahead = view(0, length_floor=513, length_bound=520, max_length=516)
    assert (ahead.room, ahead.context) == (3, 516)
    assert view(0, max_length=512).room == 0


def test_a_plan_says_whether_anybody_decodes() -> None:
    chunk = SPAN._replace(start=0)
    draft = DraftBatch("model", (DraftSpan(0, 2, 2, 3, 12, 1.0, None),))
    assert Plan().empty and not Plan().decodes
    assert Plan(verify=VerifyBatch((SPAN,))).decodes
    assert not Plan(verify=VerifyBatch((chunk,))).decodes and not Plan(prefill=VerifyBatch((chunk,))).decodes
    assert not Plan(draft=draft).empty and not Plan(draft=draft).decodes
