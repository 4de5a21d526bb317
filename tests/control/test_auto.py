"""`auto`: finds the architecture that its costs favour, says why, does not flap, and keeps prompt chunks in bounds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from verifypd.control.chunks import Step, chunk_within

from tests.control.views import snapshot, view
from verifypd.batch import VerifyBatch
from verifypd.control.architectures import Architecture, Plain
from verifypd.control.auto import KEEP, Auto
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.control.throughput import ThroughputController
from verifypd.simulate.tables import h200

GPU = h200().coefficients


class World:
    """Requests that never end, with prompts that always wait if asked for. Runs whatever plan it is given."""

    def __init__(
        self,
        costs: Coefficients,
        requests: int,
        alpha: float,
        *,
        prompts: bool = False,
        two_devices: bool = False,
        seed: int = 0,
        **changes: Any,
    ) -> None:
        self.costs = CostModel(costs)
        self.alpha = alpha
        self.two_devices = two_devices
        self.changes = changes
        self.rng = random.Random(seed)
        self.views = {slot: view(slot, lane="decode") for slot in range(requests)}
        if prompts:
            self.views[requests] = view(requests, prefill_left=1 << 30, lane="prefill")
        self.now = 0.0
        self.steps = 0
        self.tokens = 0

    def snapshot(self) -> Snapshot:
        views = tuple(
            v for v in self.views.values() if not v.prefill_left or self.steps // 10 % 2
        )  # prompts come and go
        settings = {"verify_batch": 16, "verify_wait_ms": 1e6} | self.changes
        return snapshot(views, step=self.steps, now=self.now, **settings)

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
            self.views[slot] = replace(self.views[slot], pending=length, lane="verify", drafter="model")
        timing = StepTiming(
            draft_requests=len(drafted),
            draft_steps=max(drafted.values(), default=0),
            draft_rows=2 * len(drafted),
            draft_context=len(drafted) * 512.0,
            **self.work(plan.verify),
        )
        prefill = self.work(plan.prefill)
        noise = self.rng.lognormvariate(0, 0.02)
        timing = replace(
            timing,
            draft_seconds=noise * self.costs.draft_seconds(timing.draft_steps, timing.draft_rows, timing.draft_context),
            verify_seconds=noise * self.seconds(plan.verify),
            prefill_seconds=noise * self.seconds(plan.prefill),
            chunk_rows=timing.chunk_rows + prefill["chunk_rows"],
            chunk_context=timing.chunk_context + prefill["chunk_context"],
        )
        verified = {span.slot for span in plan.verify.spans} if plan.verify else set()
        passes = timing.verify_seconds + timing.prefill_seconds
        beside = self.two_devices and not verified & set(drafted)
        self.now += max(timing.draft_seconds, passes) if beside else timing.draft_seconds + passes
        policy.observe_step(timing)
        for span in plan.verify.spans if plan.verify else ():
            if span.start is None:
                self.judge(policy, span.slot)

    def work(self, batch: VerifyBatch | None) -> dict[str, Any]:
        spans = batch.spans if batch else ()
        chunks = [span for span in spans if span.start is not None]
        return {
            "verify_requests": len(spans) - len(chunks),
            "verify_rows": sum(span.rows for span in spans),
            "verify_context": float(sum(span.context for span in spans)),
            "chunk_rows": sum(span.rows for span in chunks),
            "chunk_context": float(sum(span.rows * span.context for span in chunks)),
        }

    def seconds(self, batch: VerifyBatch | None) -> float:
        work = self.work(batch)
        mixed = bool(work["chunk_rows"] and work["verify_requests"])
        return self.costs.verify_seconds(work["verify_rows"], work["verify_context"], work["chunk_context"], mixed)

    def judge(self, policy: Architecture, slot: int) -> None:
        length, accepted = self.views[slot].pending, 0
        while accepted < length and self.rng.random() < self.alpha:
            accepted += 1
        self.tokens += accepted + 1
        self.views[slot] = replace(self.views[slot], pending=0, lane="decode", drafter=None, served=self.steps)
        policy.observe(Observation(slot, length, accepted, accepted + 1, False, False, 1.0, "model"))


def auto(costs: Coefficients = GPU, **settings: Any) -> Auto:
    return Auto(ThroughputController(CostModel(costs)), **settings)


def test_plain_when_nothing_pays() -> None:
    world, policy = World(GPU, 16, 0.03), auto()
    world.run(policy, 300)
    assert policy.label == "plain"
    [*_, last] = policy.decisions
    assert (last.previous, last.architecture) == ("unified", "plain") and "margin" in last.reason
    assert last.predicted, "a decision says what it was based on"
    rate = world.run(policy, 300)
    plain = World(GPU, 16, 0.03).run(Plain(), 300)
    assert rate > 0.98 * plain


def test_unified_when_drafts_pay_and_plain_again_when_they_stop() -> None:
    world, policy = World(GPU, 16, 0.8), auto()
    gained = world.run(policy, 200)
    assert policy.label == "unified" and gained > 1.3 * World(GPU, 16, 0.8).run(Plain(), 200)
    world.alpha = 0.02
    world.run(policy, 300)
    assert policy.label == "plain"
    world.alpha = 0.8
    world.run(policy, 500)
    assert policy.label == "unified"
    assert [d.architecture for d in policy.decisions][-2:] == ["plain", "unified"]


def test_unified_wins_where_chunks_ride_for_little() -> None:
    world, policy = World(GPU, 8, 0.7, prompts=True, prefill_chunk=64), auto(adapt=False)
    world.run(policy, 300)
    assert policy.running == "unified"
    assert policy.predicted["unified"] > policy.predicted["pd"]


def test_pd_wins_where_mixed_passes_are_dear() -> None:
    costs = replace(GPU, mixed=20e-3)
    world, policy = World(costs, 8, 0.7, prompts=True, prefill_chunk=64), auto(adapt=False)
    world.run(policy, 500)
    assert policy.running == "pd", "learnt from its own steps: the belief knew nothing of it"
    assert any(d.architecture == "pd" and "faster" in d.reason for d in policy.decisions)
    assert len(policy.decisions) <= 3


def test_pd_wins_there_without_drafts_too() -> None:
    world, policy = World(replace(GPU, mixed=20e-3), 8, 0.02, prompts=True, prefill_chunk=64), auto(adapt=False)
    world.run(policy, 900)
    assert policy.running == "pd"


def test_at_rest_it_plans_as_plain_and_wakes_with_fresh_forecasts() -> None:
    world, policy = World(GPU, 16, 0.02), auto()
    world.run(policy, 300)
    assert policy.label == "plain" and not any(name.startswith("foretold") for name in policy.state())
    plain, same = Plain(), 0
    for _ in range(100):
        state, asked = world.snapshot(), policy.curious
        assert asked == policy.controller.curious, "it weighs nothing of its own"
        plan = policy.plan(state)
        same += plan == plain.plan(state)
        assert asked or plan.draft is None, "nobody was asked, so nothing is drafted"
        world.turn(policy, plan)
    assert same >= 95, "all but probes"
    stale, world.alpha = dict(policy.predicted), 0.85
    world.run(policy, 600)
    woken = next(d for d in policy.decisions[::-1] if d.architecture == "unified")
    assert woken.previous == "plain" and woken.predicted != stale
    assert policy.predicted["unified"] > 1.2 * stale["unified"] and "foretold_unified" in policy.state()


@pytest.mark.parametrize(("overlap", "running"), [(False, "unified"), (True, "pdv")])
def test_pdv_is_found_after_a_rest_though_drafts_in_line_do_not_pay(overlap: bool, running: str) -> None:
    costs = replace(GPU, floor=1e-3, row=3e-6, draft_step=3e-3, draft_context=0.0)
    policy, world = auto(costs, overlap=overlap), World(costs, 64, 0.02, two_devices=True)
    world.run(policy, 200)
    assert policy.label == "plain"
    world.alpha = 0.6
    world.run(policy, 900)
    assert policy.running == running and policy.label == ("pdv" if overlap else "plain")


def test_pdv_wins_with_two_devices_and_a_dear_draft() -> None:
    costs = replace(GPU, floor=1e-3, row=3e-6, draft_step=1.6e-3, draft_context=0.0)
    policy = auto(costs, overlap=True)
    world = World(costs, 64, 0.8, two_devices=True)
    world.run(policy, 120)
    assert policy.running == "pdv"
    here = world.run(policy, 80)
    alone = auto(costs)
    other = World(costs, 64, 0.8, two_devices=True)
    other.run(alone, 80)
    assert here > 1.05 * other.run(alone, 80)


def test_pdv_is_not_chosen_on_one_device() -> None:
    world, policy = World(GPU, 32, 0.8), auto()
    world.run(policy, 300)
    assert policy.running == "unified" and policy.predicted["pdv"] < policy.predicted["unified"]


def test_what_was_foretold_is_held_against_what_came() -> None:
    """Told that drafts run beside the verifier when they do not, it tries `pdv`, sees it fail and goes back."""
    costs = replace(GPU, floor=1e-3, row=3e-6, draft_step=1.6e-3, draft_context=0.0)
    policy = auto(costs, overlap=True)
    world = World(costs, 64, 0.8, two_devices=False)
    world.run(policy, 400)
    chosen = [d.architecture for d in policy.decisions]
    assert "pdv" in chosen and policy.running != "pdv"
    assert len(policy.decisions) <= 6, "and does not go round in circles"


def test_without_a_drafter_it_is_plain() -> None:
    world, policy = World(GPU, 4, 0.5, drafter=None), auto()
    world.run(policy, 40)
    assert policy.label == "plain" and policy.decisions[-1].reason == "no drafter"


def test_with_another_controller() -> None:
    world, policy = World(GPU, 4, 0.5, prompts=True), Auto(FixedController(2), CostModel(GPU))
    world.run(policy, 100)
    assert policy.running in policy.choices


def test_plans_are_those_of_the_chosen_architecture() -> None:
    policy = auto(adapt=False)
    twin = auto(adapt=False)
    state = World(GPU, 6, 0.5, prompts=True).snapshot()
    assert policy.plan(state) == twin.choices["unified"].plan(state)


def test_the_record_is_bounded() -> None:
    policy = auto()
    state = World(GPU, 2, 0.5).snapshot()
    for i in range(3 * KEEP):
        policy._switch(state, "unified", "plain" if i % 2 else "unified", "back and forth")
    assert len(policy.decisions) <= KEEP


def test_observations_reach_the_controller_once() -> None:
    policy = auto()
    assert isinstance(policy.controller, ThroughputController)
    policy.observe_step(StepTiming(verify_requests=1, verify_rows=1, verify_context=512.0, verify_seconds=5e-3))
    assert policy.cost.observations == 1 and policy.cost is policy.controller.cost
    policy.observe(Observation(3, 2, 1, 2, False, False, 1.0, "model"))
    assert policy.controller._heard == {3: 2}
    policy.forget(3, 2)
    assert policy.controller._heard == {}


# --- the prefill chunk ------------------------------------------------------------------------------------------------


def prompt(slot: int, **changes: Any) -> RequestView:
    return view(slot, prefill_left=5000, lane="prefill", **changes)


@pytest.mark.parametrize("requests", [1, 16, 32])
def test_a_chunk_rides_for_nothing_while_its_prompt_is_in_time(requests: int) -> None:
    policy = auto()
    short = replace(prompt(99, since_output=0.01), prefill_left=600)
    for _ in range(2):
        policy.plan(snapshot([*(view(i) for i in range(requests)), short], prefill_chunk=256))
    chosen = policy.controller.chosen if isinstance(policy.controller, ThroughputController) else None
    assert chosen is not None and policy.prefill_chunk is not None
    rows = requests + chosen.rows + policy.prefill_chunk
    assert policy.prefill_chunk == 128 or rows == pytest.approx(GPU.knee, abs=1.0), (
        "to the knee, but half of the setting"
    )


def test_the_smallest_setting_of_the_chunk_is_planned_with() -> None:
    policy = auto()
    policy.plan(snapshot([*(view(i) for i in range(250)), prompt(251, since_output=0.01)], prefill_chunk=1))
    assert policy.prefill_chunk is not None and 1 <= policy.prefill_chunk <= 4


def test_a_prompt_that_has_waited_keeps_pace_with_plain_decoding() -> None:
    """Steps with drafts are longer, so chunks are larger: as many prompt tokens a second as without drafts."""
    policy = auto()
    late = replace(prompt(1, since_output=0.12), prefill_left=2000)
    for _ in range(2):
        policy.plan(snapshot([view(0, slo_tpot=100.0), late], prefill_chunk=128))
    assert isinstance(policy.controller, ThroughputController) and policy.controller.stretch > 1.0
    assert policy.prefill_chunk == round(128 * policy.controller.stretch)


def test_prompts_that_would_be_late_may_stretch_a_step_that_emits_several_tokens() -> None:
    policy, cost = auto(), h200()
    late = prompt(1, since_output=0.12)  # 5,000 tokens: not done in time at the pace of plain decoding
    for _ in range(2):
        policy.plan(snapshot([view(i, slo_tpot=8.0) for i in range(16)] + [late], prefill_chunk=128))
    assert policy.prefill_chunk == 512 or policy.prefill_chunk > chunk_within(cost, 8e-3, Step(16, 16 * 512.0), 512)


def test_late_prompts_shorten_drafts_until_they_have_been_in_time_for_a_while() -> None:
    policy = auto()
    running = [view(i) for i in range(8)]
    late, early = prompt(99, since_output=0.12), replace(prompt(98, since_output=0.0), prefill_left=50)

    def longest(*prompts: RequestView) -> int:
        plan = policy.plan(snapshot([*running, *prompts], prefill_chunk=256))
        return max((span.drafts for span in plan.verify.spans), default=0) if plan.verify else 0

    for order in range(8):
        for _ in range(30):
            policy.observe(Observation(order, 4, 4, 5, False, False, 1.0, "model"))
    free = max(longest() for _ in range(3))
    assert free > 2
    assert longest(late) <= 2 and longest(early) <= 2  # one prompt after the other: no flapping
    assert longest() == free  # nobody waits
    assert longest(late) <= 2
    assert [longest(early) for _ in range(20)][-1] == free  # somebody always does, but nobody late


@pytest.mark.parametrize("running", ["unified", "pd", "pdv"])
def test_without_drafts_no_architecture_takes_more_of_late_prompts_than_plain(running: str) -> None:
    controller = ThroughputController(h200())
    auto = Auto(controller)
    auto.running = auto.label = running
    controller.speculating = False
    controller.chosen = controller.predict([view(0)], snapshot([view(0)]))[0]  # what a look leaves that drafts nothing
    late = [view(30 + i, prefill_left=3000, since_output=0.4) for i in range(20)]
    auto.plan(snapshot([*[view(i, slo_tpot=100.0) for i in range(8)], *late], prefill_chunk=512))
    assert not controller.speculating
    assert auto.prefill_chunk is not None and auto.prefill_chunk <= 512


def test_late_prompts_are_hurried_beside_drafts_of_a_fixed_length() -> None:
    auto = Auto(FixedController(4), h200())
    late = [view(30 + i, prefill_left=3000, since_output=0.4) for i in range(20)]
    auto.plan(snapshot([*[view(i, slo_tpot=100.0) for i in range(8)], *late], prefill_chunk=512))
    assert auto.prefill_chunk is not None and auto.prefill_chunk > 512


@pytest.mark.parametrize(("base", "chunk"), [(4e-3, 1024), (0.0, 256)])
def test_nobody_decoding_means_longer_chunks_where_fewer_passes_save_time(base: float, chunk: int) -> None:
    policy = auto(replace(GPU, base=base))
    policy.plan(snapshot([prompt(0)], prefill_chunk=256))
    assert policy.prefill_chunk == chunk


def test_the_queue_factor_moves_within_bounds() -> None:
    policy = auto()
    starved = snapshot([*(view(i) for i in range(3)), replace(prompt(9), prefill_left=1)], batch_size=8)
    for _ in range(400):
        policy.plan(starved)
    assert policy.queue_factor == 2.0
    crowded = snapshot([view(i, slo_tpot=15.0, since_output=1.0) for i in range(9)], batch_size=8)
    for _ in range(400):
        policy.plan(crowded)
    assert policy.queue_factor == 1.0
