"""What a controller is: it sets draft lengths and the drafter's temperature. `fixed` and `threshold` live here.

Controllers see confirmed lengths, load, counts of accepted tokens and times; never a drawn draft token, so that no
choice can bias what is written. No torch, no clock, no logging.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from verifypd.control.cost import Work
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import Reading
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.temperature import TAU_STEP


class Controller:
    """Chooses how many tokens each request drafts next, and how hot its drafter draws. By itself it learns nothing."""

    gain = 1.0  # predicted: tokens a second over those of plain decoding; 1 where nothing is predicted

    @property
    def may_draft(self) -> bool:
        """Whether the next step may draft: while not, nobody needs to say what could be proposed."""
        return True

    @property
    def drafting(self) -> bool:
        """Whether it drafts at present, and does not only try now and then whether it should."""
        return self.may_draft

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot, riding: Reading) -> dict[int, int]:
        """slot → tokens to draft, no more than each is `allowed`, for requests that would draft and verify together.

        riding: the prompt chunks that their pass would carry.
        """
        raise NotImplementedError

    def temperature(self, view: RequestView) -> float:
        """τ: the drafter draws at τ times the request's temperature."""
        return 1.0

    def observe(self, seen: Observation) -> None:
        """A draft was judged."""

    def observe_step(self, timing: StepTiming) -> None:
        """A step was measured."""

    def forget(self, request_id: int) -> None:
        """A request has left for good."""

    def why(self) -> dict[str, Any]:
        """What its last choice was weighed against; empty where nothing was."""
        return {}

    def state(self) -> dict[str, float | str]:
        """What it believes and does now, by name, for metrics and records."""
        raise NotImplementedError


def allowed(view: RequestView, length: int) -> int:
    """`length`, unless the request or its drafter allows less. One token is left for the correction or bonus."""
    return max(0, min(length, view.draft_limit, view.expected, view.max_length - view.length_floor - 1))


def decode_work(views: Sequence[RequestView]) -> Work:
    """The verifier's work for these requests if nothing were drafted: a row each, and drafts already written."""
    rows = len(views) + sum([view.pending for view in views])
    return Work(rows, sum([view.length_bound for view in views]))


class FixedController(Controller):
    """Always asks for the same length."""

    def __init__(self, length: int) -> None:
        self.length = length

    @property
    def may_draft(self) -> bool:
        """Unless it never drafts."""
        return self.length > 0

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot, riding: Reading) -> dict[int, int]:
        """The same for all, as far as each allows."""
        return {view.slot: length for view in views if (length := allowed(view, self.length))}

    def state(self) -> dict[str, float | str]:
        """The length."""
        return {"draft_length": self.length}


class ThresholdController(FixedController):
    """The original's rules: one length for all, moved by one every ten observations, by fixed limits."""

    SHORTEST, LONGEST, START = 2, 8, 4
    EVERY = 10  # observations (verified drafts) between two moves
    WINDOW = 100  # decode-lane steps the p95 is taken over
    QUEUE_HIGH, QUEUE_LOW = 10, 1  # requests in the verify queue
    P95_HIGH, P95_LOW = 50e-3, 45e-3  # s
    RATE_LOW, RATE_HIGH = 0.35, 0.65

    def __init__(self, longest: int = LONGEST) -> None:
        super().__init__(min(self.START, longest))
        self.longest = min(self.LONGEST, longest)
        self.tau = 1.0
        self.queue = 0
        self._steps: deque[float] = deque(maxlen=self.WINDOW)  # s, queue wait included
        self._verified: list[Observation] = []  # since the last move

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot, riding: Reading) -> dict[int, int]:
        """The same for all, as far as each allows."""
        self.queue = sum(1 for view in snapshot.requests if view.pending)
        return super().draft_lengths(views, snapshot, riding)

    def temperature(self, view: RequestView) -> float:
        """A tenth above the request's own under pressure."""
        return self.tau

    def observe(self, seen: Observation) -> None:
        """Count a verified draft; every tenth moves the length."""
        self._verified += [seen] if seen.drafted else []
        if len(self._verified) == self.EVERY:
            self._move()
            self._verified.clear()

    def observe_step(self, timing: StepTiming) -> None:
        """Keep the latency of a decode-lane step."""
        if timing.draft_requests:
            self._steps.append(timing.decode_wait + timing.draft_seconds)

    def state(self) -> dict[str, float | str]:
        """The length, and what it was last moved by."""
        return {"draft_length": self.length, "tau": self.tau, "queue": self.queue, "decode_p95_ms": self.p95 * 1e3}

    @property
    def p95(self) -> float:
        """95th percentile of the last decode-lane steps, s."""
        steps = sorted(self._steps)
        return steps[math.ceil(0.95 * len(steps)) - 1] if steps else 0.0

    def _move(self) -> None:
        p95 = self.p95
        # the correction token counts as accepted, as the original had it
        rate = sum(seen.emitted for seen in self._verified) / sum(seen.drafted for seen in self._verified)
        overloaded = self.queue > self.QUEUE_HIGH or p95 > self.P95_HIGH
        self.tau = 1.0 + TAU_STEP if overloaded else 1.0
        if overloaded or rate < self.RATE_LOW:
            self.length = max(min(self.SHORTEST, self.longest), self.length - 1)
        elif self.queue <= self.QUEUE_LOW and p95 < self.P95_LOW and rate > self.RATE_HIGH:
            self.length = min(self.longest, self.length + 1)
