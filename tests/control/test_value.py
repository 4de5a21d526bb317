"""The objective by hand, and what it comes to without prompts: the fewest seconds a token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.views import view
from verifypd.control.value import decode_worth, value, weight

PLANS = st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(1.0, 500.0)), min_size=1, max_size=9)  # seconds, tokens


def test_by_hand() -> None:
    """Five tokens at 2 ms and a quarter of a prompt, which decoding would take 0.5 s to bring as much as, in 12 ms."""
    waiting = weight(200.0, late=False) * 0.25
    assert waiting == pytest.approx(1.25) and weight(200.0, late=True) == pytest.approx(10.0)
    assert value(0.012, tokens=5, price=2e-3, waiting=waiting, rate=2.5) == pytest.approx(0.01 + 0.5 - 0.012)


@given(PLANS)
def test_without_prompts_it_is_the_fewest_seconds_a_token(plans: list[tuple[float, float]]) -> None:
    """Where the price of a token is what the best plan makes it, that plan is worth nothing and every other less."""
    price = min(seconds / tokens for seconds, tokens in plans)
    best = max(plans, key=lambda plan: value(*plan, price))
    assert best[0] / best[1] == pytest.approx(price)
    assert value(*best, price) == pytest.approx(0.0, abs=1e-9)


@given(PLANS, st.floats(0.1, 100.0))
def test_the_value_of_a_plan_is_that_of_its_parts(plans: list[tuple[float, float]], rate: float) -> None:
    """So drafts and prompt tokens can be chosen one after the other."""
    seconds, tokens = sum(plan[0] for plan in plans), sum(plan[1] for plan in plans)
    parts = [value(*plan, 1e-3, waiting=0.5, rate=rate) for plan in plans]
    assert sum(parts) == pytest.approx(value(seconds, tokens, 1e-3, waiting=0.5 * len(plans), rate=rate))


def test_the_worth_of_decoding_by_hand() -> None:
    """A token of 100 for who has written none, of 99 for who has written as many as others do; double when late."""
    begun, long = view(0, slo_tpot=10.0, emitted=0), view(1, slo_tpot=10.0, emitted=99)
    assert decode_worth([begun], 1.0, 100.0) == pytest.approx(1.0 / 100)
    assert decode_worth([long], 1.0, 100.0) == pytest.approx(1.0 / 99)
    assert decode_worth([begun, long], 3.0, 100.0) == pytest.approx(0.03 + 3.0 / 99)
    ending = begun._replace(max_length=begun.length_floor + 2)
    assert decode_worth([ending], 1.0, 100.0) == pytest.approx(0.5)
    assert decode_worth([ending], 3.0, 100.0) == pytest.approx(1.0), "no more than all that is left"
    late = begun._replace(emitted=20, decoding=0.21)
    assert decode_worth([late], 1.0, 100.0) == pytest.approx(2.0 / 80)
    assert decode_worth([late._replace(decoding=0.19)], 1.0, 100.0) == pytest.approx(1.0 / 80)
    assert decode_worth([begun._replace(slo_tpot=5.0)], 1.0, 100.0) == pytest.approx(2.0 / 100)
    # a target that decoding alone cannot keep counts as what decoding takes, and nobody is late for it
    assert decode_worth([late], 1.0, 100.0, least=20.0) == pytest.approx(0.5 / 80)
