"""When to use which architecture, from results: the fastest arm of each scenario, and the original's rules beside it.

Knows results and names of models; nothing of engines.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from verifypd.bench.campaign import AGAIN
from verifypd.bench.modes import UNJUDGED, pipelined
from verifypd.bench.results import judged
from verifypd.bench.statistics import FASTER, SLOWER
from verifypd.control.architectures import SELECT_VARIANTS, select_architecture
from verifypd.models.builtin import find
from verifypd.simulate.tables import H200

RIGHT, WRONG, EITHER = "right", "wrong", "no difference"
ALIKE = "PDV planned as PD"  # no draft waited for a later verify


def fastest(own: dict[str, Any]) -> str:
    """The arm with the lowest mean E2E of a scenario; the one that ran twice counts once."""
    arms = {name: each["figures"]["e2e_ms_mean"] for name, each in own["arms"].items() if not name.endswith(AGAIN)}
    return min(arms, key=lambda name: arms[name])


def over_pd(found: dict[str, Any], own: dict[str, Any], arm: str) -> dict[str, Any] | None:
    """The mean E2E of an arm over PD's, compared; None where one of them did not run."""
    compared = own["compared"] if found["reference"] == "pd" else own["over_pd"]
    return compared.get(arm, {}).get("e2e_ms_mean")


def three_lanes(own: dict[str, Any]) -> str | None:
    """The arm of a scenario that stands for PDV: the one that pipelines."""
    return next((name for name in ("pdv", "pdv pipelined") if name in own["arms"]), None)


def sizes(pair: str) -> tuple[float, float] | None:
    """GB of a pair's verifier in 16 bits, and how many times its draft's size that is; None: models without a name."""
    draft, _, verifier = pair.partition(" ")[0].partition(":")
    large, small = find(verifier), find(draft)
    if large is None or small is None:
        return None
    return 2 * large.config.parameters / 1e9, large.config.parameters / small.config.parameters


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


def batch_verdicts(found: dict[str, Any]) -> list[tuple[str, dict[str, tuple[float, str]]]]:
    """By scenario: mean E2E in ms of each arm, and its word against the reference."""
    rows = []
    for scenario, own in found["scenarios"].items():
        words = {name: own["compared"].get(name, {}).get("e2e_ms_mean", {}).get("verdict", "") for name in own["arms"]}
        figures = {name: each["figures"]["e2e_ms_mean"] for name, each in own["arms"].items()}
        kept = {name: (figures[name], words[name]) for name in found["arms"] if name in figures}
        rows.append((found["grid"].get(scenario, ("", scenario))[1], kept))
    return rows


def verification_cost() -> list[tuple[int, float]]:
    """Requests, and a pass of five tokens each over one of one token, as measured on an H200 with a 7B verifier."""
    return [(count, row[-1] / row[0]) for count, row in zip(H200.requests, H200.passes, strict=True)]
