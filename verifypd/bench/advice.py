"""When to use which architecture, from results: the arms with the lowest latency, and the original's rules beside it.

Knows results and names of models; nothing of engines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verifypd.bench.campaign import AGAIN
from verifypd.bench.modes import UNJUDGED, three_lanes
from verifypd.bench.pairs import sizes
from verifypd.bench.pipelining import HARDLY, pipelined
from verifypd.bench.results import judged
from verifypd.bench.statistics import FASTER, SLOWER, judge
from verifypd.control.architectures import SELECT_VARIANTS, select_architecture
from verifypd.simulate.tables import H200

RIGHT, WRONG, EITHER = "right", "wrong", "no difference"
ALIKE = HARDLY
LEVEL = "level"  # no arm is certainly lower than another


def lowest(found: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """The arm with the lowest mean E2E of a scenario, and those that no arm beats; a second run does not count."""
    means = {name: each["figures"]["e2e_ms_mean"] for name, each in own["arms"].items() if not name.endswith(AGAIN)}
    best = min(means, key=lambda name: means[name])

    def beaten(name: str) -> bool:
        return any(means[each] < means[name] and _differ(found, own, each, name) for each in means)

    return [name for name in means if name == best or not beaten(name)]


def lowest_text(found: dict[str, Any], own: dict[str, Any]) -> str:
    """Their names, or that all arms are level."""
    names = lowest(found, own)
    ran = [name for name in own["arms"] if not name.endswith(AGAIN)]
    return LEVEL if len(names) == len(ran) > 1 else ", ".join(names)


def _differ(found: dict[str, Any], own: dict[str, Any], one: str, other: str) -> bool:
    """Whether two arms were told apart: when compared, else because their intervals over a third do not meet."""
    for reference, compared in ((found["reference"], own["compared"]), ("pd", own["over_pd"])):
        each = compared.get({one: other, other: one}.get(reference, ""), {})
        if "e2e_ms_mean" in each:
            return each["e2e_ms_mean"]["verdict"] in (FASTER, SLOWER)
    return any(_apart(compared.get(one, {}), compared.get(other, {})) for compared in (own["compared"], own["over_pd"]))


def _apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the intervals of two arms over the same one do not meet."""
    a, b = one.get("e2e_ms_mean"), other.get("e2e_ms_mean")
    if a is None or b is None or not (judged(a) and judged(b)):
        return False
    return bool(a["high"] < b["low"] or b["high"] < a["low"])


def over_pd(found: dict[str, Any], own: dict[str, Any], arm: str) -> dict[str, Any] | None:
    """The mean E2E of an arm over PD's, compared; None where one of them did not run."""
    compared = own["compared"] if found["reference"] == "pd" else own["over_pd"]
    return compared.get(arm, {}).get("e2e_ms_mean")


def rule_verdicts(found: dict[str, Any]) -> list[dict[str, str]]:
    """For every scenario with PD, PDV and a C: what each variant of the rule says, and whether that was right."""
    rows = []
    for scenario, own in found["scenarios"].items():
        pair, level = found["grid"].get(scenario, ("", ""))
        size, arm, count = sizes(pair), three_lanes(own), level.partition("=")[2]
        measured = over_pd(found, own, arm) if arm else None
        if size is None or measured is None or not count.isdigit():
            continue
        row = {"pair": pair, "level": level, "measured": measured["verdict"]}
        for variant in SELECT_VARIANTS:
            said = select_architecture(int(count), size[0], variant)
            good = FASTER if said == "pdv" else SLOWER
            word = RIGHT if measured["verdict"] == good else WRONG
            if arm and not pipelined(own, arm):
                word = ALIKE
            elif not judged(measured):
                word = UNJUDGED
            elif measured["verdict"] not in (FASTER, SLOWER):
                word = EITHER
            row |= {variant: said, f"{variant} verdict": word}
        rows.append(row)
    return rows


def rule_counts(founds: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """By variant: in how many scenarios its choice was right, wrong, did not matter, and why not, or was not judged."""
    rows = [row for found in founds for row in rule_verdicts(found)]
    return {variant: Counter(row[f"{variant} verdict"] for row in rows) for variant in SELECT_VARIANTS}


def gains(found: dict[str, Any]) -> list[tuple[str, float, list[tuple[str, dict[str, Any]]]]]:
    """By pair: its size ratio, and by load plain's mean E2E over PD's: above 1, drafting pays."""
    pairs: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for scenario, own in found["scenarios"].items():
        pair, level = found["grid"].get(scenario, ("", ""))
        compared = over_pd(found, own, "plain")
        if compared is not None and sizes(pair) is not None:
            pairs.setdefault(pair, []).append((level, compared))
    return [(pair, (sizes(pair) or (0.0, 0.0))[1], rows) for pair, rows in pairs.items()]


@dataclass(frozen=True, slots=True)
class Limit:
    """PDV with a batch of its own, at one load."""

    size: str
    mean: float  # E2E, ms
    verdict: str  # over the largest of its kind; nothing for that one


@dataclass(frozen=True, slots=True)
class Kind:
    """Batches that differ in their size alone: PDV pipelined at all of them, or hardly at any. The largest first."""

    pipelined: bool
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """One load, with every batch."""

    level: str
    kinds: tuple[Kind, ...]

    @property
    def verdicts(self) -> list[str]:
        """On every batch that has a larger one of its kind."""
        return [each.verdict for kind in self.kinds for each in kind.limits[1:]]


def batch_loads(found: dict[str, Any]) -> list[BatchLoad]:
    """Mean E2E of each batch at each load. A batch that pipelined is not compared with one that planned as PD."""
    rows = []
    for scenario, own in found["scenarios"].items():
        arms = sorted((name for name in found["arms"] if name in own["arms"]), key=lambda name: -int(_size(name)))
        kinds: dict[bool, list[str]] = {}
        for name in arms:
            kinds.setdefault(pipelined(own, name), []).append(name)
        made = tuple(Kind(left, _limits(found, own, names)) for left, names in kinds.items())
        rows.append(BatchLoad(found["grid"].get(scenario, ("", scenario))[1], made))
    return rows


def _limits(found: dict[str, Any], own: dict[str, Any], names: Sequence[str]) -> tuple[Limit, ...]:
    """Of one kind, the largest first."""
    words = ["", *(_verdict(found, own, name, names[0]) for name in names[1:])]
    means = (own["arms"][name]["figures"]["e2e_ms_mean"] for name in names)
    return tuple(Limit(_size(name), *each) for name, *each in zip(names, means, words, strict=True))


def _verdict(found: dict[str, Any], own: dict[str, Any], arm: str, other: str) -> str:
    """On an arm's mean E2E over another's: the one that was made, else by what both took with each seed."""
    if other == found["reference"]:
        return str(own["compared"][arm]["e2e_ms_mean"]["verdict"])
    one, two = (own["arms"][name]["by_seed"] for name in (arm, other))
    logs = [math.log(one[seed]["e2e_ms_mean"] / two[seed]["e2e_ms_mean"]) for seed in sorted(one.keys() & two.keys())]
    again = own.get("itself", {}).get("e2e_ms_mean")
    noise = abs(math.log(again["ratio"])) if again else 0.0
    return judge("e2e_ms_mean", np.array([[each, each] for each in logs]), noise).verdict


def _size(arm: str) -> str:
    return arm.split()[-1]


def verification_cost() -> list[tuple[int, float]]:
    """Requests, and a pass of five tokens each over one of one token, as measured on an H200 with a 7B verifier."""
    return [(count, row[-1] / row[0]) for count, row in zip(H200.requests, H200.passes, strict=True)]
