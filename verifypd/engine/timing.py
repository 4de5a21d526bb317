"""Times the batches of each plan and tells them on once the device has finished. Waits for nothing, decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from verifypd.control.observe import StepTiming
from verifypd.control.snapshot import Plan
from verifypd.lanes.placement import LaneTimer

RECENT = 48  # steps remembered for those who look on
KINDS = {"decode": "draft_seconds", "verify": "verify_seconds", "prefill": "prefill_seconds"}


@dataclass(slots=True)
class TimedPlan:
    """A launched plan and the timers of its batches, by lane."""

    step: int
    policy: str  # the architecture in force
    architecture: str  # the one whose plan this is
    plan: Plan
    begun: float  # s, when the step began on the host
    timers: dict[str, LaneTimer] = field(default_factory=dict)
    beside: bool = False  # whether other work ran on the device at the same time
    ended: float = 0.0  # s, when the step ended on the host; 0: it has not
    why: dict[str, Any] = field(default_factory=dict)  # what the plan was chosen over
    decode_wait: float = 0.0  # s the longest-waiting of the drafting requests stood in the decode lane

    @property
    def start(self) -> float:
        """When the first batch was launched, s."""
        return min(timer.started for timer in self.timers.values())

    def seconds(self) -> dict[str, float]:
        """Length of each batch that ran, by kind."""
        return {KINDS[lane]: timer.seconds() for lane, timer in self.timers.items()}

    def timing(self) -> StepTiming:
        """In the numbers of the cost model."""
        return self.plan.work(decode_wait=self.decode_wait, step_seconds=self._step_seconds(), **self.seconds())

    def _step_seconds(self) -> float:
        """From the beginning of the step to the end of its last batch, host work included; 0: not known."""
        ends = [timer.ended for timer in self.timers.values()]
        known = [end for end in ends if end is not None]
        return max(0.0, max(known) - self.begun) if known and len(known) == len(ends) else 0.0


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step that has run, and what was measured of it."""

    timed: TimedPlan
    timing: StepTiming

    @property
    def rest(self) -> float:
        """s of the step on the host in which none of its own batches ran: planning, bookkeeping, waiting."""
        return max(0.0, self.timed.ended - self.timed.begun - self.timing.device_seconds)

    def slots(self) -> dict[str, set[int]]:
        """Who was in it, by lane."""
        plan = self.timed.plan
        verify = plan.verify.spans if plan.verify else ()
        chunks = [*(span for span in verify if span.start is not None), *(plan.prefill.spans if plan.prefill else ())]
        return {
            "prefill": {span.slot for span in chunks},
            "decode": {span.slot for span in plan.draft.spans if span.drafts} if plan.draft else set(),
            "verify": {span.slot for span in verify if span.start is None},
        }


class TimedPlans:
    """Plans whose times are not all known yet, in launch order."""

    def __init__(self) -> None:
        self._plans: deque[TimedPlan] = deque()

    def add(self, plan: TimedPlan) -> None:
        """Count a launched plan in."""
        self._plans.append(plan)

    def finished(self) -> list[TimedPlan]:
        """Those that the device has finished, oldest first."""
        ready: list[TimedPlan] = []
        kept: deque[TimedPlan] = deque()
        for plan in self._plans:
            done = all(timer.ready() for timer in plan.timers.values())
            (ready if done else kept).append(plan)
        self._plans = kept
        return ready
