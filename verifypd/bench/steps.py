"""What an engine did while one request waited longest for its next output. Knows steps and pauses; drives nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verifypd.control.cost import CostModel
from verifypd.engine.engine import Engine
from verifypd.engine.timing import TimedPlan
from verifypd.metrics.pauses import WATCH, Pause

KEPT = 64  # steps remembered, of which a gap may be made
SHOWN = 4  # of those, the longest


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the engine, as its driver saw it."""

    began: float  # s of the engine's clock, before verdicts were collected
    planned: float  # s, when they were
    ended: float  # s, when the plan was launched
    plan: TimedPlan | None  # what was launched, if anything
    allocated: int = 0  # times that memory, the device's or pinned, was got from the driver

    def summary(self, origin: float, cost: CostModel | None, pauses: Sequence[Pause]) -> dict[str, Any]:
        """The figures, times in ms from `origin` on; host: to plan and launch, waited: for verdicts before that."""
        found: dict[str, Any] = {
            "at_ms": _ms(self.began - origin),
            "waited_ms": _ms(self.planned - self.began),
            "host_ms": _ms(self.ended - self.planned),
        }
        paused = Counter(each.kind for each in pauses if self.began < each.ended <= self.ended)
        found |= {"pauses": dict(paused)} if paused else {}
        found |= {"allocated": self.allocated} if self.allocated else {}
        if self.plan is None:
            return found
        work, verify = self.plan.plan.work(), self.plan.plan.verify
        chunks = [span.rows for span in verify.spans if span.start is not None] if verify else []
        timers = self.plan.timers.values()
        device = sum(timer.seconds() for timer in timers) if all(timer.ready() for timer in timers) else None
        return found | {
            "rows": work.verify_rows, "requests": work.verify_requests, "chunks": chunks,
            "context": work.verify_context, "drafting": work.draft_requests, "draft_steps": work.draft_steps,
            "draft_rows": work.draft_rows, "price_ms": _ms(cost.step_seconds(work)) if cost else None,
            "device_ms": None if device is None else _ms(device),
        }  # fmt: skip


class Steps:
    """The latest steps of a run, and those behind its longest gap."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.longest = 0.0  # s
        self._latest: deque[Step] = deque(maxlen=KEPT)
        self._behind: list[Step] = []
        self._before: list[Step] = []  # the one before them, whose pass may have run into the gap
        self._ends_here = False  # whether the longest gap ended in the turn that is under way
        self._pauses: list[Pause] = []
        self._began: float | None = None  # s, when verdicts were last collected for the step to come
        self._allocated = _taken(engine)

    def collecting(self) -> None:
        """Verdicts are about to be collected."""
        self._began = self.engine.clock()

    def stepping(self) -> float:
        """A step is about to be planned; returns when, s."""
        now = self.engine.clock()
        if self._began is None:
            self._began = now
        return now

    def stepped(self, planned: float) -> None:
        """It was launched."""
        began, ended, engine = self._began, self.engine.clock(), self.engine
        assert began is not None, "a step begins before it ends"
        plan = engine.latest if engine.latest is not None and engine.latest.begun >= began else None
        allocated = _taken(engine)
        step = Step(began, planned, ended, plan, allocated - self._allocated)
        self._allocated = allocated
        self._latest.append(step)
        if self._ends_here:
            self._behind.append(step)
        self._began, self._ends_here = None, False

    def gap(self, earlier: float, later: float) -> None:
        """Two outputs of a request came at these times, s."""
        if later - earlier > self.longest:
            self.longest = later - earlier
            self._behind = [step for step in self._latest if step.ended > earlier and step.began < later]
            self._before = [step for step in self._latest if step.ended <= earlier][-1:]
            self._ends_here = self._began is not None
            self._pauses = WATCH.between(earlier, later)

    def summary(self) -> dict[str, Any]:
        """The longest gap: the step before it, the longest of those in it, by host time and waiting, and what paused
        them."""
        if not self._behind:
            return {}
        origin = self._behind[0].began
        shown = sorted(self._behind, key=lambda step: step.began - step.ended)[:SHOWN]  # the longest
        return {
            "ms": _ms(self.longest),
            "steps": len(self._behind),
            "longest_steps": [
                step.summary(origin, self.engine.cost, self._pauses)
                for step in [*self._before, *sorted(shown, key=_began)]
            ],
            "pauses": [{"kind": each.kind, "name": each.name, "ms": _ms(each.seconds)} for each in self._pauses],
        }


def _taken(engine: Engine) -> int:
    """Times that memory was got from CUDA so far."""
    found = engine.memory_taken
    return found.get("allocated", 0) + found.get("pinned", 0)


def _began(step: Step) -> float:
    return step.began


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
