"""Chooses among the architectures at run time, and keeps a record of why.

Now and then it prices the work of a step as each architecture would run it, and takes another where that is cheaper by
more than the margin. Whether anything is drafted is its controller's choice: `plain` is `unified` with nothing drafted,
plan for plan, and is named when so. Pure: no clock, no torch, no logging.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from verifypd.control.architectures import PD, PDV, Architecture, Unified, decoding
from verifypd.control.controller import Controller
from verifypd.control.cost import CostModel, Work
from verifypd.control.snapshot import Plan, Snapshot
from verifypd.control.tuning import MARGIN, REVIEW_EVERY

KEPT = 1000  # decisions remembered


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of mind."""

    step: int
    time: float  # s of the engine's clock
    previous: str
    architecture: str
    reason: str
    predicted: dict[str, float]  # architecture → ms for the work of a step


class Auto(Architecture):
    """The policy over the policies.

    `baseline` is not among the choices: at one worker it is `pd` with one request, with more it only reads the weights
    more often.
    """

    name = "auto"

    def __init__(self, controller: Controller, cost: CostModel | None = None) -> None:
        super().__init__(controller, cost)
        shapes = (Unified(controller, self.cost), PD(controller, self.cost), PDV(controller, self.cost))
        self.choices: dict[str, Architecture] = {shape.name: shape for shape in shapes}
        self.running = "unified"  # whose plans it answers with
        self.label = "unified"  # the same, or "plain" while nothing is drafted
        self.decisions: deque[Decision] = deque(maxlen=KEPT)  # the latest
        self.decided = 0  # all there were
        self.predicted: dict[str, float] = {}  # architecture → s for the work of a step, when last weighed
        self._weighed = 0  # step
        self._ran, self._why = "unified", self.choices["unified"].why  # of the last plan

    @property
    def ran(self) -> str:
        """Whose plan the last one was: the chosen one's, or `plain` while nothing is drafted."""
        return self._ran

    def plan(self, snapshot: Snapshot) -> Plan:
        """What the next step runs: the plan of the one that runs. Another may be chosen for the step after it."""
        shape = self.choices[self.running]
        plan = shape.plan(snapshot)
        busy = plan.decodes or plan.draft is not None
        if busy:
            self._relabel(snapshot)
        self._ran = "plain" if self.label == "plain" else shape.ran
        self._why = shape.why
        if busy and snapshot.step >= self._weighed + REVIEW_EVERY and self.cost.known:
            self._weigh(snapshot)
        return plan

    def state(self) -> dict[str, float | str]:
        """What it has chosen, how often it has changed its mind, and what its controller believes."""
        chosen: dict[str, float | str] = {"architecture": self.ran, "decisions": self.decided}
        predicted = {f"predicted_{name}_ms": 1e3 * seconds for name, seconds in self.predicted.items()}
        return chosen | self.controller.state() | predicted

    def why(self) -> dict[str, Any]:
        """As the one whose plan it was."""
        return self._why()

    def predict(self, snapshot: Snapshot) -> dict[str, float]:
        """Seconds that each architecture would take for the work of the next step."""
        views = decoding(snapshot)[: snapshot.batch_size]
        if not views:
            return {}
        count, context = len(views), float(sum([view.length_bound for view in views]))
        drafts = int(self.controller.state()["draft_length"])
        decode, chunks = Work(count * (1 + drafts), context), self.riding(views, snapshot)
        draft = self.cost.draft_seconds(drafts, count * min(2, drafts), context) if drafts else 0.0
        seconds = {
            "unified": draft + self.cost.pass_seconds(decode + chunks),
            "pd": draft + self.cost.pass_seconds(decode) + self.cost.pass_seconds(chunks),
        }
        if count >= 2 and drafts:  # two halves take turns
            half = self.cost.pass_seconds(Work(decode.rows / 2, context / 2))
            loop = self.cost.draft_seconds(drafts, count, context / 2)
            turns = 2 * (max(loop, half) if snapshot.overlap else loop + half)
            seconds["pdv"] = turns + self.cost.pass_seconds(chunks)
        return seconds

    def _weigh(self, snapshot: Snapshot) -> None:
        """Price the architectures; switch where one is clearly cheaper."""
        self._weighed = snapshot.step
        self.predicted = self.predict(snapshot)
        best = min(self.predicted, key=lambda name: self.predicted[name], default=self.running)
        here = self.predicted.get(self.running)
        if here is None and best != self.running:
            self._switch(snapshot, best, best, f"{self.running} has nothing to share out")
        elif here is not None and self.predicted[best] * (1.0 + MARGIN) < here:
            saved = 1e2 * (1.0 - self.predicted[best] / here)
            self._switch(snapshot, best, best, f"predicted to take {saved:.0f} % less time than {self.running}")

    def _relabel(self, snapshot: Snapshot) -> None:
        """Note when drafting begins and ends."""
        if self.running != "unified":
            return
        drafting = snapshot.drafter is not None and self.controller.drafting
        label = "unified" if drafting else "plain"
        if label != self.label:
            gain = self.controller.state().get("gain")
            predicted = (
                f"drafting predicted to gain {1e2 * (float(gain) - 1):.1f} %" if gain is not None else "drafting"
            )
            self._switch(snapshot, self.running, label, predicted if snapshot.drafter is not None else "no drafter")

    def _switch(self, snapshot: Snapshot, running: str, label: str, reason: str) -> None:
        predicted = {name: 1e3 * seconds for name, seconds in self.predicted.items()}
        self.decisions.append(Decision(snapshot.step, snapshot.now, self.label, label, reason, predicted))
        self.running, self.label = running, label
        self.decided += 1
