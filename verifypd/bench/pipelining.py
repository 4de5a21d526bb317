"""The mark of a PDV that hardly pipelined, and scenarios won and lost, in which it counts apart.

Knows results as plain data; nothing of pictures.
"""

from __future__ import annotations

from typing import Any

from verifypd.bench.statistics import FASTER, NONE, SLOWER

LEAST_LEFT = 0.05  # of the plans of an arm that pipelines: below, what differs from PD is a step here and there
MARK, HARDLY = "°", "PDV hardly pipelined"
SAID = f"{MARK} {HARDLY}: under a twentieth of its plans left a draft for a later verify pass, so it did what PD does."
APART = f"{MARK} {HARDLY}, so it did what PD does: such scenarios count as neither won nor lost."


def mark(own: dict[str, Any], arm: str) -> str:
    """`°` for a PDV that planned as PD in this scenario; nothing for other arms."""
    return MARK if arm.startswith("pdv") and arm in own["arms"] and not pipelined(own, arm) else ""


def pipelined(own: dict[str, Any], arm: str) -> bool:
    """Whether enough plans of an arm left a draft for a later verify: with fewer PDV plans as PD does. True where the
    arm does not say."""
    totals = (own["arms"][arm]["parts"] or {"totals": {}})["totals"]
    return bool(totals.get("plans_left_n", 1.0) >= LEAST_LEFT * max(1.0, totals.get("plans_n", 1.0)))


def said(found: dict[str, Any]) -> str:
    """What the mark says, where an arm has it."""
    marked = any(mark(own, arm) for own in found["scenarios"].values() for arm in own["arms"])
    return SAID if marked else ""


def count(scenarios: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """By arm and figure: scenarios in which it was faster than the reference, slower, or neither.

    Those in which a PDV hardly pipelined count apart, whatever their verdict.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    for scenario in scenarios.values():
        for arm, metrics in scenario["compared"].items():
            apart = mark(scenario, arm)
            for metric, each in metrics.items():
                own = found.setdefault(arm, {}).setdefault(metric, dict.fromkeys((FASTER, SLOWER, NONE, HARDLY), 0))
                if each["verdict"] in own:
                    own[HARDLY if apart else each["verdict"]] += 1
    return found
