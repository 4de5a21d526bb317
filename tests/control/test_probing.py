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
from verifypd.control.tables import h200
from verifypd.control.throughput import ThroughputController


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


def test_look_ups_do_not_take_the_probes_of_a_model() -> None:
    """Look-ups cost next to nothing to try and a model with a lag much: both are tried, and neither for more than its
    share. What look-ups teach is not held against the model."""
    cost = CostModel(Coefficients(base=0.0, floor=1e-6, row=5e-3, context=0.0, draft_step=5e-3, draft_row=2e-4))
    controller = ThroughputController(cost, probe_share=0.005)
    copying = [view(i, proposer="ngram", draft_lag=0) for i in range(4)]
    drafting = [view(i, draft_lag=100) for i in range(4, 16)]
    tried = {"ngram": 0, "model": 0}
    for _ in range(6000):
        lengths = controller.draft_lengths([*copying, *drafting], snapshot([*copying, *drafting]))
        controller.observe_step(StepTiming(verify_requests=16, verify_rows=16, step_seconds=8e-2))
        names = {"ngram" if i < 4 else "model" for i in lengths}
        for name in names:
            tried[name] += 1
        assert len(names) <= 1 or controller.speculating
        for i in lengths:
            controller.observe(Observation(i, 1, 0, 1, False, False, 1.0, "ngram" if i < 4 else "model"))
    assert tried["model"] >= 3 and tried["ngram"] >= tried["model"]
    assert controller.prober.seconds / (6000 * 8e-2) <= 0.0051 + 0.01  # what was there at first included


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


@pytest.mark.parametrize(("running", "apart"), [(16, 65), (4, 9)])
def test_a_drafter_with_nothing_to_propose_is_asked_seldom_in_a_full_batch(running: int, apart: int) -> None:
    """And as often as ever as soon as the batch is no longer full."""
    prober = Prober(h200(), 8, 0.005)
    copying, drafting = [view(0, proposer="ngram")], [view(i) for i in range(running)]
    load = Load(running, float(running), 512.0 * running, 0.0, False, 0.0, 0.0, 0.0)
    for views in (copying, drafting):  # both are known
        prober.probe([(each, 1) for each in views], load, snapshot(views, batch_size=16))
    prober._purses["model"].credit = -1e9
    asked = []
    for step in range(200):
        state = snapshot(drafting, batch_size=16)
        prober.meet(state)
        if prober.ready:
            asked.append(step)
            prober.probe([(each, 1) for each in drafting], load, state)
        prober.save_up(8e-3)
    assert {later - earlier for earlier, later in itertools.pairwise(asked)} == {apart - 1}
    prober._purses["ngram"].rest = apart - 1
    prober.meet(snapshot(drafting[:2], batch_size=16))
    assert prober._purses["ngram"].rest == 8
