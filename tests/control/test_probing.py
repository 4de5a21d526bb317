"""Probes cost no more than their share, are fewer where nobody is idle, and still find out when drafting would pay."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.control.views import snapshot, view
from tests.control.world import World
from verifypd.control.allocation import Load
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.probing import Prober
from verifypd.control.throughput import ThroughputController
from verifypd.simulate.tables import h200


def test_probes_are_bounded() -> None:
    world = World(8, lambda step, i: 0.0)
    controller = ThroughputController(h200(), probe_share=0.01)
    world.run(controller, 200)
    spent, start = controller.prober.seconds, world.time
    world.run(controller, 2000)
    share = (controller.prober.seconds - spent) / (world.time - start)
    assert 0.002 < share <= 0.0101 and controller.prober.probes > 20
    off = ThroughputController(h200(), probe_share=0.0)
    world = World(8, lambda step, i: 0.0)
    world.run(off, 300)
    _, means = world.run(off, 300)
    assert not any(means), "no share, no probes"


@pytest.mark.parametrize("batch_size", [32, 256])
def test_a_full_batch_is_probed_less_and_a_change_is_still_noticed(batch_size: int) -> None:
    """Nobody is idle there: what a probe takes, others lose."""
    world = World(32, lambda step, i: 0.0 if step < 1000 else 0.85, batch_size=batch_size)
    controller = ThroughputController(h200())
    world.run(controller, 200)
    before, start = controller.prober.seconds, world.time
    world.run(controller, 800)
    share = (controller.prober.seconds - before) / (world.time - start)
    assert not controller.speculating
    assert 0.0005 < share < 0.0026 if batch_size == 32 else 0.003 < share < 0.0051
    _, means = world.run(controller, 500)
    assert controller.speculating and sum(means[-50:]) / 50 > 2, "it has not come back"


def test_look_ups_beside_a_model_are_never_probed() -> None:
    """The text tells how they would fare. The model is, and for no more than its share."""
    cost = CostModel(Coefficients(base=0.0, floor=1e-6, row=5e-3, context=0.0, draft_step=5e-3, draft_row=2e-4))
    controller = ThroughputController(cost, probe_share=0.005)
    copying = [view(i, proposer="ngram", draft_lag=0, overheard=(0, 1)) for i in range(4)]
    drafting = [view(i, draft_lag=100) for i in range(4, 16)]
    views, tried = [*copying, *drafting], 0
    for _ in range(6000):
        lengths = controller.draft_lengths(views, snapshot(views, copier="ngram"))
        controller.observe_step(StepTiming(verify_requests=16, verify_rows=16, step_seconds=8e-2))
        assert controller.speculating or all(i >= 4 for i in lengths)
        for i in lengths:
            controller.observe(Observation(i, 1, 0, 1, False, False, 1.0, "ngram" if i < 4 else "model"))
            tried += 1
    assert tried >= 3 and not controller.speculating
    assert controller.prober.seconds / (6000 * 8e-2) <= 0.0051 + 0.01  # what was there at first included


@pytest.mark.parametrize(("stood", "drafts"), [(0, False), (4, False), (16, True)])
def test_look_ups_that_the_text_bears_out_are_begun_with(stood: int, drafts: bool) -> None:
    """Nothing is drafted, and of 16 tokens that could have been looked up so many came: a row pays above two thirds."""
    cost = CostModel(Coefficients(base=4e-2, floor=1e-6, row=5e-3, context=0.0, draft_step=5e-3, draft_row=2e-4))
    controller = ThroughputController(cost, probe_share=0.0)
    controller.speculating = False
    for _ in range(200):
        views = [view(i, proposer="ngram", greedy=True, overheard=(stood, 16)) for i in range(16)]
        lengths = controller.draft_lengths(views, snapshot(views, copier="ngram"))
        controller.observe_step(StepTiming(verify_requests=16, verify_rows=16, step_seconds=12e-2))
        if lengths:
            break
    assert bool(lengths) == drafts == controller.speculating


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
def test_probes_are_bounded_where_they_stand_and_drafting_still_never_pays(alpha: float) -> None:
    """A probe that stands earns its price back, but only as much again as the share: a row costs all it can bring."""
    cost = CostModel(Coefficients(base=0.0, floor=1e-6, row=5e-3, context=0.0, draft_step=2e-3, draft_context=0.0))
    controller = ThroughputController(cost, probe_share=0.005)
    views = [view(i) for i in range(16)]
    spent = seconds = 0.0
    for step in range(3000):
        lengths = controller.draft_lengths(views, snapshot(views))
        seconds += cost.verify_seconds(16 + sum(lengths.values()), 0.0)
        for i in lengths:
            accepted = int(random.Random(f"{step}/{i}").random() < alpha)
            controller.observe(Observation(i, 1, accepted, accepted + 1, False, False, 1.0, "model"))
        if step == 500:
            spent, seconds = controller.prober.seconds, 0.0
    assert not controller.speculating
    assert controller.prober.worth == 0.05, "nothing is gained even where every draft stands"
    assert (controller.prober.seconds - spent) / seconds <= 0.001


@pytest.mark.parametrize(("running", "apart"), [(16, 64), (4, 8)])
def test_where_nobody_can_be_probed_the_purse_rests_longer_in_a_full_batch(running: int, apart: int) -> None:
    """And is looked into as often as ever as soon as the batch is no longer full."""
    prober = Prober(h200(), 8, 0.005)
    copying = [view(i, proposer="ngram") for i in range(running)]
    load = Load(running, float(running), 512.0 * running, 0.0, False, 0.0, 0.0, 0.0)
    asked = []
    for step in range(200):
        state = snapshot(copying, batch_size=16)
        prober.meet(state)
        if prober.ready:
            asked.append(step)
            assert not prober.probe([(each, 1) for each in copying], load, state)
        prober.save_up(8e-3)
    assert {later - earlier for earlier, later in itertools.pairwise(asked)} == {apart}
    prober.purse.rest = apart
    prober.meet(snapshot(copying[:2], batch_size=16))
    assert prober.purse.rest == 8
