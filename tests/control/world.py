"""Requests that never end on the measured machine, for tests of controllers.

The table decides what a step takes, made-up chances what stands.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.control.views import snapshot, view
from verifypd.control.controller import Controller
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import Reading
from verifypd.simulate.tables import H200


class World:
    """Requests that never end on the measured machine; acceptance is a function of step and request."""

    def __init__(
        self,
        requests: int,
        alpha: Callable[[int, int], float],
        seed: int = 0,
        noise: float = 0.03,
        batch_size: int = 256,
    ) -> None:
        self.requests = requests
        self.batch_size = batch_size
        self.alpha = alpha
        self.noise = noise
        self.rng = random.Random(seed)
        self.lag = [2] * requests
        self.emitted = [0] * requests
        self.time = 0.0
        self.step = 0

    def run(self, controller: Controller, steps: int) -> tuple[float, list[float]]:
        """(tokens a second, mean draft length of each step)."""
        tokens, start, means = 0, self.time, []
        for _ in range(steps):
            views = [view(i, draft_lag=self.lag[i], emitted=self.emitted[i]) for i in range(self.requests)]
            lengths = controller.draft_lengths(views, snapshot(views, batch_size=self.batch_size), Reading())
            controller.observe_step(self.measure(lengths))
            tokens += sum(self.judge(controller, i, lengths.get(i, 0)) for i in range(self.requests))
            means.append(sum(lengths.values()) / self.requests)
            self.step += 1
        return tokens / (self.time - start), means

    def measure(self, lengths: dict[int, int]) -> StepTiming:
        count, n = self.requests, len(lengths)
        rows = count + sum(lengths.values())
        caught_up = sum(self.lag[i] for i in lengths)
        draft = H200.draft_seconds(max(lengths.values(), default=0), caught_up - 2 * n, n * 512.0)
        timing = StepTiming(
            draft_requests=n,
            draft_steps=max(lengths.values(), default=0),
            draft_rows=caught_up,
            draft_context=n * 512.0,
            verify_requests=count,
            verify_rows=rows,
            verify_context=count * 512.0,
            draft_seconds=draft * self.rng.lognormvariate(0, self.noise),
            verify_seconds=H200.verify_seconds(rows, count * 512.0, requests=count)
            * self.rng.lognormvariate(0, self.noise),
        )
        self.time += timing.device_seconds
        return timing

    def judge(self, controller: Controller, i: int, length: int) -> int:
        accepted = 0
        while accepted < length and self.rng.random() < self.alpha(self.step, i):
            accepted += 1
        self.lag[i] = 2 if length else self.lag[i] + 1
        self.emitted[i] += accepted + 1
        controller.observe(Observation(i, length, accepted, accepted + 1, False, False, 1.0, "model"))
        return accepted + 1


def true_rate(requests: int, alpha: float, length: int) -> float:
    """Tokens a second of a fixed length, from the measured table."""
    seconds = H200.pass_seconds(requests, length + 1) + length * H200.draft_seconds(1, 0, requests * 512)
    return requests * sum(alpha**i for i in range(length + 1)) / seconds
