"""The fit is the nonnegative optimum of relative errors, and leaves alone what it was not shown."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import nnls

from verifypd.control.fit import Sample, nonnegative


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_the_nonnegative_least_squares_of_relative_errors(seed: int) -> None:
    chance = random.Random(seed)
    rows = [[1.0, chance.uniform(1, 64), chance.uniform(0, 4000)] for _ in range(12)]
    samples = [Sample(row, chance.uniform(0.01, 1.0)) for row in rows]
    found = nonnegative(samples, prior=(0.0, 0.0, 0.0))
    matrix = np.array([[value / seconds for value in features] for features, seconds in samples])
    best, residual = nnls(matrix, np.ones(len(samples)))
    assert min(found.values) >= 0.0
    assert found.loss == pytest.approx(residual**2 / len(samples), rel=1e-5)
    assert found.values == pytest.approx(best, rel=1e-3, abs=1e-6)


def test_what_was_never_seen_stays_what_it_was() -> None:
    samples = [Sample((1.0, float(n), 0.0), 0.1 + 0.02 * n) for n in (1, 2, 4, 8)]
    assert nonnegative(samples, prior=(0.0, 0.0, 7.0)).values == pytest.approx([0.1, 0.02, 7.0], rel=1e-4)


def test_what_cannot_be_told_apart_stays_finite_and_near_the_prior() -> None:
    """Two features that are always the same: only their sum is known."""
    samples = [Sample((1.0, float(n), float(n)), 0.1 + 0.02 * n) for n in (1, 2, 4, 8)]
    found = nonnegative(samples, prior=(0.1, 0.005, 0.015))
    assert found.loss < 1e-6
    assert found.values[1] + found.values[2] == pytest.approx(0.02, rel=1e-3)
    assert found.values[1:] == pytest.approx([0.005, 0.015], rel=0.2)
