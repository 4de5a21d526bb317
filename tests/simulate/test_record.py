"""The simulator against reality: runs recorded on a GPU, and the same arrivals simulated with the costs they show.

Recorded steps are planned and padded as 86b7a45 did, simulated ones as today: a difference may be the simulator's or
the policy's.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench.workload import mixed
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.observe import StepTiming
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import TrueCosts, gpu_settings

DATA = Path(__file__).parent / "data"
RECORDS: list[dict[str, Any]] = [json.loads((DATA / f"h200-mixed-16-seed{seed}.json").read_text()) for seed in (0, 1)]
CLOSE = 0.1
WARM_UP = [8] * 16  # tokens of the answers before the first run, which the planner had learnt from


def timings(record: dict[str, Any]) -> list[StepTiming]:
    """What every recorded step did and took."""
    names = [name.replace("_us", "_seconds") for name in record["columns"]]
    steps = (dict(zip(names, step, strict=True)) for step in record["steps"])
    return [
        StepTiming(**{name: value * 1e-6 if name.endswith("_seconds") else value for name, value in step.items()})
        for step in steps
    ]


def fitted(record: dict[str, Any]) -> CostModel:
    """The formula, fitted to what a run's steps took."""
    model = CostModel()
    model.padded = True
    return model.fit(timings(record))


@pytest.mark.parametrize("record", RECORDS, ids=["first", "second"])
def test_the_formula_tells_what_recorded_steps_took(record: dict[str, Any]) -> None:
    model = fitted(record)
    errors = [abs(model.step_seconds(each) / each.device_seconds - 1.0) for each in timings(record)]
    assert statistics.median(errors) < 0.03 and sorted(errors)[int(0.95 * len(errors))] < 0.1


def simulated(record: dict[str, Any], answered: list[int], seeds: int = 3) -> dict[str, float]:
    """What the simulator makes of a run's arrivals: steps cost what they did, and the planner believes what the engine
    had measured at its start. answered: tokens of the answers before it."""
    model = fitted(record)
    ratios = [each.device_seconds / model.step_seconds(each) for each in timings(record)]
    truth = TrueCosts(model.coefficients, noise=statistics.stdev(math.log(ratio) for ratio in ratios))
    arrivals = [(a.at, a.prompt_tokens, a.output_tokens) for a in workload(record)]
    settings = gpu_settings(batch_size=record["batch_size"], max_draft=4, head=True)
    found = []
    for seed in range(seeds):
        believed = CostModel(Coefficients(**record["costs_at_start"]))
        policy = make_architecture("auto", make_controller("throughput", 4, believed), believed)
        run = Simulation(policy, replay(arrivals, record["alpha"], seed=seed), truth, settings, seed=seed)
        run.ended, run.ended_tokens = len(answered), sum(answered)
        found.append(run.run().summary())
    return {
        name: statistics.fmean(each[name.replace("_ms", "")] for each in found) / value
        for name, value in record["figures"].items()
    }


def workload(record: dict[str, Any]) -> Any:
    return mixed(record["rate"], record["seconds"], record["seed"]).arrivals


@pytest.mark.slow
def test_recorded_runs_simulated_come_to_the_same_latencies() -> None:
    """Within a tenth, each run by itself: p50 and p95 of first tokens, time per token and gaps."""
    first, second = RECORDS
    before = simulated(first, WARM_UP)
    after = simulated(second, WARM_UP + [a.output_tokens for a in workload(first)])
    for found in (before, after):
        assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=CLOSE)
