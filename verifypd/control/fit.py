"""Nonnegative least squares of relative errors. Knows numbers only, not what they measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RIDGE = 1e-4  # pull towards the prior, as a share of the data's own weight: decides only what the data leave open


class Sample(NamedTuple):
    """Amounts of work, and the seconds it took."""

    features: Sequence[float]
    seconds: float


class Fit(NamedTuple):
    """What came of it."""

    loss: float  # mean squared relative error
    values: list[float]  # seconds per unit of each feature


def nonnegative(samples: Sequence[Sample], prior: Sequence[float]) -> Fit:
    """The values ≥ 0 whose predictions are closest to the seconds, in ratio; one that no sample needs stays `prior`.

    What turns negative is left out, the most negative first.
    """
    import numpy as np  # here: the command line shows its help sooner without

    matrix = np.array([sample.features for sample in samples]) / np.array([[sample.seconds] for sample in samples])
    scale = np.sqrt((matrix**2).sum(0))
    values = np.array(prior, dtype=float)
    active = [int(i) for i in np.flatnonzero(scale)]
    while active:
        scaled = np.vstack([matrix[:, active] / scale[active], RIDGE * np.eye(len(active))])
        target = np.concatenate([np.ones(len(samples)), RIDGE * values[active] * scale[active]])
        found = np.linalg.lstsq(scaled, target, rcond=None)[0]
        lowest = int(found.argmin())
        if found[lowest] >= 0.0:
            values[active] = found / scale[active]
            break
        values[active[lowest]] = 0.0
        del active[lowest]
    return Fit(float(((matrix @ values - 1.0) ** 2).mean()), [float(value) for value in values])
