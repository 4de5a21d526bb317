"""Chooses between drafting and plain decoding at run time, and keeps a record of why.

`plain` is `unified` with nothing drafted, plan for plan. Whether and how much to draft is the controller's choice; here
it gets a name. Pure: no clock, no torch, no logging.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from verifypd.control.architectures import Unified
from verifypd.control.controller import Controller
from verifypd.control.cost import CostModel
from verifypd.control.snapshot import Plan, Snapshot

KEPT = 1000  # decisions remembered


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of mind."""

    step: int
    time: float  # s of the engine's clock
    previous: str
    architecture: str
    reason: str


class Auto(Unified):
    """The default. `baseline`, `pd` and `pdv` are no choices: they read the weights more often for the same work."""

    name = "auto"

    def __init__(self, controller: Controller, cost: CostModel | None = None) -> None:
        super().__init__(controller, cost)
        self.label = Unified.name  # or "plain" while nothing is drafted but for probes
        self._drafted = False  # whether the last plan drafts, be it a probe
        self.decisions: deque[Decision] = deque(maxlen=KEPT)  # the latest
        self.decided = 0  # all there were

    @property
    def ran(self) -> str:
        """`unified`, or `plain` where nothing is drafted. A probe is a step of `unified`, though no change of mind."""
        return Unified.name if self._drafted else self.label

    def plan(self, snapshot: Snapshot) -> Plan:
        """As `unified`; note when drafting begins and ends."""
        plan = super().plan(snapshot)
        self._drafted = plan.draft is not None
        if plan.decodes or self._drafted:
            self._name(snapshot)
        return plan

    def state(self) -> dict[str, float | str]:
        """What runs, how often it has changed its mind, and what its controller believes."""
        return super().state() | {"decisions": self.decided}

    def _name(self, snapshot: Snapshot) -> None:
        drafting = snapshot.drafter is not None and self.controller.drafting
        label = Unified.name if drafting else "plain"
        if label == self.label:
            return
        gain = 1e2 * (self.controller.gain - 1.0)
        reason = f"drafting predicted to gain {gain:.1f} %" if snapshot.drafter is not None else "no drafter"
        self.decisions.append(Decision(snapshot.step, snapshot.now, self.label, label, reason))
        self.label = label
        self.decided += 1
