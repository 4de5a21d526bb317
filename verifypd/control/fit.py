"""Means of like measurements, and nonnegative least squares over them. Knows numbers only, not what they measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CELL_RATE = 0.05  # weight of a new measurement in its cell: the last twenty or so count


@dataclass(slots=True)
class Cell:
    """The mean of like measurements: features and seconds."""

    features: list[float]
    seconds: float
    spread: float  # mean absolute deviation, s
    count: int
    seen: int  # number of the observation that last touched it

    def add(self, features: Sequence[float], seconds: float, seen: int) -> None:
        """Move towards a new measurement; one outlier moves it little, a lasting change moves it all the way."""
        self.count += 1
        self.seen = seen
        rate = max(CELL_RATE, 1.0 / self.count)
        miss = seconds - self.seconds
        reach = 3.0 * max(self.spread, 0.02 * self.seconds)
        self.spread += rate * (min(abs(miss), 3.0 * reach) - self.spread)
        self.seconds += rate * max(-reach, min(reach, miss))
        for i, value in enumerate(features):
            self.features[i] += rate * (value - self.features[i])


def knee_grid(cells: list[Cell]) -> list[float]:
    """Places where a pass may turn from flat to rising: on a grid over the rows seen, and below all of them."""
    most = max(cell.features[0] for cell in cells)
    grid = [1.0]
    while grid[-1] < most:
        grid.append(grid[-1] * 1.08 + 0.5)
    return grid


def nonnegative(
    rows: Sequence[Sequence[float]],
    cells: Sequence[Cell],
    weights: Sequence[float],
    prior: Sequence[float],
    pull: float,
) -> tuple[float, list[float]]:
    """Nonnegative least squares of relative errors, pulled gently to `prior`: (mean squared error, solution)."""
    size = len(prior)
    gram = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for features, cell, weight in zip(rows, cells, weights, strict=True):
        scaled = [value / cell.seconds for value in features]
        for i, value in enumerate(scaled):
            if value:
                share = weight * value
                right[i] += share
                line = gram[i]
                for j in range(i, size):
                    line[j] += share * scaled[j]
    for i in range(size):
        for j in range(i):
            gram[i][j] = gram[j][i]
    total = sum(weights)
    pulled = [[*line] for line in gram]
    target = list(right)
    for i in range(size):
        if gram[i][i] > 0.0:
            pulled[i][i] += pull * gram[i][i]
            target[i] += pull * gram[i][i] * prior[i]
        else:  # never seen: stays what it was
            pulled[i][i], target[i] = 1.0, prior[i]
    x = _solve_nonnegative(pulled, target)
    square = sum(x[i] * sum(a * b for a, b in zip(gram[i], x, strict=True)) for i in range(size))
    linear = sum(a * b for a, b in zip(right, x, strict=True))
    return max(0.0, square - 2.0 * linear + total) / total, x


def _solve_nonnegative(gram: list[list[float]], right: list[float]) -> list[float]:
    """min xᵀGx/2 − bᵀx over x ≥ 0: drop what turns negative, then polish by coordinate descent."""
    size = len(right)
    scale = [1.0 / math.sqrt(gram[i][i]) for i in range(size)]
    g = [[gram[i][j] * scale[i] * scale[j] for j in range(size)] for i in range(size)]
    b = [right[i] * scale[i] for i in range(size)]
    active = list(range(size))
    x = [0.0] * size
    while active:
        part = _solve([[g[i][j] for j in active] for i in active], [b[i] for i in active])
        lowest = min(range(len(active)), key=part.__getitem__)
        if part[lowest] >= 0.0:
            for i, value in zip(active, part, strict=True):
                x[i] = value
            break
        del active[lowest]
    for _ in range(12):
        for i in range(size):
            line = g[i]
            x[i] = max(0.0, x[i] + b[i] - sum(line[j] * x[j] for j in range(size)))
    return [value * scale[i] for i, value in enumerate(x)]


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """Gaussian elimination; a hint of a ridge keeps singular systems finite. `a` has ones on the diagonal."""
    n = len(b)
    rows = [[*line, value] for line, value in zip(a, b, strict=True)]
    for i in range(n):
        rows[i][i] += 1e-10
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            if factor:
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum(rows[i][j] * x[j] for j in range(i + 1, n))) / rows[i][i]
    return x
