"""One mode and one function that changes it; probes take no more than their share of the time."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifypd.control.mode import Mode, ProbeBudget, next_mode
from verifypd.control.tuning import PROBE_SHARE

PLAIN, PROBING, DRAFTING = Mode.PLAIN, Mode.PROBING, Mode.DRAFTING
DOUBT = 0.03
CLEAR, SLIGHT, NONE = 1.0 + DOUBT + 0.01, 1.0 + DOUBT - 0.01, 0.99  # gains


@pytest.mark.parametrize(
    ("mode", "gain", "probe", "then"),
    [
        (PLAIN, CLEAR, False, DRAFTING),
        (PLAIN, CLEAR, True, DRAFTING),
        (PLAIN, SLIGHT, False, PLAIN),
        (PLAIN, SLIGHT, True, PROBING),
        (PLAIN, NONE, False, PLAIN),
        (PLAIN, NONE, True, PROBING),
        (PROBING, CLEAR, False, DRAFTING),
        (PROBING, CLEAR, True, DRAFTING),
        (PROBING, SLIGHT, False, PLAIN),
        (PROBING, SLIGHT, True, PROBING),
        (PROBING, NONE, False, PLAIN),
        (PROBING, NONE, True, PROBING),
        (DRAFTING, CLEAR, False, DRAFTING),
        (DRAFTING, CLEAR, True, DRAFTING),
        (DRAFTING, SLIGHT, False, DRAFTING),
        (DRAFTING, SLIGHT, True, DRAFTING),
        (DRAFTING, NONE, False, PLAIN),
        (DRAFTING, NONE, True, PROBING),
    ],
)
def test_the_transitions(mode: Mode, gain: float, probe: bool, then: Mode) -> None:
    assert next_mode(mode, gain, DOUBT, probe) is then


def test_every_transition_is_in_the_table() -> None:
    assert len(list(product(Mode, (CLEAR, SLIGHT, NONE), (False, True)))) == 18


@given(st.sampled_from(Mode), st.lists(st.floats(0.01, 1.0), max_size=50), st.floats(0.001, 0.2), st.booleans())
def test_gains_within_the_doubt_change_nothing(mode: Mode, gains: list[float], doubt: float, probe: bool) -> None:
    """What wavers between nothing and the doubt neither begins nor ends drafting."""
    now = mode
    for gain in gains:
        now = next_mode(now, 1.0 + gain * doubt, doubt, probe)
        assert (now is DRAFTING) == (mode is DRAFTING)


def test_doubt_is_asked_for_before_drafting_begins_and_not_after() -> None:
    assert next_mode(PLAIN, 1.1, 0.02, False) is DRAFTING
    assert next_mode(PLAIN, 1.1, 0.2, False) is PLAIN
    assert next_mode(DRAFTING, 1.1, 0.2, False) is DRAFTING


@pytest.mark.parametrize("seed", range(5))
def test_probes_take_no_more_than_their_share_of_a_long_run(seed: int) -> None:
    rng = random.Random(seed)
    budget, spent, time = ProbeBudget(), 0.0, 0.0
    for _ in range(20_000):
        step = rng.uniform(2e-3, 40e-3)
        time += step
        budget.save(step)
        price = rng.uniform(0.3e-3, 20e-3)
        if budget.affords(price):
            budget.pay(price)
            spent += price
        assert spent <= PROBE_SHARE * time
    assert spent > 0.5 * PROBE_SHARE * time, "and they do take place"
    assert budget.probes > 10


def test_a_long_rest_saves_no_more_than_two_probes() -> None:
    budget = ProbeBudget()
    budget.save(1e6)
    paid = 0
    while budget.affords(1e-3):
        budget.pay(1e-3)
        paid += 1
    assert paid == budget.probes == 2


def test_what_costs_nothing_cannot_be_probed() -> None:
    budget = ProbeBudget(saved=1.0)
    assert not budget.affords(0.0)
    assert not ProbeBudget().affords(1e-3)


def test_a_look_changes_nothing() -> None:
    budget = ProbeBudget(saved=1.0)
    assert budget.affords(1e-3) and budget.affords(0.9) and budget.saved == 1.0
