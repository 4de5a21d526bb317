"""Targets act: a tighter one is met better, an impossible one does no harm, and nobody starves for another's.

Twenty paired seeds, with the costs of the committed table; six for what nobody can meet at a lower rate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifypd.control.cost import CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.tuning import OVERDUE
from verifypd.simulate.engine import Simulation
from verifypd.simulate.report import Report
from verifypd.simulate.tables import h200
from verifypd.simulate.traffic import Acceptance, Arrival, poisson
from verifypd.simulate.world import Settings, TrueCosts

pytestmark = pytest.mark.xdist_group("targets")  # runs are made once

COSTS = h200().coefficients  # a 7B verifier with a 1.1B draft, of the measured table
SERVER = Settings(batch_size=128, max_draft=4, late=True)
RATE, REQUESTS = 40.0, 56  # requests a second, and of each run
SEEDS, FEW = range(20), range(6)


def serve(arrivals: list[Arrival], server: Settings, name: str = "auto", seed: int = 0) -> Report:
    cost = CostModel(COSTS)
    policy = make_architecture(name, make_controller("throughput", server.max_draft, cost), cost)
    return Simulation(policy, arrivals, TrueCosts(COSTS), server, seed=seed).run()


@cache
def summary(slo_ttft: float, slo_tpot: float, seed: int, rate: float) -> dict[str, float]:
    """Figures of one run of mixed traffic, in ms."""
    server = replace(SERVER, slo_ttft=slo_ttft, slo_tpot=slo_tpot)
    return serve(poisson(rate, REQUESTS, Acceptance(0.8), seed=seed), server, seed=seed).summary()


def figures(
    slo_ttft: float = 500.0, slo_tpot: float = 15.0, seeds: range = SEEDS, rate: float = RATE
) -> dict[str, float]:
    """Their means over seeds."""
    runs = [summary(slo_ttft, slo_tpot, seed, rate) for seed in seeds]
    return {name: mean(run[name] for run in runs) for name in ("ttft_p95", "tpot_p95", "unfinished")}


def falls(values: list[float], by: float) -> bool:
    """Whether each is no higher than the one before, within 1 %, and the last is lower than the first by that share."""
    return all(b <= 1.01 * a for a, b in zip(values, values[1:], strict=False)) and values[-1] <= (1 - by) * values[0]


@pytest.mark.slow
def test_first_tokens_come_earlier_with_a_tighter_target() -> None:
    values = [figures(slo_ttft=target)["ttft_p95"] for target in (500.0, 200.0, 100.0)]
    assert falls(values, by=0.10), values


@pytest.mark.slow
def test_tokens_come_faster_with_a_tighter_target() -> None:
    values = [figures(slo_tpot=target)["tpot_p95"] for target in (60.0, 15.0, 4.0)]
    assert falls(values, by=0.10), values


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "seeds"), [(RATE, SEEDS), (24.0, FEW)])
def test_an_impossible_target_does_no_harm(rate: float, seeds: range) -> None:
    best = min(figures(slo_ttft=target, seeds=seeds, rate=rate)["ttft_p95"] for target in (50.0, 100.0, 200.0))
    impossible = figures(slo_ttft=1.0, seeds=seeds, rate=rate)
    assert impossible["unfinished"] == 0
    assert impossible["ttft_p95"] <= 1.05 * best, (impossible["ttft_p95"], best)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["plain", "unified", "auto"]),
    load=st.floats(0.3, 0.9),
    target=st.sampled_from([200.0, 500.0]),
    slo_tpot=st.sampled_from([5.0, 15.0]),
    seed=st.integers(0, 999),
)
def test_long_prompts_starve_under_no_load_short_of_saturation(
    name: str, load: float, target: float, slo_tpot: float, seed: int
) -> None:
    """Every first token comes within the time after which a prompt goes first, and a few steps.

    What the server can take is found by giving it everything at once.
    """
    count, server = 60, replace(SERVER, slo_ttft=target, slo_tpot=slo_tpot)
    capacity = count / serve(poisson(math.inf, count, Acceptance(0.8), seed=seed), server, name).seconds
    report = serve(poisson(load * capacity, count, Acceptance(0.8), seed=seed), server, name)
    waits = [math.inf if o.first is None else 1e3 * (o.first - o.arrival) for o in report.outcomes]
    assert max(waits) <= OVERDUE * target + 10 * server.slo_gap
