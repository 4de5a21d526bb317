"""The prompt chunks that ride in a pass: forecast when drafts are weighed, and read when they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median

import pytest

from tests.control.views import prompt, snapshot, view
from verifypd.control.architectures import Unified
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import Observation
from verifypd.control.prompts import Reading, Room
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.throughput import ThroughputController
from verifypd.simulate.tables import h200

GPU = Coefficients()


class Listening(FixedController):
    """Drafts nothing, and keeps the chunks that it was told would ride."""

    def __init__(self) -> None:
        super().__init__(1)
        self.told: list[Reading] = []

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot, riding: Reading) -> dict[int, int]:
        self.told.append(riding)
        return {}


@pytest.mark.parametrize("lengths", [(3000, 200), (4000,) * 8])  # in the second the bound gives way
@pytest.mark.parametrize("factor", [1.2, 0.5])  # with 0.5 the decode queue is full: no prompt may end
def test_the_plan_and_its_forecast_take_the_same_chunk(lengths: tuple[int, ...], factor: float) -> None:
    """What rides when drafts are priced is what the step reads, where nothing is drafted."""
    controller = Listening()
    prompts = [prompt(40 + i, left) for i, left in enumerate(lengths)] + [prompt(60, 30)]
    views = [*(view(slot, slo_tpot=15.0) for slot in range(32)), *prompts]
    plan = Unified(controller, CostModel(GPU)).plan(
        snapshot(views, prefill_chunk=2048, batch_size=64, queue_factor=factor)
    )
    assert plan.verify is not None and plan.prefill is None
    spans = tuple(span for span in plan.verify.spans if span.start is not None)
    assert [told.spans for told in controller.told] == [spans] and controller.told[0].work.rows >= 200
    assert any(span.emits for span in spans) == (factor > 1.0)


HEAD = replace(GPU, base=4.6e-3, chunk_context=1.6e-9, draft_step=0.31e-3, draft_row=1.3e-6)


@pytest.mark.parametrize("costs", [GPU, HEAD, h200().coefficients], ids=["model", "head", "table"])
@pytest.mark.parametrize(("slo_ttft", "slo_tpot"), [(200.0, 15.0), (500.0, 4.0)], ids=["default", "tight"])
def test_drafts_are_those_that_the_chunk_that_is_read_asks_for(
    costs: Coefficients, slo_ttft: float, slo_tpot: float
) -> None:
    """The forecast is made before anything is drafted, and drafts change how much is worth reading: half of the chunks
    differ by more than 1 %, some threefold. It decides about drafts, and those come out the same."""
    noise, same, parts = random.Random(costs.draft_step), [], []
    for _ in range(100):
        cost = CostModel(costs)
        controller = ThroughputController(cost, 4)
        for _ in range(60):
            stood = sum(noise.random() < 0.8 for _ in range(4))
            controller.observe(Observation(999, 4, stood, stood + 1, False, False, 1.0, "model"))
        policy = Unified(controller, cost)
        policy.tokens_each = noise.choice([1.0, 2.5, 3.3])
        waiting = [prompt(200 + i, noise.randrange(10, 5000), slo_ttft=slo_ttft) for i in range(noise.randrange(1, 7))]
        views = [
            view(i, slo_tpot=slo_tpot, emitted=noise.randrange(100)) for i in range(noise.choice([1, 4, 16, 32, 64]))
        ]
        state = snapshot([*views, *waiting], prefill_chunk=2048, batch_size=128)
        forecast = policy.riding(views, state, Room(128 - len(views), 2048)).work
        twin = deepcopy(controller)
        plan = policy.plan(state)
        assert plan.verify is not None
        riding = policy.reading
        written = {span.slot: span.drafts for span in plan.draft.spans if span.drafts} if plan.draft else {}
        same.append(written == twin.draft_lengths(views, state, riding))
        parts.append(riding.work.rows / forecast.rows)
    assert sum(same) >= 95, sum(same)
    assert 0.8 < median(parts) < 1.25 and min(parts) > 0.5 and max(parts) < 8.0, (min(parts), median(parts), max(parts))
