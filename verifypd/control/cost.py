"""What a pass will take: a small formula, fitted to measurements and corrected online. Knows counts and seconds only.

    verifier pass = base + row · decode rows + steep · max(0, rows − knee) + context · Σ context
                    + chunk_context · Σ chunk · context
    draft loop    = start + steps · (step + context' · Σ context) + row' · caught-up rows

A pass that carries both decode spans and chunks takes `mixed` more. Rows beyond the knee are those that run: where
passes are padded, the padding counts, and it differs with and without chunks. Every coefficient is nonnegative, so the
times are nonnegative and never fall when there is more to do of one kind. What is measured later corrects one factor
for each kind of work: passes without prompts, passes with prompts, draft loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from verifypd.buckets import chunk_bucket, row_bucket
from verifypd.control.fit import Sample, nonnegative
from verifypd.control.observe import StepTiming
from verifypd.control.tuning import LEARNING_RATE

DECODE, CHUNKS, DRAFT = "decode", "chunks", "draft"  # kinds of work


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit. The defaults have the shape of a mid-sized GPU; the first measurement sets their scale."""

    base: float = 4.6e-3  # a pass: reading the weights
    row: float = 0.0  # a token that is judged: its logits and its verdict
    steep: float = 21e-6  # a token beyond the knee: compute-bound
    knee: float = 210.0  # rows, no seconds
    context: float = 0.14e-6  # a token of context
    chunk_context: float = 0.7e-9  # a (chunk token × context token)
    mixed: float = 0.0  # a pass that carries both decode spans and chunks
    draft_start: float = 0.0  # a launch of the draft loop
    draft_step: float = 1.2e-3  # a step of the loop
    draft_context: float = 9e-9  # a token of context, each step
    draft_row: float = 3.5e-6  # a token caught up with


class Work(NamedTuple):
    """One verifier pass in numbers."""

    rows: float = 0.0  # all tokens
    context: float = 0.0  # Σ of all spans
    chunk_rows: float = 0.0  # of them, prompt tokens
    chunk_context: float = 0.0  # Σ chunk × context

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        """Both in one pass."""
        return Work(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])


NOTHING = Work()


class CostModel:
    """Predicts seconds and learns from the steps it is told of."""

    def __init__(self, coefficients: Coefficients | None = None) -> None:
        self.coefficients = coefficients or Coefficients()
        self.known = coefficients is not None  # False: only the shape is believed, not the scale
        self.fitted = self.known  # whether the shape is this device's own
        self.one_pass = False  # whether a draft of any length takes one step
        self.padded = False  # whether passes have the sizes that are captured; those of a lane placed apart have not
        self.overhead = 0.0  # s of a step outside its passes
        self.error = 0.0  # running mean of |measured / predicted − 1|
        self.factors = dict.fromkeys((DECODE, CHUNKS, DRAFT), 1.0)  # measured / formula
        self._seen = dict.fromkeys(self.factors, 0)

    # -- predictions --------------------------------------------------------------------------------------------------

    def pass_seconds(self, work: Work) -> float:
        """One verifier pass."""
        if work.rows <= 0.0:
            return 0.0
        return self._formula(work) * self.factors[CHUNKS if work.chunk_rows else DECODE]

    def draft_seconds(self, steps: int, rows: float, context: float) -> float:
        """A loop of `steps` that first catches up with `rows` tokens; the first step does both."""
        return self._loop(steps, rows, context) * self.factors[DRAFT]

    def step_seconds(self, timing: StepTiming) -> float:
        """The whole of a step as described, its lanes one after the other; the measured seconds in it are not read."""
        passes = sum(self.pass_seconds(work) for work, _ in _passes(timing))
        return self.draft_seconds(timing.draft_steps, timing.draft_rows, timing.draft_context) + passes + self.overhead

    def prices(self, requests: int, context: float) -> tuple[float, float]:
        """What one token more from each of them costs: (its row in the pass, a step of the draft loop), in passes."""
        count = float(max(1, requests))
        alone = self.pass_seconds(Work(count, context))
        row = self.pass_seconds(Work(2 * count, context)) - alone
        step = self.draft_seconds(2, 0.0, context) - self.draft_seconds(1, 0.0, context)
        return row / alone, step / alone

    def slope(self, rows: float, chunks: bool = False) -> float:
        """Seconds of one row more, in a pass of so many."""
        run = self._run_rows(Work(rows, chunk_rows=float(chunks)))
        row = self.coefficients.row + (self.coefficients.steep if run >= self.coefficients.knee else 0.0)
        return row * self.factors[CHUNKS if chunks else DECODE]

    def _formula(self, work: Work) -> float:
        c = self.coefficients
        rows, context, chunk_rows, chunk_context = work
        seconds = c.base + c.row * (rows - chunk_rows) + c.context * context + c.chunk_context * chunk_context
        seconds += c.steep * max(0.0, self._run_rows(work) - c.knee)
        return seconds + c.mixed if 0.0 < chunk_rows < rows else seconds

    def _run_rows(self, work: Work) -> float:
        """Rows that the device runs, void ones too."""
        bucket = chunk_bucket if work.chunk_rows else row_bucket
        return bucket(math.ceil(work.rows)) if self.padded else work.rows

    def _loop(self, steps: int, rows: float, context: float) -> float:
        if steps <= 0 and rows <= 0:
            return 0.0
        c = self.coefficients
        count = 1 if self.one_pass else max(steps, 1)
        return c.draft_start + count * (c.draft_step + c.draft_context * context) + c.draft_row * rows

    # -- learning -----------------------------------------------------------------------------------------------------

    def fit(self, timings: Iterable[StepTiming]) -> CostModel:
        """Fit all coefficients to measured steps at once, and start learning from there. Returns itself."""
        samples = list(timings)
        passes = [sample for timing in samples for sample in _passes(timing) if sample[1] > 0.0]
        loops = [(1 if self.one_pass else max(t.draft_steps, 1), t) for t in samples if t.draft_seconds > 0.0]
        drafts = [Sample((1.0, n, n * t.draft_context, t.draft_rows), t.draft_seconds) for n, t in loops]
        values: dict[str, float] = {}
        if passes:
            names = ("base", "row", "steep", "context", "chunk_context", "mixed")
            trials = []
            run = [self._run_rows(work) for work, _ in passes]
            for knee in sorted(set(run)):  # the turn lies at some pass that was measured
                rows = [_pass_sample(*each, max(0.0, n - knee)) for each, n in zip(passes, run, strict=True)]
                fitted = nonnegative(rows, [getattr(self.coefficients, name) for name in names])
                trials.append((fitted.loss, knee, fitted.values))
            _, knee, found = min(trials)
            values = dict(zip(names, found, strict=True)) | {"knee": knee}
        if drafts:
            parts = ("draft_start", "draft_step", "draft_context", "draft_row")
            loop = nonnegative(drafts, [getattr(self.coefficients, name) for name in parts])
            values |= dict(zip(parts, loop.values, strict=True))
        self.coefficients = replace(self.coefficients, **values)
        self.factors = dict.fromkeys(self.factors, 1.0)
        self._seen = dict.fromkeys(self.factors, 0)
        self.known = self.fitted = True
        self.error = 0.0
        return self

    def observe(self, timing: StepTiming) -> None:
        """Learn from one step."""
        for work, seconds in _passes(timing):
            if seconds > 0.0 and (formula := self._formula(work)) > 0.0:  # fits of noisy times have found passes free
                self._correct(CHUNKS if work.chunk_rows else DECODE, seconds / formula)
        loop = self._loop(timing.draft_steps, timing.draft_rows, timing.draft_context)
        if timing.draft_seconds > 0.0 and loop > 0.0:
            self._correct(DRAFT, timing.draft_seconds / loop)
        if timing.step_seconds:
            spare = max(0.0, timing.step_seconds - timing.device_seconds)
            rate = LEARNING_RATE if self.overhead else 1.0
            self.overhead += rate * (min(spare, 2.0 * self.overhead + timing.device_seconds) - self.overhead)

    def _correct(self, kind: str, ratio: float) -> None:
        """Move a factor towards what was measured; until its kind has been seen it follows the others' scale."""
        if not self.known:  # the first time measured sets the scale of everything
            self.factors = dict.fromkeys(self.factors, ratio)
            self.known = True
        old = self.factors[kind]
        self._seen[kind] += 1
        rate = max(LEARNING_RATE, 1.0 / (1 + self._seen[kind]))
        ratio = max(old / 2.0, min(2.0 * old, ratio))  # one pass that was held up says little
        self.error += LEARNING_RATE * (abs(ratio / old - 1.0) - self.error)
        self.factors[kind] = old + rate * (ratio - old)


def _passes(timing: StepTiming) -> list[tuple[Work, float]]:
    """The verifier passes of a step, and the seconds each took; 0: not measured."""
    apart = timing.prefill_seconds > 0.0
    found = []
    if timing.verify_rows:
        riding = (0.0, 0.0) if apart else (timing.chunk_rows, timing.chunk_context)
        found.append((Work(timing.verify_rows, timing.verify_context, *riding), timing.verify_seconds))
    if apart and timing.chunk_rows:
        context = timing.chunk_context / timing.chunk_rows
        work = Work(timing.chunk_rows, context, timing.chunk_rows, timing.chunk_context)
        found.append((work, timing.prefill_seconds))
    return found


def _pass_sample(work: Work, seconds: float, beyond: float) -> Sample:
    """beyond: rows past the knee."""
    mixed = float(0.0 < work.chunk_rows < work.rows)
    judged = work.rows - work.chunk_rows
    return Sample((1.0, judged, beyond, work.context, work.chunk_context, mixed), seconds)
