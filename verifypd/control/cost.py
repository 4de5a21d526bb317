"""What a pass will take: a small formula, fitted to measurements and learnt online. Knows counts and seconds only.

    verifier pass = base + max(floor, row · rows) + context · Σ context + chunk_context · Σ chunk · context [+ mixed]
    draft loop    = start + steps · (step + context' · Σ context) + row' · caught-up rows

Every coefficient is nonnegative, so the times are nonnegative and never fall when there is more to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from verifypd.control.fit import Cell, knee_grid, nonnegative
from verifypd.control.observe import StepTiming
from verifypd.errors import ConfigError

REFIT_EVERY = 48  # observations between two fits
CELLS = 64  # kinds of work remembered, the longest unseen is dropped
HALF_LIFE = 1500.0  # observations after which an unseen cell counts half
FAR = 1e9  # rows: a knee that no pass reaches
KNEE_STEPS = (0.85, 1.0 / 0.85, 0.5, 2.0)  # where the knee is looked for, one a fit
ANCHOR = 0.003  # pull towards the measured start where the data say nothing, as a share of the data's own weight


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit. The defaults have the shape of a mid-sized GPU; the first measurement sets their scale."""

    base: float = 0.2e-3  # a pass
    floor: float = 4.4e-3  # a pass: reading the weights
    row: float = 21e-6  # a token, once compute-bound
    context: float = 0.14e-6  # a token of context
    chunk_context: float = 0.7e-9  # a (chunk token × context token)
    mixed: float = 0.0  # a pass that carries both decode spans and chunks
    draft_start: float = 0.0  # a launch of the draft loop
    draft_step: float = 1.2e-3  # a step of the loop
    draft_context: float = 9e-9  # a token of context, each step
    draft_row: float = 3.5e-6  # a token caught up with

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"cost coefficient {field.name}={value!r} must be a number of seconds, 0 or more")

    @property
    def knee(self) -> float:
        """Rows up to which a pass costs the same; a large number where rows cost nothing."""
        return min(FAR, self.floor / self.row) if self.row else FAR

    def scaled(self, verify: float, draft: float) -> Coefficients:
        """All verifier coefficients times one factor, all draft coefficients times another."""
        values = asdict(self)
        return Coefficients(**{k: v * (draft if k.startswith("draft") else verify) for k, v in values.items()})


class CostModel:
    """Predicts seconds, learns from the steps it is told of, forgets slowly. Holds at most `CELLS` means of them."""

    def __init__(self, coefficients: Coefficients | None = None) -> None:
        self.coefficients = coefficients or Coefficients()
        self.known = coefficients is not None  # False: only the shape is believed, not the scale
        self._draft_known = self.known
        self.one_pass = False  # whether a draft of any length takes one step
        self.overhead = 0.0  # s of a step outside its passes
        self.error = 0.0  # running mean of |measured / predicted − 1|
        self.verify_bias = 0.0  # running mean of measured / predicted − 1
        self.draft_bias = 0.0
        self.observations = 0
        self._loops = 0  # draft loops measured
        self._shape = self._anchor = self.coefficients  # coefficients = shape × the two factors
        self._verify_factor = self._draft_factor = 1.0  # what holds for all passes alike: the clock of the device
        self._passes: dict[tuple[int, ...], Cell] = {}
        self._drafts: dict[tuple[int, ...], Cell] = {}
        self._turn = 0  # which neighbour of the knee the next fit tries
        if coefficients is not None:
            self._seed()

    # -- predictions --------------------------------------------------------------------------------------------------

    def verify_seconds(self, rows: float, context: float, chunk_context: float = 0.0, mixed: bool = False) -> float:
        """One verifier pass: rows in all, Σ context, Σ chunk × context; `mixed`: decode spans and chunks together."""
        c = self.coefficients
        if rows <= 0:
            return 0.0
        seconds = c.base + max(c.floor, c.row * rows) + c.context * context + c.chunk_context * chunk_context
        return seconds + c.mixed if mixed else seconds

    def draft_seconds(self, steps: int, rows: float, context: float) -> float:
        """A loop of `steps` that first catches up with `rows` tokens; the first step does both."""
        c = self.coefficients
        if steps <= 0 and rows <= 0:
            return 0.0
        return c.draft_start + self._steps(steps) * (c.draft_step + c.draft_context * context) + c.draft_row * rows

    def _steps(self, longest: int) -> int:
        """Steps of the draft model for drafts of so many tokens."""
        return 1 if self.one_pass else max(longest, 1)

    def step_seconds(self, timing: StepTiming) -> float:
        """The whole of a step as described, its lanes one after the other; the measured seconds in it are not read."""
        total = self.draft_seconds(timing.draft_steps, timing.draft_rows, timing.draft_context) + self.overhead
        for features, _ in _pass_samples(timing, measured=False):
            total += self.verify_seconds(features[0], features[1], features[2], features[3] > 0)
        return total

    def undrafted_seconds(self, timing: StepTiming) -> float:
        """What the step would have taken had nothing been drafted in it or before it; 0 for a step that only drafts."""
        riding = timing.chunk_rows if timing.prefill_seconds == 0.0 else 0
        if not timing.verify_requests + timing.chunk_rows:
            return 0.0
        rows = timing.verify_requests + riding
        return self.step_seconds(replace(timing, draft_steps=0, draft_rows=0, draft_context=0.0, verify_rows=rows))

    def prices(self, requests: int, context: float) -> tuple[float, float]:
        """What one token more from each of them costs: (its row in the pass, a step of the draft loop), in passes."""
        c, alone = self.coefficients, self.verify_seconds(max(1, requests), context)
        row = self.verify_seconds(2 * max(1, requests), context) - alone
        return row / alone, 0.0 if self.one_pass else (c.draft_step + c.draft_context * context) / alone

    @property
    def margin(self) -> float:
        """How far a predicted ratio of two times may be off, from the errors made lately. At most 0.1."""
        return min(0.1, abs(self.verify_bias) + 0.5 * abs(self.draft_bias))

    # -- learning -----------------------------------------------------------------------------------------------------

    def fit(self, samples: Iterable[StepTiming]) -> CostModel:
        """Fit all coefficients to measured steps at once, and start learning from there. Returns itself."""
        passes: list[Cell] = []
        drafts: list[Cell] = []
        for timing in samples:
            passes += [Cell(list(features), seconds, 0.0, 8, 0) for features, seconds in _pass_samples(timing)]
            drafts += [Cell(list(features), seconds, 0.0, 8, 0) for features, seconds in self._draft_samples(timing)]
            self._remember(timing)
        self._verify_factor = self._draft_factor = 1.0
        self._refit(passes, drafts, whole=True)
        self.known = self._draft_known = True
        self._anchor = self._shape
        self.error = self.verify_bias = self.draft_bias = 0.0
        return self

    def observe(self, timing: StepTiming) -> None:
        """Learn from one step."""
        if not self.known:
            self._take_scale(timing)
        if self._remember(timing) and self.observations % REFIT_EVERY == 0:
            self._absorb_bias()
            self._refit(list(self._passes.values()), list(self._drafts.values()), whole=False)
        if timing.step_seconds:
            spare = max(0.0, timing.step_seconds - timing.device_seconds)
            rate = 0.02 if self.overhead else 1.0
            self.overhead += rate * (min(spare, 3.0 * self.overhead + 1e-3) - self.overhead)

    def _take_scale(self, timing: StepTiming) -> None:
        """Before anything was measured only the shape is believed: the first times set the scale."""
        verify = draft = 1.0
        for features, seconds in _pass_samples(timing):
            verify = seconds / self.verify_seconds(features[0], features[1], features[2])
            self.known = True
        if not self._draft_known and timing.draft_seconds > 0 and (timing.draft_steps or timing.draft_rows):
            expected = self.draft_seconds(timing.draft_steps, timing.draft_rows, timing.draft_context)
            draft = timing.draft_seconds / expected if expected else 1.0
            self._draft_known = True
        elif not self._draft_known:
            draft = verify
        self.coefficients = self._shape = self._anchor = self.coefficients.scaled(verify, draft)

    def _absorb_bias(self) -> None:
        """What the fit does not explain is taken to hold for every pass: a slower clock, a neighbour on the device."""
        self._verify_factor = min(5.0, max(0.2, self._verify_factor * (1.0 + 0.5 * self.verify_bias)))
        self._draft_factor = min(5.0, max(0.2, self._draft_factor * (1.0 + 0.5 * self.draft_bias)))
        self.verify_bias *= 0.5
        self.draft_bias *= 0.5

    def _remember(self, timing: StepTiming) -> bool:
        """Put the step's measurements into their cells; whether there were any."""
        found = False
        for features, seconds in _pass_samples(timing):
            expected = self.verify_seconds(features[0], features[1], features[2], features[3] > 0)
            self.verify_bias = self._score(self.verify_bias, expected, seconds, 0.02)
            shape = (_level(features[0], 3), _level(features[1], 2), _level(features[2], 0.5), int(features[3]))
            self._store(self._passes, shape, features, seconds / self._verify_factor)
            found = True
        for features, seconds in self._draft_samples(timing):
            expected = self.draft_seconds(timing.draft_steps, timing.draft_rows, timing.draft_context)
            if not self._draft_known and expected:
                self.coefficients = self._shape = self._anchor = self.coefficients.scaled(1.0, seconds / expected)
                self._draft_known, expected = True, seconds
            self._loops += 1  # few, where drafting is only probed: the first ones count for more
            self.draft_bias = self._score(self.draft_bias, expected, seconds, max(0.02, 1.0 / (2 + self._loops)))
            key = (int(features[1]), _level(features[2], 1), _level(features[3], 2))
            self._store(self._drafts, key, features, seconds / self._draft_factor)
            found = True
        self.observations += found
        return found

    def _draft_samples(self, timing: StepTiming) -> list[tuple[tuple[float, float, float, float], float]]:
        """The draft loop of a step as ((launches, steps, steps × Σ context, caught-up rows), seconds)."""
        if timing.draft_seconds <= 0 or not (timing.draft_steps or timing.draft_rows):
            return []
        steps = self._steps(timing.draft_steps)
        return [((1.0, float(steps), steps * timing.draft_context, float(timing.draft_rows)), timing.draft_seconds)]

    def _score(self, bias: float, expected: float, seconds: float, rate: float) -> float:
        miss = max(-0.5, min(0.5, seconds / expected - 1.0)) if expected > 0 else 0.0
        self.error += 0.02 * (abs(miss) - self.error)
        return bias + rate * (miss - bias)

    def _store(
        self, cells: dict[tuple[int, ...], Cell], key: tuple[int, ...], features: Sequence[float], seconds: float
    ) -> None:
        cell = cells.pop(key, None)
        if cell is None:
            if len(cells) >= CELLS:
                del cells[next(iter(cells))]
            cell = Cell(list(features), seconds, 0.1 * seconds, 0, self.observations)
        cells[key] = cell  # at the end: the first one is the longest unseen
        cell.add(features, seconds, self.observations)

    def _refit(self, passes: list[Cell], drafts: list[Cell], whole: bool) -> None:
        """Fit to the cells; online only one neighbouring knee is tried at a time, so that it stays short."""
        old, anchor = self._shape, self._anchor
        pull = ANCHOR * 1e-4 if whole else ANCHOR
        values: dict[str, float] = {}
        if passes:
            weights = self._weights(passes)
            knee = old.knee if old.knee < FAR else 1.0
            self._turn = (self._turn + 1) % len(KNEE_STEPS)
            knees = knee_grid(passes) if whole else [knee, knee * KNEE_STEPS[self._turn]]
            prior = (anchor.base, anchor.row, anchor.context, anchor.chunk_context, anchor.mixed)
            trials: list[tuple[float, float, list[float]]] = []
            for candidate in knees:
                rows = [(1.0, max(candidate, f[0]), f[1], f[2], f[3]) for f in (cell.features for cell in passes)]
                loss, found = nonnegative(rows, passes, weights, prior, pull)
                trials.append((loss * (1.0 if whole or candidate == knee else 1.05), candidate, found))
            _, knee, (base, row, context, chunk, mixed) = min(trials)
            values |= {"base": base, "floor": row * knee, "row": row, "context": context}
            values |= {"chunk_context": chunk, "mixed": mixed}
        if drafts:
            prior4 = (anchor.draft_start, anchor.draft_step, anchor.draft_context, anchor.draft_row)
            _, found = nonnegative([cell.features for cell in drafts], drafts, self._weights(drafts), prior4, pull)
            names = ("draft_start", "draft_step", "draft_context", "draft_row")
            values |= dict(zip(names, found, strict=True))
        self._shape = replace(old, **values)
        self.coefficients = self._shape.scaled(self._verify_factor, self._draft_factor)

    def _weights(self, cells: Sequence[Cell]) -> list[float]:
        """Cells met more than a few times count alike; those long unseen less and less, but never nothing."""
        now = self.observations
        return [min(cell.count, 8) * max(0.02, 0.5 ** ((now - cell.seen) / HALF_LIFE)) for cell in cells]

    def _seed(self) -> None:
        """Remember a few passes as the given coefficients have them, lightly: they hold the shape where no data do."""
        for rows in (1, 16, 64, 256, 1024):
            for context in (64.0 * rows, 1024.0 * rows):
                features = (float(rows), context, 0.0, 0.0)
                self._passes[-rows, int(context)] = Cell(list(features), self.verify_seconds(rows, context), 0.0, 1, 0)
            square = 512.0 * rows
            self._passes[-rows, 0] = Cell(
                [rows, 512.0, square, 0.0], self.verify_seconds(rows, 512.0, square), 0.0, 1, 0
            )
            for steps in (1, 4):
                seconds = self.draft_seconds(steps, 2.0 * rows, 512.0 * rows)
                if seconds > 0.0:
                    cell = Cell([1.0, float(steps), steps * 512.0 * rows, 2.0 * rows], seconds, 0.0, 1, 0)
                    self._drafts[-rows, steps] = cell

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The coefficients, as text."""
        return json.dumps({"version": 1, "coefficients": asdict(self.coefficients), "overhead": self.overhead})

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Read what `to_json` wrote; refuses anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["version"] != 1:
                raise ValueError
            model = cls(Coefficients(**data["coefficients"]))
            model.overhead = float(data["overhead"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError("this is not a cost model written by this version; measure again") from None
        return model


def _pass_samples(timing: StepTiming, measured: bool = True) -> list[tuple[tuple[float, float, float, float], float]]:
    """The verifier passes of a step as ((rows, Σ context, Σ chunk × context, mixed), seconds)."""
    samples = []
    apart = timing.prefill_seconds > 0
    riding = 0.0 if apart else timing.chunk_context
    if timing.verify_rows and (timing.verify_seconds > 0 or not measured):
        mixed = bool(not apart and timing.chunk_rows and timing.verify_requests)
        samples.append(
            ((float(timing.verify_rows), timing.verify_context, riding, float(mixed)), timing.verify_seconds)
        )
    if apart and timing.chunk_rows:
        context = timing.chunk_context / timing.chunk_rows
        samples.append(((float(timing.chunk_rows), context, timing.chunk_context, 0.0), timing.prefill_seconds))
    return samples


def _level(value: float, per_octave: float) -> int:
    return int(per_octave * math.log2(value + 1.0))
