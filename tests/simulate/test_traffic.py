"""Traffic for the simulator: one seed gives the same requests, and a workload arrives as it does at the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifypd.bench import workload
from verifypd.control.factory import make_architecture, make_controller
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import Acceptance, poisson, replay
from verifypd.simulate.world import Settings, TrueCosts

MIXED = Path(__file__).resolve().parents[2] / "benchmarks" / "workloads" / "mixed-16.json"


def test_workloads_repeat_and_have_long_prompts() -> None:
    slow, fast = (poisson(rate, 400, Acceptance(0.5), seed=1) for rate in (1.0, 10.0))
    assert [(a.prompt, a.output, a.stands) for a in slow] == [(a.prompt, a.output, a.stands) for a in fast]
    assert slow[-1].time == pytest.approx(10 * fast[-1].time)
    assert slow[-1].time == pytest.approx(400, rel=0.2)
    assert sum(a.prompt >= 1500 for a in slow) / 400 == pytest.approx(0.12, abs=0.05)
    assert sum(sum(a.stands) for a in slow) / sum(a.output for a in slow) == pytest.approx(0.5, abs=0.03)


def test_a_workload_file_arrives_as_it_does_at_the_real_engine() -> None:
    real = workload.read(MIXED).arrivals
    requests = [(a.at, a.prompt_tokens, a.output_tokens) for a in real]
    arrivals = replay(requests, 0.8, seed=1)
    assert [(a.time, a.prompt, a.output) for a in arrivals] == requests
    assert all(a.max_tokens == a.output == len(a.stands) for a in arrivals)
    tokens = [stands for a in arrivals for stands in a.stands]
    assert sum(tokens) / len(tokens) == pytest.approx(0.8, abs=0.01)
    assert replay(requests, 0.8, seed=1) == arrivals != replay(requests, 0.8, seed=2)


def test_a_given_request_ends_by_its_length() -> None:
    """The host knows where it ends, as of a real request with `max_tokens`: no draft goes beyond."""
    ends = []

    def watch(simulation: Simulation, snapshot: object, plan: object) -> None:
        ends.extend(view.max_length for view in simulation.snapshot().requests)

    policy = make_architecture("unified", make_controller("fixed", 4))
    report = Simulation(policy, replay([(0.0, 50, 30)], 1.0), TrueCosts(), Settings(), on_step=watch).run()
    assert set(ends) == {80}
    assert [outcome.tokens for outcome in report.outcomes] == [30]
