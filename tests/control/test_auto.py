"""Drafting or not at run time: what it runs, what it calls that, and why; in a world whose costs can be planted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.control.views import snapshot, view
from verifypd.batch import VerifyBatch
from verifypd.control.architectures import Architecture
from verifypd.control.auto import KEPT, Auto
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel, Work
from verifypd.control.factory import make_architecture
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.snapshot import Plan, Snapshot
from verifypd.control.throughput import ThroughputController

GPU = Coefficients()


class World:
    """Requests that never end on a machine with planted costs; drafts stand with one chance."""

    def __init__(
        self,
        costs: Coefficients,
        requests: int,
        alpha: float,
        *,
        prompts: bool = False,
        **changes: Any,
    ) -> None:
        self.costs = CostModel(costs)
        self.alpha = alpha
        self.changes: dict[str, Any] = {"verify_batch": max(1, requests // 2)} | changes
        self.views = {i: view(i, slo_tpot=15.0) for i in range(requests)}
        if prompts:
            self.views[requests] = view(requests, prefill_left=10**7)
        self.rng = random.Random(0)
        self.now, self.tokens, self.steps, self.verdicts = 0.0, 0, 0, 0

    def snapshot(self) -> Snapshot:
        settings = {"verify_wait_ms": 1e6, "emitted": self.tokens, "verdicts": self.verdicts} | self.changes
        return snapshot(tuple(self.views.values()), step=self.steps, now=self.now, **settings)

    def run(self, policy: Architecture, steps: int) -> float:
        """Tokens a second."""
        start, tokens = self.now, self.tokens
        for _ in range(steps):
            self.turn(policy, policy.plan(self.snapshot()))
        return (self.tokens - tokens) / (self.now - start)

    def turn(self, policy: Architecture, plan: Plan) -> None:
        self.steps += 1
        drafted = {span.slot: span.drafts for span in plan.draft.spans if span.drafts} if plan.draft else {}
        for slot, length in drafted.items():
            self.views[slot] = self.views[slot]._replace(pending=length, drafter="model")
        verify, prefill = self.work(plan.verify), self.work(plan.prefill)
        longest, caught_up, context = max(drafted.values(), default=0), 2 * len(drafted), len(drafted) * 512.0
        noise = self.rng.lognormvariate(0, 0.02)
        timing = StepTiming(
            draft_requests=len(drafted),
            draft_steps=longest,
            draft_rows=caught_up,
            draft_context=context,
            verify_requests=sum(span.start is None for span in plan.verify.spans) if plan.verify else 0,
            verify_rows=int(verify.rows),
            verify_context=verify.context,
            chunk_rows=int(verify.chunk_rows + prefill.chunk_rows),
            chunk_context=verify.chunk_context + prefill.chunk_context,
            draft_seconds=noise * self.costs.draft_seconds(longest, caught_up, context),
            verify_seconds=noise * self.costs.pass_seconds(verify),
            prefill_seconds=noise * self.costs.pass_seconds(prefill),
        )
        self.now += timing.draft_seconds + timing.verify_seconds + timing.prefill_seconds
        policy.observe_step(timing)
        for span in plan.verify.spans if plan.verify else ():
            if span.start is None:
                self.judge(policy, span.slot)

    @staticmethod
    def work(batch: VerifyBatch | None) -> Work:
        work = Work()
        for span in batch.spans if batch else ():
            chunk = span.rows if span.start is not None else 0
            work += Work(span.rows, span.context, chunk, chunk * span.context)
        return work

    def judge(self, policy: Architecture, slot: int) -> None:
        length, accepted = self.views[slot].pending, 0
        while accepted < length and self.rng.random() < self.alpha:
            accepted += 1
        self.tokens += accepted + 1
        self.verdicts += 1
        self.views[slot] = self.views[slot]._replace(pending=0, drafter=None, served=self.steps)
        policy.observe(Observation(slot, length, accepted, accepted + 1, False, False, 1.0, "model"))


def auto(costs: Coefficients | None = GPU, max_draft: int = 4) -> Auto:
    cost = CostModel(costs)
    return Auto(ThroughputController(cost, max_draft), cost)


# -- plain or unified --------------------------------------------------------------------------------------------------


def test_plain_when_nothing_pays() -> None:
    world, policy = World(GPU, 16, 0.03), auto()
    world.run(policy, 200)
    assert policy.label == policy.ran == "plain" and policy.state()["architecture"] == "plain"
    [*_, last] = policy.decisions
    assert (last.previous, last.architecture) == ("unified", "plain")
    assert "drafting predicted to gain" in last.reason
    rate = world.run(policy, 200)
    assert rate > 0.98 * World(GPU, 16, 0.03).run(make_architecture("plain", FixedController(0), CostModel(GPU)), 200)


@pytest.mark.slow
def test_unified_when_drafts_pay_and_plain_again_when_they_stop() -> None:
    world, policy = World(GPU, 16, 0.8), auto()
    gained = world.run(policy, 200)
    assert policy.label == policy.ran == "unified"
    assert gained > 1.3 * World(GPU, 16, 0.8).run(make_architecture("plain", FixedController(0), CostModel(GPU)), 200)
    world.alpha = 0.02
    world.run(policy, 200)
    assert policy.label == "plain"
    world.alpha = 0.9
    world.run(policy, 1500)
    assert policy.label == "unified"
    assert [d.architecture for d in policy.decisions][-2:] == ["plain", "unified"]


def test_a_probe_is_a_step_of_unified_and_no_change_of_mind() -> None:
    world, policy = World(GPU, 16, 0.02), auto()
    world.run(policy, 200)
    decided, probes = policy.decided, 0
    for _ in range(400):
        plan = policy.plan(world.snapshot())
        probes += plan.draft is not None
        assert policy.ran == policy.state()["architecture"] == ("plain" if plan.draft is None else "unified")
        world.turn(policy, plan)
    assert probes > 0 and policy.decided == decided and policy.label == "plain"


def test_the_reason_of_a_decision_has_the_controllers_own_gain() -> None:
    """Not what it says of itself in `state`, which is for people."""
    controller = FixedController(2)
    policy = Auto(controller, CostModel(GPU))
    controller.length, controller.gain = 0, 0.75
    policy.plan(World(GPU, 4, 0.5).snapshot())
    assert policy.decisions[-1].reason == "drafting predicted to gain -25.0 %"


def test_while_plain_it_plans_as_plain_does() -> None:
    world, policy = World(GPU, 16, 0.02), auto()
    world.run(policy, 200)
    plain, same = make_architecture("plain", policy.controller, policy.cost), 0
    for _ in range(100):
        state, asked = world.snapshot(), policy.controller.may_draft
        plan = policy.plan(state)
        same += plan == plain.plan(state)
        assert asked or plan.draft is None, "nobody was asked, so nothing is drafted"
        world.turn(policy, plan)
    assert same >= 90, "all but probes"


def test_without_a_drafter_it_is_plain() -> None:
    world, policy = World(GPU, 4, 0.5, drafter=None), auto()
    world.run(policy, 40)
    assert policy.label == "plain" and policy.decisions[-1].reason == "no drafter"


def test_a_prompt_alone_changes_no_label() -> None:
    """Nobody decodes, so nothing tells whether drafting would pay."""
    policy = auto()
    policy.plan(snapshot([view(0, prefill_left=100)]))
    assert policy.label == "unified" and not policy.decisions


def test_prompts_are_never_read_apart_from_those_who_decode() -> None:
    """A pass over both reads the weights once. That two would be faster is an error of the fitted costs."""
    costs = replace(GPU, mixed=20e-3)
    world, policy = World(costs, 8, 0.8, prompts=True), auto(costs)
    for _ in range(100):
        plan = policy.plan(world.snapshot())
        assert plan.prefill is None and plan.verify is not None
        world.turn(policy, plan)


def test_it_does_not_go_round_in_circles() -> None:
    world, policy = World(GPU, 8, 0.8, prompts=True), auto()
    world.run(policy, 100)
    assert policy.decided == len(policy.decisions) <= 2


# -- the record --------------------------------------------------------------------------------------------------------


def test_plans_are_those_of_unified() -> None:
    policy, cost = auto(), CostModel(GPU)
    twin = make_architecture("unified", ThroughputController(cost, 4), cost)
    state = World(GPU, 6, 0.5, prompts=True).snapshot()
    assert policy.plan(state) == twin.plan(state)
    assert policy.why() == twin.why() != {}


def test_the_record_is_bounded() -> None:
    world, policy = World(GPU, 2, 0.5, drafter=None), Auto(FixedController(2), CostModel(GPU))
    for turn in range(2 * KEPT + 10):  # the drafter comes and goes
        policy.plan(replace(world.snapshot(), drafter="model" if turn % 2 else None))
    assert len(policy.decisions) == KEPT < policy.decided


def test_with_another_controller() -> None:
    world, policy = World(GPU, 4, 0.5, prompts=True), Auto(FixedController(2), CostModel(GPU))
    world.run(policy, 100)
    assert policy.ran == "unified"


def test_steps_and_verdicts_are_learnt_from_once() -> None:
    policy = auto()
    twin = CostModel(GPU)
    timing = StepTiming(verify_requests=1, verify_rows=1, verify_context=512.0, verify_seconds=9e-3)
    policy.observe_step(timing)
    twin.observe(timing)
    assert policy.cost.factors == twin.factors
    assert isinstance(policy.controller, ThroughputController) and policy.cost is policy.controller.cost
