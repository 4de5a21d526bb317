"""Survival curves: learn each request's acceptance, keep kinds apart, and come true as often as they say."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from verifypd.control.observe import Observation
from verifypd.control.survival import Kind, Survival, kind_of

KIND = kind_of(False, False, 1.0, "model")


def verdict(order: int, drafted: int, accepted: int, kind: Kind = KIND) -> Observation:
    temperature = (0.0, 0.3, 0.7, 1.0, 1.5)[kind[1]]
    return Observation(
        order, drafted, accepted, accepted + 1, kind[0] == "coupled", kind[0] == "greedy", temperature, kind[2]
    )


def draft(rng: random.Random, length: int, alpha: Callable[[int], float]) -> int:
    accepted = 0
    while accepted < length and rng.random() < alpha(accepted):
        accepted += 1
    return accepted


def feed(
    survival: Survival, rounds: int, alphas: list[float], slope: float = 0.0, seed: int = 0, kind: Kind = KIND
) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        for order, alpha in enumerate(alphas):
            length = rng.randint(1, 5)
            accepted = draft(rng, length, lambda i, alpha=alpha: alpha + slope * i)  # type: ignore[misc]
            survival.observe(verdict(order, length, accepted, kind))


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_learns_the_acceptance_of_a_request(alpha: float) -> None:
    survival = Survival(8)
    feed(survival, 300, [alpha])
    curve = survival.curve(0, KIND)
    assert curve[0] == pytest.approx(alpha, abs=0.13)
    assert len(curve) == 8 and all(a >= b >= 0 for a, b in pairwise(curve))


def test_requests_are_told_apart_and_newcomers_start_from_the_population() -> None:
    survival = Survival(4)
    feed(survival, 60, [0.9, 0.2] * 8)
    good = sum(survival.chance(order, KIND) for order in range(0, 16, 2)) / 8
    bad = sum(survival.chance(order, KIND) for order in range(1, 16, 2)) / 8
    assert good > 0.8 and bad < 0.3
    assert bad < survival.chance(99, KIND) < good
    survival.forget(0)
    assert survival.chance(0, KIND) == survival.chance(99, KIND)


def test_kinds_are_apart() -> None:
    survival = Survival(4)
    other = kind_of(False, True, 1.0, "model")
    feed(survival, 100, [0.9] * 4)
    feed(survival, 100, [0.3] * 4, kind=other)
    assert survival.mean(KIND) > 0.8 and survival.mean(other) < 0.4
    assert survival.chance(50, KIND) > 0.75 and survival.chance(51, other) < 0.45
    kinds = {kind_of(g, c, t, None) for g in (True, False) for c in (True, False) for t in (0.0, 0.6, 1.0, 2.0)}
    assert len(kinds) == 9, "greedy is one kind; both rules by temperature"


def test_calibration_error_shrinks() -> None:
    """Acceptance falls along the draft, which a running mean alone would not know."""
    rng = random.Random(2)
    alphas = [min(0.95, max(0.1, rng.gauss(0.65, 0.15))) for _ in range(32)]
    survival = Survival(8, prior=0.9)
    feed(survival, 2, alphas, slope=-0.08)
    early = survival.calibration_error
    feed(survival, 150, alphas, slope=-0.08, seed=1)
    assert survival.calibration_error < 0.05 < early
    assert survival.calibration_error < early / 2
    for foretold, came, trials in survival.reliability.rows():
        assert trials < 300 or foretold == pytest.approx(came, abs=0.08)


def test_the_fall_along_the_draft_is_learnt() -> None:
    survival = Survival(5)
    feed(survival, 400, [0.8] * 8, slope=-0.12)
    curve = survival.curve(0, KIND)
    conditional = [curve[0], *(b / a for a, b in pairwise(curve))]
    assert conditional[0] - conditional[3] > 0.15, "0.8 at the first position, 0.44 at the fourth"


def test_follows_a_change() -> None:
    survival = Survival(4)
    feed(survival, 100, [0.85])
    feed(survival, 30, [0.15], seed=1)
    assert survival.chance(0, KIND) < 0.4
    feed(survival, 40, [0.85], seed=2)
    assert survival.chance(0, KIND) > 0.6


def test_evidence_fades_without_drafts() -> None:
    survival = Survival(4)
    feed(survival, 60, [0.9, 0.9, 0.9, 0.05])
    low = survival.chance(3, KIND)
    for _ in range(300):
        survival.observe(verdict(3, 0, 0))
    assert survival.chance(3, KIND) > low + 0.2, "back towards its kind: it will be tried again"


def test_only_trials_count() -> None:
    """A draft of eight that fell at the first token is one trial, not eight."""
    a, b = Survival(8), Survival(8)
    for _ in range(50):
        a.observe(verdict(0, 8, 0))
        b.observe(verdict(0, 1, 0))
    assert a.chance(0, KIND) == pytest.approx(b.chance(0, KIND), abs=0.05)


def test_what_is_heard_over_a_long_rest_counts_for_no_more_than_is_remembered() -> None:
    survival = Survival(4)
    survival.overhear(0, KIND, 500, 1000)
    survival.overhear(0, KIND, 24, 24)
    assert survival.chance(0, KIND) > 0.7, "the last two dozen outweigh a thousand that were heard before"
    assert 0.4 < survival.mean(KIND) < 0.6, "but not in what is believed of everyone alike"


def test_the_typical_curve_is_the_mean_of_those_known_and_teaches_nothing():
    survival = Survival(4)
    assert survival.typical() == []
    feed(survival, 40, [0.9, 0.4])
    curves = [survival.curve(order, KIND) for order in (0, 1)]
    assert survival.typical() == pytest.approx([(a + b) / 2 for a, b in zip(*curves, strict=True)])
    assert survival.typical(most=1) == pytest.approx(curves[0])
    assert [survival.curve(order, KIND) for order in (0, 1)] == curves
