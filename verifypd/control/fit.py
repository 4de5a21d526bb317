"""Nonnegative least squares of relative errors. Knows numbers only, not what they measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

RIDGE = 1e-7  # pull towards the prior, as a share of the data's own weight: decides only what the data leave open
SWEEPS = 12  # of coordinate descent behind the direct solution


class Sample(NamedTuple):
    """Amounts of work, and the seconds it took."""

    features: Sequence[float]
    seconds: float


class Fit(NamedTuple):
    """What came of it."""

    loss: float  # mean squared relative error
    values: list[float]  # seconds per unit of each feature


def nonnegative(samples: Sequence[Sample], prior: Sequence[float]) -> Fit:
    """The values ≥ 0 whose predictions are closest to the seconds, in ratio; one that no sample needs stays `prior`."""
    size = len(prior)
    gram = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for features, seconds in samples:
        scaled = [value / seconds for value in features]
        for i, value in enumerate(scaled):
            if value:
                right[i] += value
                for j in range(size):
                    gram[i][j] += value * scaled[j]
    pulled, target = [[*line] for line in gram], list(right)
    for i in range(size):
        if gram[i][i] > 0.0:
            pulled[i][i] += RIDGE * gram[i][i]
            target[i] += RIDGE * gram[i][i] * prior[i]
        else:  # never seen: stays what it was
            pulled[i][i], target[i] = 1.0, prior[i]
    x = _solve_nonnegative(pulled, target)
    misses = [sum(f * v for f, v in zip(features, x, strict=True)) / seconds - 1.0 for features, seconds in samples]
    return Fit(sum(miss * miss for miss in misses) / max(1, len(misses)), x)


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
    for _ in range(SWEEPS):
        for i in range(size):
            line = g[i]
            x[i] = max(0.0, x[i] + b[i] - sum(line[j] * x[j] for j in range(size)))
    return [value * scale[i] for i, value in enumerate(x)]


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """Gaussian elimination; a hint of a ridge keeps singular systems finite. `a` has ones on the diagonal."""
    n = len(b)
    rows = [[*line, value] for line, value in zip(a, b, strict=True)]
    for i in range(n):
        rows[i][i] += RIDGE / 1000.0
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
