"""Acceptance: learnt by position and by kind, each request's excess pulled to its kind, and as true as it says."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from itertools import pairwise
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifypd.control.acceptance import Acceptance, Kind, Mean, kind_of
from verifypd.control.observe import Observation
from verifypd.control.tuning import KIND_TRIALS, PRIOR, PRIOR_TRIALS

KIND = kind_of(False, False, 1.0, "model")


def verdict(request: int, drafted: int, accepted: int, kind: Kind = KIND) -> Observation:
    temperature = (0.0, 0.3, 0.7, 1.0, 1.5)[kind[1]]
    return Observation(
        request, drafted, accepted, accepted + 1, kind[0] == "coupled", kind[0] == "greedy", temperature, kind[2]
    )


def draft(rng: random.Random, length: int, alpha: Callable[[int], float]) -> int:
    accepted = 0
    while accepted < length and rng.random() < alpha(accepted):
        accepted += 1
    return accepted


def feed(
    acceptance: Acceptance, rounds: int, alphas: list[float], slope: float = 0.0, seed: int = 0, kind: Kind = KIND
) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        for request, alpha in enumerate(alphas):
            length = rng.randint(1, 5)
            accepted = draft(rng, length, lambda i, alpha=alpha: alpha + slope * i)  # type: ignore[misc]
            acceptance.observe(verdict(request, length, accepted, kind))


# -- by position -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_the_acceptance_of_a_kind_is_learnt(alpha: float) -> None:
    acceptance = Acceptance(8)
    feed(acceptance, 60, [alpha] * 8)
    curve = acceptance.curve(99, KIND)
    assert curve[0] == pytest.approx(alpha, abs=0.07)
    assert acceptance.mean() == pytest.approx(alpha, abs=0.05)
    assert len(curve) == 8 and all(a >= b > 0.0 for a, b in pairwise(curve))


def test_each_position_has_a_mean_of_its_own() -> None:
    """Chances of 0.9, 0.7, 0.5, 0.3: survival is their running product."""
    acceptance = Acceptance(4)
    feed(acceptance, 120, [0.9] * 8, slope=-0.2)
    survival = acceptance.curve(99, KIND)
    chances = [survival[0], *(b / a for a, b in pairwise(survival))]
    assert chances == pytest.approx([0.9, 0.7, 0.5, 0.3], abs=0.1)


def test_a_position_that_nobody_has_reached_is_as_the_last_that_somebody_has() -> None:
    acceptance = Acceptance(6)
    for _ in range(200):
        acceptance.observe(verdict(0, 2, 2))
    survival = acceptance.curve(99, KIND)
    assert survival[5] > 0.85, "or longer drafts would never be tried"
    for _ in range(50):
        acceptance.observe(verdict(0, 4, 2))  # the third never stands
    survival = acceptance.curve(99, KIND)
    assert survival[1] > 0.8 and survival[2] < 0.25 and survival[5] < 0.1


def test_a_draft_longer_than_the_curve_teaches_its_last_position() -> None:
    acceptance = Acceptance(2)
    for _ in range(200):
        acceptance.observe(verdict(0, 6, 6))
    assert min(acceptance.curve(1, KIND)) > 0.95


def test_before_anything_was_seen_everyone_has_the_prior() -> None:
    assert Acceptance(3).curve(0, KIND) == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    assert Acceptance(0).curve(0, KIND) == []


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_requests_excess_is_pulled_to_its_kind() -> None:
    """One among many whose drafts all stand: after few trials near its kind, after many near itself."""
    acceptance = Acceptance(4)
    feed(acceptance, 100, [0.5] * 8)
    kind = acceptance.curve(99, KIND)[0]
    beliefs = []
    for trials in range(1, 65):
        acceptance.observe(verdict(1000, 1, 1))
        if trials in (1, 8, 64):
            beliefs.append(acceptance.curve(1000, KIND)[0])
    assert kind < beliefs[0] < beliefs[1] < beliefs[2]
    assert beliefs[0] - kind == pytest.approx(0.5 / (1 + PRIOR_TRIALS), abs=0.01)
    assert beliefs[2] > 0.8


def test_requests_are_told_apart_and_newcomers_are_as_their_kind() -> None:
    acceptance = Acceptance(4)
    feed(acceptance, 60, [0.9, 0.2] * 8)
    good = sum(acceptance.curve(request, KIND)[0] for request in range(0, 16, 2)) / 8
    bad = sum(acceptance.curve(request, KIND)[0] for request in range(1, 16, 2)) / 8
    assert good > 0.65 and bad < 0.35, "the excess is one for all positions, so that it understates the first"
    assert bad < acceptance.curve(99, KIND)[0] < good


def test_who_has_left_is_forgotten_and_the_kind_is_not() -> None:
    acceptance = Acceptance(4)
    feed(acceptance, 60, [0.9, 0.2] * 8)
    acceptance.forget(0)
    acceptance.forget(12345)
    assert acceptance.curve(0, KIND) == acceptance.curve(99, KIND)


def test_who_does_not_draft_still_hears_how_its_kind_fares() -> None:
    acceptance = Acceptance(4)
    before = acceptance.curve(99, KIND)[0]
    feed(acceptance, 60, [0.95] * 8)
    assert acceptance.curve(99, KIND)[0] > 0.9 > before
    assert acceptance.curve(99, KIND) == acceptance.curve(100, KIND)


def test_all_alike_stay_alike() -> None:
    """Noise in what single requests saw must not make their drafts differ in length."""
    acceptance = Acceptance(4)
    feed(acceptance, 40, [0.8] * 32)
    firsts = [acceptance.curve(request, KIND)[0] for request in range(32)]
    assert max(firsts) - min(firsts) < 0.25
    assert sum(abs(first - 0.8) for first in firsts) / 32 < 0.05


def test_a_text_that_changes_is_noticed() -> None:
    acceptance = Acceptance(4)
    feed(acceptance, 60, [0.9] * 8)
    feed(acceptance, 60, [0.2] * 8, seed=1)
    assert acceptance.curve(0, KIND)[0] < 0.35


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_kinds_are_told_apart_by_rule_temperature_and_drafter() -> None:
    kinds = {
        kind_of(True, False, 0.0, "model"),
        kind_of(True, False, 0.0, "ngram"),
        *(kind_of(False, coupled, t, "model") for coupled in (False, True) for t in (0.2, 0.7, 1.0, 1.5)),
    }
    assert len(kinds) == 10
    assert kind_of(True, True, 0.7, "model") == kind_of(True, False, 0.0, "model"), "greedy is greedy"
    assert kind_of(False, False, 0.95, "model") == kind_of(False, False, 1.1, "model")


def test_what_one_kind_learns_another_does_not() -> None:
    greedy, hot = kind_of(True, False, 0.0, "model"), kind_of(False, False, 1.5, "model")
    acceptance = Acceptance(4)
    for turn in range(40):
        feed(acceptance, 1, [0.95] * 8, seed=turn, kind=greedy)
        feed(acceptance, 1, [0.2] * 8, seed=turn, kind=hot)
    assert acceptance.curve(99, greedy)[0] > 0.85 and acceptance.curve(99, hot)[0] < 0.35
    assert acceptance.curve(0, greedy)[0] > 0.85 and acceptance.curve(0, hot)[0] < 0.35, "of one request too"
    assert 0.3 < acceptance.mean() < 0.9


def test_a_new_kind_begins_as_everyone_is() -> None:
    acceptance = Acceptance(4)
    feed(acceptance, 60, [0.9] * 8)
    assert acceptance.curve(0, kind_of(True, False, 0.0, "model"))[0] == pytest.approx(acceptance.mean())


# -- probes and look-ups -----------------------------------------------------------------------------------------------


def test_probes_are_believed_sooner() -> None:
    """Drafts that never stood begin to stand."""
    trials = []
    for probed in (False, True):
        acceptance = Acceptance(4)
        feed(acceptance, 100, [0.1] * 8)
        trials.append(0)
        while acceptance.curve(999, KIND)[0] < 0.6:
            acceptance.observe(verdict(1000 + trials[-1], 1, 1), probed=probed)
            trials[-1] += 1
    assert trials[1] < 0.6 * trials[0]


def test_doubt_falls_with_trials_and_no_further_than_what_is_remembered() -> None:
    acceptance = Acceptance(4)
    doubts = [acceptance.doubt]
    for rounds in (2, 20, 200):
        feed(acceptance, rounds, [0.5] * 8)
        doubts.append(acceptance.doubt)
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[-1] == pytest.approx((0.25 / KIND_TRIALS) ** 0.5, rel=0.1)


def test_what_was_overheard_counts_for_first_positions() -> None:
    acceptance, copied = Acceptance(4), kind_of(False, False, 1.0, "ngram")
    for _ in range(20):
        acceptance.overhear(0, copied, 19, 20)
    assert acceptance.curve(0, copied)[0] > 0.85
    assert acceptance.curve(0, KIND) == Acceptance(4).curve(0, KIND), "another drafter's are not meant"


def test_a_long_rest_counts_for_no_more_than_is_remembered() -> None:
    acceptance, copied = Acceptance(4), kind_of(False, False, 1.0, "ngram")
    acceptance.overhear(0, copied, 0, 100_000)
    for _ in range(60):
        acceptance.observe(verdict(0, 4, 4, copied))
    assert acceptance.curve(0, copied)[0] > 0.6


# -- reliability -------------------------------------------------------------------------------------------------------


def test_what_it_says_comes_true_as_often_as_it_says() -> None:
    acceptance = Acceptance(5)
    feed(acceptance, 200, [0.6, 0.65, 0.75, 0.8] * 4, slope=-0.03)
    assert acceptance.reliability.error < 0.04
    rows = acceptance.reliability.rows()
    assert sum(trials for *_, trials in rows) > 1000
    for predicted, came, trials in rows:
        assert trials < 100 or predicted == pytest.approx(came, abs=0.1)


# -- never out of bounds, never a token --------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 12), st.booleans()), max_size=60))
def test_curves_are_survivals_whatever_was_seen(verdicts: list[tuple[int, int, int, bool]]) -> None:
    acceptance = Acceptance(5)
    for request, drafted, accepted, probed in verdicts:
        acceptance.observe(verdict(request, drafted, accepted), probed)
    for request in range(5):
        curve = acceptance.curve(request, KIND)
        assert len(curve) == 5 and all(0.0 < b <= a < 1.0 for a, b in pairwise([0.999, *curve]))
    assert 0.0 < acceptance.mean() < 1.0 and acceptance.doubt < 0.5


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=40), st.floats(10, 500))
def test_a_mean_never_remembers_more_than_it_may(trials: list[tuple[float, float]], memory: float) -> None:
    mean = Mean(5.0, 8.0)
    for share, count in trials:
        mean.learn(share * count, count, memory)
        assert 0.0 <= mean.stood <= mean.trials * (1 + 1e-9) and mean.trials <= max(memory, 100.0) + 8.0


def test_it_never_sees_a_token() -> None:
    """Lengths that depended on a drawn token would bias the text: nothing it is handed can hold one."""
    for name, kind in get_type_hints(Observation).items():
        assert kind in (int, float, bool, str | None, float | None), name
    told = {
        "curve": {"request", "kind"},
        "mean": set(),
        "observe": {"seen", "probed"},
        "overhear": {"request", "kind", "stood", "trials"},
        "forget": {"request"},
    }
    for name, method in inspect.getmembers(Acceptance, inspect.isfunction):
        if not name.startswith("_"):
            assert set(inspect.signature(method).parameters) - {"self"} == told[name], name
