"""Chooses among the architectures at run time, and keeps a record of why.

Now and then it prices the work of a step as each architecture would run it, and takes another where that is cheaper by
more than the margin. Whether anything is drafted is its controller's choice: `plain` is `unified` with nothing drafted,
plan for plan, and is named when so. Pure: no clock, no torch, no logging.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from verifypd.control.architectures import PDV, Chooser, Unified, decoding
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


class Auto(Chooser):
    """The policy over the policies.

    `baseline` and `pd` are not among the choices: they read the weights more often for the same work. So does `pdv`,
    but where drafts are written beside the verifier its halves take turns, and neither waits for the other.
    """

    name = "auto"
    shapes = (Unified, PDV)

    def __init__(self, controller: Controller, cost: CostModel | None = None) -> None:
        super().__init__(controller, cost)
        self.label = self.running  # the same, or "plain" while nothing is drafted
        self.decisions: deque[Decision] = deque(maxlen=KEPT)  # the latest
        self.decided = 0  # all there were
        self.predicted: dict[str, float] = {}  # architecture → s for the work of a step, when last weighed
        self._weighed = 0  # step

    @property
    def ran(self) -> str:
        """The chosen one's, or `plain` while nothing is drafted."""
        return self.label if self.label == "plain" else super().ran

    def plan(self, snapshot: Snapshot) -> Plan:
        """Weigh the others now and then, then as the chosen one plans."""
        if snapshot.step >= self._weighed + REVIEW_EVERY and self.cost.known:
            self._weigh(snapshot)
        plan = super().plan(snapshot)
        if plan.decodes or plan.draft is not None:
            self._relabel(snapshot)
        return plan

    def state(self) -> dict[str, float | str]:
        """What it has chosen, how often it has changed its mind, and what its controller believes."""
        predicted = {f"predicted_{name}_ms": 1e3 * seconds for name, seconds in self.predicted.items()}
        return super().state() | {"decisions": self.decided} | predicted

    def predict(self, snapshot: Snapshot) -> dict[str, float]:
        """Seconds that each architecture would take for the work of the next step."""
        views = decoding(snapshot)[: snapshot.batch_size]
        if not views:
            return {}
        count, context = len(views), float(sum([view.length_bound for view in views]))
        drafts = int(self.controller.state()["draft_length"])
        decode, chunks = Work(count * (1 + drafts), context), self.choices[self.running].riding(views, snapshot)
        draft = self.cost.draft_seconds(drafts, count * min(2, drafts), context) if drafts else 0.0
        seconds = {"unified": draft + self.cost.pass_seconds(decode + chunks)}
        if count >= 2 and drafts and snapshot.overlap:  # two halves take turns
            half = self.cost.pass_seconds(Work(decode.rows / 2, context / 2))
            loop = self.cost.draft_seconds(drafts, count, context / 2)
            seconds["pdv"] = 2 * max(loop, half) + self.cost.pass_seconds(chunks)
        return seconds

    def _weigh(self, snapshot: Snapshot) -> None:
        """Price the architectures; switch where one is clearly cheaper. Nothing is weighed while nobody decodes."""
        if not (predicted := self.predict(snapshot)):
            return
        self._weighed, self.predicted = snapshot.step, predicted
        best = min(predicted, key=lambda name: predicted[name])
        if self.running not in predicted:
            self._switch(snapshot, best, best, f"{self.running} has nothing to share out")
        elif predicted[best] * (1.0 + MARGIN) < predicted[self.running]:
            saved = 1e2 * (1.0 - predicted[best] / predicted[self.running])
            self._switch(snapshot, best, best, f"predicted to take {saved:.0f} % less time than {self.running}")

    def _relabel(self, snapshot: Snapshot) -> None:
        """Note when drafting begins and ends."""
        drafting = snapshot.drafter is not None and self.controller.drafting
        label = "plain" if self.running == "unified" and not drafting else self.running
        if label != self.label:
            gain = 1e2 * (float(self.controller.state().get("gain", 1.0)) - 1.0)
            reason = f"drafting predicted to gain {gain:.1f} %" if snapshot.drafter is not None else "no drafter"
            self._switch(snapshot, self.running, label, reason)

    def _switch(self, snapshot: Snapshot, running: str, label: str, reason: str) -> None:
        predicted = {name: 1e3 * seconds for name, seconds in self.predicted.items()}
        self.decisions.append(Decision(snapshot.step, snapshot.now, self.label, label, reason, predicted))
        self.running, self.label = running, label
        self.decided += 1
