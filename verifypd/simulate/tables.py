"""Measured tables as ready-made costs: an H200 with a 7B verifier and a 1.1B draft. Data and interpolation only.

`H200` answers straight from the measured table (contexts of 512 tokens; other contexts by the context term). `h200()`
is the cost model fitted to it: what a policy would believe after measuring. Passes are those of h200-head-steps.json
(commit bfd0f43), draft loops those of h200-draft-steps.json (362b8a4), both in benchmarks/results. What prompts add is
what recorded steps of mixed traffic show, at 7212482.

`HEAD` has the costs of the same verifier with a one-layer head: with them, and `gpu_settings`, the simulator is within
10 % of the p95 that the server has shown over HTTP.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import StepTiming

MS = 1e-3


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Times measured on a grid of requests × tokens each, linear between the points. Contexts in tokens."""

    requests: tuple[int, ...]
    tokens: tuple[int, ...]  # tokens of each request in a pass
    passes: tuple[tuple[float, ...], ...]  # ms, [requests][tokens]
    draft_steps: tuple[float, ...]  # ms of a step of a loop of four, catching up with two tokens included, [requests]
    context_each: int  # context of every request when measured
    context: float  # s a token of context in a verifier pass
    chunk_row: float  # s a token of a pass with prompts, beyond the first `chunk_free`
    chunk_free: int
    chunk_context: float  # s a (chunk token × context token)
    mixed: float  # s more where decode spans and chunks share a pass
    draft_row: float  # s a token caught up with, beyond the two of every step

    def pass_seconds(self, requests: float, tokens_each: float) -> float:
        """A verifier pass of `tokens_each` tokens for each request, at the measured context."""
        line = [_interpolate(self.tokens, row, tokens_each) for row in self.passes]
        return _interpolate(self.requests, line, requests) * MS

    def verify_seconds(
        self, rows: float, context: float, chunk_context: float = 0.0, requests: float | None = None
    ) -> float:
        """One verifier pass. Without `requests`, their number is read off the context."""
        if rows <= 0:
            return 0.0
        count = max(1.0, min(rows, context / self.context_each if requests is None else requests))
        extra = self.context * (context - count * self.context_each) + self.chunk_context * chunk_context
        return max(self.pass_seconds(1, 1) * 0.5, self.pass_seconds(count, rows / count) + extra)

    def draft_seconds(self, steps: int, rows: float, context: float) -> float:
        """A draft loop of `steps` that first catches up with `rows` tokens more than it always does."""
        if steps <= 0 and rows <= 0:
            return 0.0
        count = max(1.0, context / self.context_each)
        return max(steps, 1) * _interpolate(self.requests, self.draft_steps, count) * MS + self.draft_row * rows

    def samples(self) -> list[StepTiming]:
        """The table as measured steps, with what is known of contexts, chunks and catching up beside it."""
        found = []
        for i, count in enumerate(self.requests):
            context = count * self.context_each
            for j, each in enumerate(self.tokens):
                found.append(_pass(count, count * each, context, self.passes[i][j] * MS))
            for steps in (1, 4):
                found.append(_draft(count, steps, 2 * count, context, self.draft_seconds(steps, 0, context)))
            found.append(_draft(count, 1, 300 * count, context, self.draft_seconds(1, 298 * count, context)))
            for other in (context // 4, context * 4):
                found.append(_pass(count, count, other, self.verify_seconds(count, other, requests=count)))
            found.append(self._chunk(512, 0, count))
        return found + [self._chunk(rows, start) for rows in (64, 256, 512, 1024, 2048) for start in (0, 1024)]

    def _chunk(self, rows: int, start: int, beside: int = 0) -> StepTiming:
        """A pass with one chunk of so many tokens, after so many, beside so many requests that decode."""
        end, dear = start + rows, max(0, beside + rows - self.chunk_free)
        seconds = self.pass_seconds(max(1, beside), 1) + (self.mixed if beside else 0.0)
        return StepTiming(
            verify_requests=beside,
            verify_rows=beside + rows,
            verify_context=float(beside * self.context_each + end),
            chunk_rows=rows,
            chunk_context=rows * end,
            verify_seconds=seconds + self.chunk_row * dear + self.context * end + self.chunk_context * rows * end,
        )


def _pass(requests: int, rows: int, context: float, seconds: float) -> StepTiming:
    return StepTiming(verify_requests=requests, verify_rows=rows, verify_context=float(context), verify_seconds=seconds)


def _draft(requests: int, steps: int, rows: int, context: float, seconds: float) -> StepTiming:
    return StepTiming(
        draft_requests=requests,
        draft_steps=steps,
        draft_rows=rows,
        draft_context=float(context),
        draft_seconds=seconds,
    )


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between the points, and on along the last two beyond the end."""
    i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    return ys[i] + (ys[i + 1] - ys[i]) * (max(x, xs[0]) - xs[i]) / (xs[i + 1] - xs[i])


H200 = TableCosts(
    requests=(1, 8, 32, 128),
    tokens=(1, 2, 3, 4, 5),
    passes=(
        (3.69, 3.70, 3.75, 3.77, 3.93),
        (4.44, 4.44, 4.63, 4.66, 4.72),
        (6.08, 6.23, 6.73, 6.84, 7.29),
        (12.55, 13.76, 16.07, 18.11, 20.56),
    ),
    draft_steps=(0.829, 0.972, 1.372, 1.737),
    context_each=512,
    context=0.126e-6,
    chunk_row=14.2e-6,
    chunk_free=128,
    chunk_context=3.0e-9,
    mixed=0.55e-3,
    draft_row=3.2e-6,
)

HEAD = Coefficients(
    base=3.75e-3,
    row=9e-6,
    steep=14.2e-6,
    knee=128.0,
    context=0.165e-6,
    chunk_context=3e-9,
    mixed=0.5e-3,
    draft_step=0.28e-3,
    draft_context=5.7e-9,
    draft_row=0.65e-6,
)


def h200() -> CostModel:
    """The cost model fitted to the H200 table."""
    return CostModel().fit(H200.samples())
