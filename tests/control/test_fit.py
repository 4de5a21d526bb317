"""Means of like measurements move with lasting changes and not with outliers; the fit is the nonnegative optimum."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import nnls

from verifypd.control.fit import Cell, knee_grid, nonnegative


def cell(features: list[float], seconds: float) -> Cell:
    return Cell(features, seconds, 0.0, 8, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_the_nonnegative_least_squares_of_relative_errors(seed: int) -> None:
    chance = random.Random(seed)
    rows = [[1.0, chance.uniform(1, 64), chance.uniform(0, 4000)] for _ in range(12)]
    cells = [cell(row, chance.uniform(0.01, 1.0)) for row in rows]
    weights = [chance.uniform(0.1, 8.0) for _ in rows]
    loss, found = nonnegative(rows, cells, weights, prior=(0.0, 0.0, 0.0), pull=0.0)
    scale = np.sqrt(weights)
    matrix = np.array([[value / c.seconds for value in row] for row, c in zip(rows, cells, strict=True)])
    best, residual = nnls(matrix * scale[:, None], scale)
    assert min(found) >= 0.0
    assert loss == pytest.approx(residual**2 / sum(weights), rel=1e-6)
    assert found == pytest.approx(best, rel=1e-3, abs=1e-6)


def test_what_was_never_seen_stays_what_it_was() -> None:
    rows = [[1.0, float(n), 0.0] for n in (1, 2, 4, 8)]
    cells = [cell(row, 0.1 + 0.02 * row[1]) for row in rows]
    _, found = nonnegative(rows, cells, [1.0] * 4, prior=(0.0, 0.0, 7.0), pull=0.0)
    assert found == pytest.approx([0.1, 0.02, 7.0])


def test_an_outlier_moves_a_mean_little_and_a_lasting_change_moves_it_all_the_way() -> None:
    mean = Cell([1.0], 1.0, 0.1, 0, 0)
    for number in range(40):
        mean.add([1.0], 1.0, number)
    mean.add([1.0], 50.0, 40)
    assert mean.seconds < 1.1
    for number in range(200):
        mean.add([1.0], 2.0, number)
    assert mean.seconds == pytest.approx(2.0, rel=0.01)


def test_knees_are_looked_for_over_all_rows_seen() -> None:
    grid = knee_grid([cell([3.0], 1.0), cell([200.0], 1.0)])
    assert grid[0] == 1.0 and grid[-2] < 200.0 <= grid[-1] and grid == sorted(grid)
