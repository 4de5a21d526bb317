"""Measured tables as ready-made costs: an H200 with a 7B verifier and a 1.1B draft. Data and interpolation only.

`H200` answers straight from the measured table (contexts of 512 tokens; other contexts by the context term). `h200()`
is the cost model fitted to it: what a policy would believe after measuring.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from verifypd.control.cost import CostModel
from verifypd.control.observe import StepTiming

MS = 1e-3


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Times measured on a grid of requests × tokens each, linear between the points. Contexts in tokens."""

    requests: tuple[int, ...]
    tokens: tuple[int, ...]  # tokens of each request in a pass
    passes: tuple[tuple[float, ...], ...]  # ms, [requests][tokens]
    draft_steps: tuple[float, ...]  # ms of a draft step, [requests]
    context_each: int  # context of every request when measured
    context: float  # s a token of context in a verifier pass
    draft_context: float  # s a token of context in a draft step
    chunk_context: float  # s a (chunk token × context token)
    draft_row: float  # s a token caught up with

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
        """A draft loop of `steps` that first catches up with `rows` tokens."""
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
                found.append(_draft(count, steps, 2 * count, context, self.draft_seconds(steps, 2 * count, context)))
            found.append(_draft(count, 1, 300 * count, context, self.draft_seconds(1, 300 * count, context)))
            for other in (context // 4, context * 4):
                found.append(_pass(count, count, other, self.verify_seconds(count, other, requests=count)))
        for rows in (64, 256, 1024, 2048):
            for start in (0, 2048):
                square = rows * (start + rows / 2)
                seconds = self.pass_seconds(1, 1) * 0.95 + max(0.0, 21e-6 * (rows - 210))
                seconds += self.context * (start + rows) + self.chunk_context * square
                found.append(_chunk(rows, start + rows, square, seconds))
        return found


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


def _chunk(rows: int, context: float, square: float, seconds: float) -> StepTiming:
    return StepTiming(
        verify_rows=rows,
        verify_context=float(context),
        chunk_rows=rows,
        chunk_context=square,
        verify_seconds=seconds,
    )


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between the points, and on along the last two beyond the end."""
    i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    return ys[i] + (ys[i + 1] - ys[i]) * (max(x, xs[0]) - xs[i]) / (xs[i + 1] - xs[i])


H200 = TableCosts(
    requests=(1, 16, 32, 64, 128, 256),
    tokens=(1, 2, 3, 5, 9),
    passes=(
        (4.60, 4.69, 4.71, 4.75, 4.76),
        (5.54, 5.68, 5.72, 5.86, 6.22),
        (6.56, 6.73, 6.92, 7.63, 9.38),
        (8.54, 9.38, 10.0, 13.4, 18.8),
        (12.8, 16.2, 18.4, 24.3, 34.9),
        (22.1, 30.4, 35.2, 46.5, 68.1),
    ),
    draft_steps=(1.20, 1.43, 1.49, 1.61, 1.85, 2.37),
    context_each=512,
    context=0.14e-6,
    draft_context=8.6e-9,
    chunk_context=0.7e-9,
    draft_row=3.4e-6,  # 64 requests × 300 tokens: 65 ms
)


def h200() -> CostModel:
    """The cost model fitted to the H200 table."""
    return CostModel().fit(H200.samples())
