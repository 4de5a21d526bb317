"""Predicted chances against what came, by hand."""

from __future__ import annotations

import pytest

from verifypd.metrics.reliability import Reliability


def test_the_calibration_error_by_hand() -> None:
    reliability = Reliability()
    assert reliability.error == 0.0 and reliability.rows() == []
    for stood in (True, True, False, False):
        reliability.add(0.75, stood)
    reliability.add(1.0, True)
    assert reliability.error == pytest.approx((4 * 0.25 + 0.0) / 5)
    assert reliability.rows() == [(0.75, 0.5, 4.0), (1.0, 1.0, 1.0)]
