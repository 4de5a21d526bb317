"""The objective by hand."""

from __future__ import annotations

import pytest

from tests.control.views import view
from verifypd.control.value import decode_worth, value, weight


def test_by_hand() -> None:
    """A quarter of a prompt, which decoding would take 0.5 s to be worth as much as, in 12 ms more."""
    waiting = weight(200.0, late=False) * 0.25
    assert waiting == pytest.approx(1.25) and weight(200.0, late=True) == pytest.approx(10.0)
    assert value(0.012, waiting, rate=2.5) == pytest.approx(0.5 - 0.012)


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
