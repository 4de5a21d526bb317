"""Statistics against what is known: percentiles, a queue's closed form, planted slowdowns and planted nulls."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from verifypd.bench.figures import BIN, LEAST, ROUNDS, Outcome, Pool, Record, Targets, figures
from verifypd.bench.statistics import (
    COMPARED,
    FASTER,
    NONE,
    SLOWER,
    UNKNOWN,
    compare,
    curve,
    histogram,
    judge,
    own_noise,
    student,
)

STEPS = 8  # tokens of a simulated request


def simulated(noise: random.Random, slower: float = 1.0, requests: int = 30) -> Outcome:
    """A run whose times vary by 8 % from request to request, and by 1.5 % as a whole."""
    pace = slower * math.exp(noise.gauss(0.0, 0.015))

    def drawn(seconds: float) -> float:
        return seconds * pace * math.exp(noise.gauss(0.0, 0.08))

    records = []
    for i in range(requests):
        first, step = 0.1 * i + drawn(0.05), drawn(0.01)
        records.append(Record(0.1 * i, 0.1 * i, tuple(first + k * step for k in range(STEPS)), STEPS, 1, True))
    return Outcome(tuple(records), requests, sum(r.outputs[-1] - r.due for r in records) / 4)


def test_known_percentiles() -> None:
    """100 requests that take 10, 20, … 1000 ms, one output each."""
    records = tuple(Record(0.0, 0.0, (0.01 * i,), 1, 1, True) for i in range(1, 101))
    found = figures([Outcome(records, 100, 1.0)])
    assert [found[f"e2e_ms_{name}"] for name in ("p50", "p95", "p99")] == pytest.approx([500, 950, 990])
    assert found["e2e_ms_mean"] == pytest.approx(505)
    values = Pool([Outcome(records, 100, 1.0)]).times()["e2e"]
    assert curve(values)[50] == pytest.approx(0.5) and curve(values)[-1] == pytest.approx(1.0)
    bins = histogram(values)
    assert sum(bins["counts"]) == 100 and len(bins["edges"]) == len(bins["counts"]) + 1
    assert bins["edges"][0] == pytest.approx(0.01) and bins["edges"][-1] == pytest.approx(1.0)
    assert histogram(np.zeros(0)) == {"edges": [], "counts": []} and curve(np.zeros(0)) == []


def test_who_was_stopped_counts_until_then_and_who_failed_is_counted_apart() -> None:
    records = (
        Record(0.0, 0.0, (0.125, 0.25), 2, 1, True, prompt_tokens=7),
        Record(0.0, 0.0, (0.125, 0.5), 9, 1, False),  # cut off with the run, at 4 s
        Record(0.0, 0.0, (), 0, 0, False, stopped=3.0),  # timed out
        Record(0.0, 0.0, (), 0, 0, False, error="503"),
    )
    outcome = Outcome(records, 5, 4.0)  # one was never sent
    assert Outcome.unpacked(outcome.packed()) == outcome
    found = figures([outcome])
    assert (found["requests"], found["unfinished"], found["failed"]) == (5, 3, 1)
    assert found["e2e_ms_mean"] == pytest.approx((250 + 4000 + 3000) / 3)
    assert found["ttft_ms_p95"] == pytest.approx(3000)
    assert found["tok_s"] == pytest.approx(11 / 4) and found["tok_s_original"] == pytest.approx(2 / 4)
    assert found["prompt_tokens"] == 7
    assert figures([Outcome(records[3:], 1, 1.0)])["failed"] == 1  # nothing but failures


def test_goodput_holds_to_the_targets_given() -> None:
    outcome = Outcome((Record(0.0, 0.0, (0.3, 0.4), 2, 1, True), Record(0.0, 0.0, (0.6, 0.605), 2, 1, True)), 2, 2.0)
    assert figures([outcome])["goodput"] == 0.0  # 100 ms a token; 600 ms to the first
    assert figures([outcome], Targets(0.5, 0.2))["goodput"] == pytest.approx(0.5)
    assert figures([outcome], Targets(1.0, 0.2))["goodput"] == pytest.approx(1.0)


def test_a_queue_waits_as_its_closed_form_says() -> None:
    """M/D/1: Poisson arrivals, service of D s each: the mean wait is load * D / (2 * (1 - load))."""
    noise, service, load = random.Random(5), 0.01, 0.7
    at = free = 0.0
    records = []
    for _ in range(60_000):
        at += noise.expovariate(load / service)
        free = max(at, free) + service
        records.append(Record(at, at, (free,), 1, 1, True))
    found = figures([Outcome(tuple(records), len(records), free)])
    wait = load * service / (2 * (1 - load))
    assert found["e2e_ms_mean"] / 1e3 - service == pytest.approx(wait, rel=0.05)
    assert found["tok_s"] == pytest.approx(load / service, rel=0.02)


@pytest.mark.parametrize("freedom", [1, 2, 5, 10, 11, 30])
def test_students_t(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_null_is_found_to_differ_no_oftener_than_stated(seeds: int) -> None:
    """Seeds that differ by 3 % by chance: at most 5 in 100 comparisons say otherwise (2,000 are made)."""
    noise = np.random.default_rng(seeds)
    own = noise.normal(0.0, 0.03, (2000, seeds, 1))
    logs = np.concatenate([own, own + noise.normal(0.0, 0.01, (2000, seeds, ROUNDS))], axis=2)
    words = [judge("e2e_ms_mean", each).verdict for each in logs]
    assert 1 - words.count(NONE) / 2000 < 0.06


@pytest.mark.parametrize(("seeds", "least"), [(3, 0.75), (5, 0.99)])
def test_a_slowdown_of_a_tenth_is_found(seeds: int, least: float) -> None:
    noise = np.random.default_rng(seeds)
    own = math.log(1.1) + noise.normal(0.0, 0.03, (400, seeds, 1))
    logs = np.concatenate([own, own + noise.normal(0.0, 0.01, (400, seeds, ROUNDS))], axis=2)
    times = [judge("e2e_ms_mean", each).verdict for each in logs]
    rates = [judge("tok_s", -each).verdict for each in logs]
    assert times.count(SLOWER) / 400 > least and times == rates
    assert FASTER not in times


@pytest.mark.parametrize(("ratio", "word"), [(1.0009, NONE), (0.995, NONE), (1.02, SLOWER), (0.98, FASTER)])
def test_a_difference_below_one_per_cent_is_none(ratio: float, word: str) -> None:
    """Runs of a minute that repeat to a hundredth of a per cent differ for certain, by what matters to nobody."""
    logs = np.full((3, 1 + ROUNDS), math.log(ratio)) + np.array([[-1e-4], [0.0], [1e-4]])
    found = judge("e2e_ms_mean", logs)
    assert found.verdict == word and not found.low <= 1.0 <= found.high


def test_planted_differences_in_whole_runs() -> None:
    noise = random.Random(11)
    plain = [simulated(noise) for _ in range(5)]
    slower = compare([simulated(noise, 1.1) for _ in range(5)], plain)
    assert set(slower) == set(COMPARED)
    found = {
        name: slower[name].verdict for name in ("tok_s", "e2e_ms_mean", "e2e_ms_p95", "ttft_ms_p50", "tpot_ms_p50")
    }
    assert set(found.values()) == {SLOWER}, found
    assert slower["e2e_ms_mean"].low < 1.1 < slower["e2e_ms_mean"].high
    assert compare([simulated(noise, 0.9) for _ in range(5)], plain)["tok_s"].verdict == FASTER
    again = compare([simulated(noise) for _ in range(5)], plain)
    assert {each.verdict for each in again.values()} == {NONE}


def test_an_arm_beside_itself_is_no_different() -> None:
    runs = [simulated(random.Random(seed)) for seed in range(3)]
    found = compare(runs, runs)
    assert {each.verdict for each in found.values()} == {NONE}
    assert all(each.ratio == each.low == each.high == 1.0 for each in found.values())


def test_what_an_arm_differs_by_from_itself_widens_the_others() -> None:
    plain, slow = ([simulated(random.Random(seed), pace) for seed in range(4)] for pace in (1.0, 1.06))
    sure = compare(slow, plain)
    assert sure["e2e_ms_mean"].verdict == SLOWER
    noise = own_noise({name: each for name, each in sure.items() if name == "e2e_ms_mean"})
    assert compare(slow, plain, noise=noise)["e2e_ms_mean"].verdict == NONE
    assert compare(slow, plain, noise=noise)["e2e_ms_p95"] == sure["e2e_ms_p95"]


def test_one_seed_is_not_judged() -> None:
    found = compare([simulated(random.Random(0), 2.0)], [simulated(random.Random(0))])
    assert {each.verdict for each in found.values()} == {UNKNOWN}


def test_figures_that_one_arm_lacks_are_left_out() -> None:
    """One token a request: no time a token and no gap."""
    single = [Outcome((Record(0.0, 0.0, (0.1,), 1, 1, True),) * 3, 3, 0.1) for _ in range(2)]
    names = set(compare(single, single))
    assert "e2e_ms_p95" in names and not any(name.startswith(("tpot", "gap")) for name in names)
    failed = [Outcome((Record(0.0, 0.0, (), 0, 0, False, error="500"),), 1, 1.0)] * 2
    assert compare(failed, single) == {}


def test_simulated_runs_vary_as_they_say() -> None:
    times = [simulated(random.Random(seed), requests=60) for seed in range(3)]
    firsts = [r.outputs[0] - r.due for r in itertools.chain.from_iterable(t.records for t in times)]
    assert statistics.pstdev(map(math.log, firsts)) == pytest.approx(0.082, rel=0.25)


def test_good_shares_of_nothing_are_not_compared() -> None:
    """One good request on either side is enough."""
    noise = random.Random(5)
    runs = [simulated(noise) for _ in range(4)]
    strict = Targets(0.5, 1e-4)
    assert "good_share" not in compare(runs[:2], runs[2:], strict)
    assert set(compare(runs[:2], runs[2:], strict)) | {"good_share"} == set(COMPARED)
    first, *rest = runs[3].records
    quick = Outcome((Record(0.0, 0.0, (0.01,), 1, 1, True), *rest), len(rest) + 1, runs[3].seconds)
    assert compare(runs[:2], [runs[2], quick], strict)["good_share"].ratio < 1 and first.finished


def test_requests_that_fail_are_not_good() -> None:
    """Every second request is refused: half the share, whatever became of the others. Unsent ones count alike."""
    noise = random.Random(6)
    whole = [simulated(noise) for _ in range(3)]
    refused = Record(0.0, 0.0, (), 0, 0, False, error="503")
    half = [
        Outcome(tuple(refused if i % 2 else each for i, each in enumerate(run.records)), run.wanted, run.seconds)
        for run in whole
    ]
    found = compare(half, whole)["good_share"]
    assert (found.ratio, found.verdict) == (pytest.approx(0.5), SLOWER)
    unsent = [Outcome(run.records[:10], run.wanted, run.seconds) for run in whole]
    assert compare(unsent, whole)["good_share"].ratio == pytest.approx(1 / 3)


def test_gaps_are_compared_to_less_than_a_bin_of_the_bootstrap() -> None:
    """Steady gaps just on either side of a bin's edge: a thousandth of a difference is not the same 1 % every time."""

    def steady(gap: float) -> Outcome:
        outputs = tuple(gap * k for k in range(41))
        return Outcome(tuple(Record(0.0, 0.0, outputs, 41, 1, True) for _ in range(8)), 8, outputs[-1])

    edge = LEAST * math.exp(700 * BIN)
    below, above = [steady(edge * x) for x in (0.9999, 0.9997)], [steady(edge * x) for x in (1.0001, 1.0015)]
    for name in ("gap_ms_p50", "gap_ms_p99"):
        found = compare(above, below)[name]
        assert found.verdict == NONE and found.ratio == pytest.approx(1.001, abs=1e-4)
