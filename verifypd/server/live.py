"""What a dashboard shows beside the counters: the last steps, who is where, what the policy believes and why.

Made once for each report of the engine, however many look on. Small and cheap: lists of numbers. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any

from verifypd.control.observe import StepTiming
from verifypd.engine.timing import RECENT

CHANGES = 12  # changes of architecture that are remembered
PRICED = 8  # steps of a view that are held against the cost model, at most
SHOWN = 64  # requests that are told one by one
CURVES = 8  # requests whose expected acceptance is averaged, at most
LANES = ("prefill", "decode", "verify")


class Lookout:
    """Follows one engine: what has changed since it last looked, and what is to be seen now."""

    def __init__(self) -> None:
        self.changes: deque[tuple[float, str, str, str]] = deque(maxlen=CHANGES)  # time, before, after, reason
        self._decision: Any = None  # the last of the policy's own that was seen
        self._steps: deque[list[Any]] = deque(maxlen=RECENT)
        self._seen = 0  # number of the last step that is among them

    def changed(self, now: float, before: str, after: str, reason: str) -> None:
        """Another architecture is in use."""
        if before != after:
            self.changes.append((now, before, after, reason))

    def look(self, engine: Any, now: float) -> dict[str, Any]:
        """The view. `now` is the engine's clock."""
        steps = list(engine.recent)
        self._follow(engine.architecture)
        fresh = list(takewhile(lambda past: past.timed.step > self._seen, reversed(steps)))
        self._steps.extend([_step(past) for past in reversed(fresh)])
        self._seen = steps[-1].timed.step if steps else 0
        return {
            "time": now,
            "steps": list(self._steps),
            "requests": _requests(engine, steps, now),
            "waiting": [[request.order, _ms(now - request.metrics.arrival_time)] for request in engine.waiting[:SHOWN]],
            "price": _price(engine.cost, [past.timing for past in fresh if not past.timing.chunk_rows][:PRICED]),
            "policy": engine.architecture.state(),
            "survival": _survival(engine.architecture),
            "changes": [list(change) for change in self.changes],
        }

    def _follow(self, policy: Any) -> None:
        """Take over what the policy has decided since."""
        decisions = getattr(policy, "decisions", ())
        fresh = list(takewhile(lambda decision: decision is not self._decision, islice(reversed(decisions), CHANGES)))
        for decision in reversed(fresh):
            self.changed(decision.time, decision.previous, decision.architecture, decision.reason)
        self._decision = decisions[-1] if decisions else self._decision


def _step(past: Any) -> list[Any]:
    """Number, architecture, µs of prefill, draft, verify and the rest, and the sizes of its batches."""
    timed, timing = past.timed, past.timing
    seconds = (timing.prefill_seconds, timing.draft_seconds, timing.verify_seconds, past.rest)
    return [
        timed.step,
        timed.architecture,
        *[round(1e6 * value) for value in seconds],
        timing.draft_requests,
        timing.draft_steps,
        timing.verify_requests,
        timing.chunk_rows,
    ]


def _requests(engine: Any, steps: Sequence[Any], now: float) -> list[list[int]]:
    """Number, lane, whether the last step carried it, output tokens and ms in its lane; of each with a slot."""
    batches = steps[-1].slots() if steps else {lane: set() for lane in LANES}
    found = []
    for slot, request in list(engine.running.items())[:SHOWN]:
        if slot in batches["prefill"]:
            place, carried = 0, True
        elif slot in batches["verify"]:
            place, carried = 2, True
        elif slot in batches["decode"]:
            place, carried = 1, True
        else:
            place, carried = _queue(request.state.value), False
        found.append([request.order, place, int(carried), request.output_len, _ms(now - request.entered)])
    return found


def _ms(seconds: float) -> int:
    return max(0, round(1e3 * seconds))


def _queue(state: str) -> int:
    return LANES.index(state) if state in LANES else 1


def _price(cost: Any, timings: Sequence[Any]) -> dict[str, float] | None:
    """Seconds of steps: measured, predicted, and predicted had nothing been drafted. None: nothing is known.

    Steps that carry prompts are left out: their time is paid whatever is drafted, and would hide what drafts cost.
    """
    if cost is None or not cost.known or not timings:
        return None
    return {
        "steps": len(timings),
        "measured": sum(timing.seconds for timing in timings),
        "predicted": sum(cost.step_seconds(timing) for timing in timings),
        "undrafted": sum(cost.step_seconds(_undrafted(timing)) for timing in timings if timing.verify_requests),
    }


def _undrafted(timing: StepTiming) -> StepTiming:
    """A step without prompts, had nothing been drafted in it or before it."""
    return replace(timing, draft_steps=0, draft_rows=0, draft_context=0.0, verify_rows=timing.verify_requests)


def _survival(policy: Any) -> list[float]:
    """How far the controller expects a draft to stand, by position: the mean over some requests that are known now;
    empty where it does not say."""
    acceptance = getattr(getattr(policy, "controller", None), "acceptance", None)
    curves = [acceptance.curve(*each) for each in acceptance.known[:CURVES]] if acceptance is not None else []
    return [round(sum(values) / len(curves), 4) for values in zip(*curves, strict=True)]
