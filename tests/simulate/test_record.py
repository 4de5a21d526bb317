"""The simulator against reality: a run recorded on a GPU, and the same arrivals simulated with the costs it shows."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from verifypd.bench.workload import mixed
from verifypd.control.cost import CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.observe import StepTiming
from verifypd.simulate import engine
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import TrueCosts, gpu_settings

RECORD = json.loads((Path(__file__).parent / "data" / "h200-mixed-16.json").read_text())
CLOSE = 0.1
SECONDS = {"draft_us": "draft_seconds", "verify_us": "verify_seconds"}


def timings() -> list[StepTiming]:
    """What every recorded step did and took."""
    found = []
    for step in RECORD["steps"]:
        values = dict(zip(RECORD["columns"], step, strict=True))
        found.append(StepTiming(**{SECONDS.get(k, k): v * 1e-6 if k in SECONDS else v for k, v in values.items()}))
    return found


def test_the_formula_tells_what_recorded_steps_took() -> None:
    model = CostModel()
    model.padded = True
    model.fit(timings())
    errors = [abs(model.step_seconds(each) / each.device_seconds - 1.0) for each in timings()]
    assert statistics.median(errors) < 0.03 and sorted(errors)[int(0.95 * len(errors))] < 0.1


@pytest.mark.slow
def test_a_recorded_run_simulated_comes_to_the_same_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth: p50 and p95 of first tokens, time per token and gaps. The record is a little older than the
    planner: it padded passes with chunks in coarser steps, and believed the length of answers sooner, which is undone
    here. One that plans otherwise needs a record of its own."""
    monkeypatch.setattr(engine, "PRIOR_TRIALS", 1)
    model = CostModel()
    model.padded = True
    model.fit(timings())
    ratios = [each.device_seconds / model.step_seconds(each) for each in timings()]
    noise = statistics.stdev(math.log(ratio) for ratio in ratios)
    arrivals = [(a.at, a.prompt_tokens, a.output_tokens) for a in mixed(16, 14, 0).arrivals]
    settings = gpu_settings(batch_size=128, max_draft=4, head=True)
    found = []
    for seed in range(3):
        believed = CostModel(model.coefficients)
        policy = make_architecture("auto", make_controller("throughput", 4, believed), believed)
        truth = TrueCosts(model.coefficients, noise=noise)
        found.append(Simulation(policy, replay(arrivals, 0.8, seed=seed), truth, settings, seed=seed).run().summary())
    for name, recorded in RECORD["figures_ms"].items():
        simulated = statistics.fmean(each[name] for each in found)
        assert simulated == pytest.approx(recorded, rel=CLOSE), name
