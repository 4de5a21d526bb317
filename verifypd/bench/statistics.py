"""Whether two arms differ: paired seeds, a bootstrap interval, and a word. Also histograms and curves of single times.

Knows outcomes of runs; nothing of engines. How a comparison is made:

- Each seed gives one ratio of a figure, arm over other arm; the figure compared is the geometric mean of those ratios.
- Two intervals are made of it. A bootstrap draws each seed's requests with replacement, the same ones for both arms:
  what chance does within a run. Student's t over the seeds says what it does from run to run; a bootstrap of so few
  seeds would be too narrow. The interval given covers both.
- An arm that ran twice (A/A) shows what chance does here. By as much as it differs from itself, the intervals of the
  other arms are widened further.
- A difference of less than 1 % is called none: runs of one minute show such differences for certain, and nobody cares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verifypd.bench.figures import ROUNDS, TARGETS, Floats, Outcome, Sample, Targets, ranked, sample

FASTER, SLOWER, NONE = "faster", "slower", "no difference"
UNKNOWN = "one seed"  # an interval over seeds needs two
COMPARED = (
    "tok_s", "good_share", "e2e_ms_mean", "e2e_ms_p95", "ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95",
    "gap_ms_p50", "gap_ms_p99",
)  # fmt: skip
HIGHER_IS_BETTER = ("tok_s", "good_share")
COVERAGE = 0.95  # of an interval
LEAST_RATIO = 0.01  # a difference below this is none, however sure it is
NORMAL = 1.959964  # two-sided, 95 %
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)  # by degrees of freedom
BINS = 40  # of a histogram
POINTS = 101  # of a curve


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of one arm over that of another: the ratio, its interval, and what may be said of it."""

    metric: str
    ratio: float
    low: float
    high: float
    verdict: str
    seeds: int

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def student(freedom: int) -> float:
    """The two-sided 95 % point of Student's t."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def compare(
    arm: Sequence[Outcome], other: Sequence[Outcome], targets: Targets = TARGETS, noise: dict[str, float] | None = None
) -> dict[str, Difference]:
    """Every figure that both have, over the seeds that both ran, in the same order.

    noise: by how much an arm differs from itself, as a logarithm, by figure.
    """
    pairs = [
        (sample([one], targets, seed + 1), sample([two], targets, seed + 1))
        for seed, (one, two) in enumerate(zip(arm, other, strict=True))
    ]
    found = {}
    good = any(each.figures["good_share"] > 0 for pair in pairs for each in pair)
    for metric in COMPARED:
        if metric == "good_share" and not good:  # neither had a good request: there is nothing to compare
            continue
        logs = [_log_ratios(metric, one, two) for one, two in pairs]
        if logs and all(each is not None for each in logs):
            rows = np.stack([each for each in logs if each is not None])
            found[metric] = judge(metric, rows, (noise or {}).get(metric, 0.0))
    return found


def _log_ratios(metric: str, one: Sample, two: Sample) -> Floats | None:
    """Of a seed: the logarithm of its ratio, and of the ratios of requests drawn from it. None: it has none."""
    if metric == "tok_s":  # a run has one throughput: its requests share the time
        values = one.figures[metric], two.figures[metric]
        return np.full(1 + ROUNDS, math.log(values[0] / values[1])) if min(values) > 0 else None
    if metric not in one.draws or metric not in two.draws:
        return None
    if metric != "good_share" and not min(one.figures[metric], two.figures[metric]) > 0:  # there are no such times
        return None
    draws = one.draws[metric], two.draws[metric]
    if not all(np.all(each > 0) for each in draws):  # not a number is not above 0
        return None
    return np.log(draws[0] / draws[1])


def judge(metric: str, logs: Floats, noise: float = 0.0) -> Difference:
    """logs: [seeds, 1 + ROUNDS], the first of a row being the seed's own, the others those of requests drawn."""
    seeds = len(logs)
    centre = float(logs[:, 0].mean())
    drawn = np.sort(logs[:, 1:].mean(axis=0))
    over_seeds = student(seeds - 1) * float(logs[:, 0].std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else 0.0
    low = min(ranked(drawn, (1 - COVERAGE) / 2), centre - over_seeds) - noise
    high = max(ranked(drawn, (1 + COVERAGE) / 2), centre + over_seeds) + noise
    word = _word(metric, centre, low, high, seeds)
    return Difference(metric, math.exp(centre), math.exp(low), math.exp(high), word, seeds)


def _word(metric: str, centre: float, low: float, high: float, seeds: int) -> str:
    if seeds < 2:
        return UNKNOWN
    if low <= 0.0 <= high or abs(centre) < math.log1p(LEAST_RATIO):
        return NONE
    return FASTER if (low > 0.0) == (metric in HIGHER_IS_BETTER) else SLOWER


def own_noise(again: dict[str, Difference]) -> dict[str, float]:
    """What an arm differs by from itself, as a logarithm, by figure."""
    return {name: abs(math.log(each.ratio)) for name, each in again.items()}


# -- distributions -----------------------------------------------------------------------------------------------------


def histogram(values: Floats, bins: int = BINS) -> dict[str, list[float]]:
    """Counts between edges that are equally far apart as logarithms; every value is in one."""
    positive = values[values > 0]
    if not len(positive):
        return {"edges": [], "counts": []}
    low, high = float(positive.min()), float(positive.max())
    edges = np.geomspace(low, max(high, low * 1.001), bins + 1)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return {"edges": [float(f"{edge:.4g}") for edge in edges], "counts": [int(count) for count in counts]}


def curve(values: Floats, points: int = POINTS) -> list[float]:
    """The values below which 0, 1, … 100 % lie: a cumulative distribution, read the other way."""
    ordered = np.sort(values)
    return [float(f"{ranked(ordered, share):.5g}") for share in np.linspace(0.0, 1.0, points)] if len(ordered) else []
