"""How many tokens to draft in a step, by what each would bring and cost. Arithmetic over survival curves and costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from verifypd.control.cost import CostModel

LEAST = 0.02  # survival below which a position is not drafted even where its row is free


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries before anyone drafts."""

    requests: int  # decode spans, those that cannot draft included
    rows: float  # verifier rows: one a request, drafts already written, and chunks that ride along
    context: float  # Σ context, tokens
    chunk_context: float = 0.0  # Σ chunk × context of those chunks
    mixed: bool = False  # whether there are such chunks
    draft_context: float = 0.0  # Σ context of those that may draft
    draft_rows: float = 0.0  # tokens they catch up with, spread over the steps they are expected to last
    aside: float = 0.0  # s that the chunks add to the step: paid once for each prompt, whatever is drafted


@dataclass(frozen=True, slots=True)
class Allocation:
    """How much to draft in a step and what it comes to."""

    longest: int  # longest draft of the model: what the loop costs
    threshold: float  # positions with a survival above it are drafted
    tokens: float  # expected, one a request included
    seconds: float
    draft_seconds: float
    rows: float  # drafted tokens
    aside: float = 0.0  # s of it that prompt chunks are to blame for

    @property
    def rate(self) -> float:
        """Tokens a second of the time that decoding is to blame for.

        A prompt is computed once, however many steps its chunks ride in: with its time counted in, drafting would look
        the cheaper the more chunks ride along, and drafts would be paid for that save nothing.
        """
        seconds = self.seconds - self.aside
        return self.tokens / seconds if seconds > 0.0 else 0.0


def joined(
    curves: list[list[float]], copied: list[bool], load: Load, coming: Sequence[int], lag: int
) -> tuple[list[list[float]], list[bool], Load]:
    """Curves, whose drafts are looked up, and load of the step once others decode too: each like the mean of the rest.

    `coming`: their contexts, tokens; `lag`: tokens a draft's cache lacks in steady state.
    """
    if not coming:
        return curves, copied, load
    depth = max(map(len, curves))
    mean = [sum([curve[i] for curve in curves if i < len(curve)]) / len(curves) for i in range(depth)]
    more = replace(
        load,
        requests=load.requests + len(coming),
        rows=load.rows + len(coming),
        context=load.context + sum(coming),
        draft_context=load.draft_context + sum(coming),
        draft_rows=load.draft_rows + lag * len(coming),
    )
    flags = [*copied, *[all(copied)] * len(coming)] if copied else []
    return [*curves, *[mean] * len(coming)], flags, more


def allocations(
    curves: Sequence[Sequence[float]],
    load: Load,
    cost: CostModel,
    overlap: bool = False,
    looked_up: Sequence[bool] = (),
) -> list[Allocation]:
    """For each longest draft 0, 1, 2 … the best filling: most (requests + Σ survivals) a second. The first is of none.

    `curves` holds the survivals of each request, falling along its positions. A loop costs its longest draft, however
    few reach that far, so each length is searched by itself; for one length, positions are taken from the likeliest
    down while they pay for their row: survival > rate · row (Dinkelbach's iteration), and rows below the knee are free.
    Drafts of requests in `looked_up` take no loop: all positions of theirs that pay for their rows.
    `overlap`: drafting runs beside the verifier, on a device of its own, so that the longer of the two counts.
    """
    c = cost.coefficients
    fixed = cost.verify_seconds(1, load.context, load.chunk_context, load.mixed) - max(c.floor, c.row) + cost.overhead
    plain = fixed + max(c.floor, c.row * load.rows)
    found = [Allocation(0, 1.0, float(load.requests), plain, 0.0, 0.0, load.aside)]
    copied = _Columns([curve for curve, free in zip(curves, looked_up, strict=True) if free] if looked_up else [])
    drafted = _Columns(
        [curve for curve, free in zip(curves, looked_up, strict=True) if not free] if looked_up else curves
    )
    free = c.knee - load.rows  # rows that cost nothing more
    rate = found[0].rate
    for longest in range(0 if copied.curves else 1, drafted.deepest + 1):
        best: Allocation | None = None
        for _ in range(6):
            threshold = rate * c.row
            count = drafted.count(longest, threshold) + copied.count(copied.deepest, threshold)
            if count < free:
                threshold = _fill(drafted, copied, longest, math.ceil(free), threshold)
                count = drafted.count(longest, threshold) + copied.count(copied.deepest, threshold)
            if not count:
                break
            gain = drafted.gain(longest, threshold) + copied.gain(copied.deepest, threshold)
            part = drafted.part(threshold) if longest else 0.0
            draft = cost.draft_seconds(longest, load.draft_rows * part, load.draft_context * part) if part else 0.0
            verify = fixed + max(c.floor, c.row * (load.rows + count))
            seconds = max(verify, draft) if overlap else verify + draft
            option = Allocation(longest, threshold, load.requests + gain, seconds, draft, count, load.aside)
            if best is not None and option.rate <= best.rate * 1.0001:
                break
            best = option
            if option.rate <= rate * 1.0001:
                break
            rate = option.rate
        if best is not None:
            found.append(best)
    return found


class _Columns:
    """Survivals by position, sorted, so that those above a threshold are counted and summed at once."""

    def __init__(self, curves: Sequence[Sequence[float]]) -> None:
        self.curves = len(curves)
        self.deepest = max(map(len, curves), default=0)
        # negative and rising, as bisect wants them
        self._columns = [sorted([-curve[i] for curve in curves if len(curve) > i]) for i in range(self.deepest)]
        self._sums = [[0.0, *accumulate(column)] for column in self._columns]

    def count(self, longest: int, threshold: float) -> int:
        """How many of the first `longest` positions have a survival above the threshold."""
        total = 0
        for column in self._columns[:longest]:
            above = bisect_left(column, -threshold)
            if not above:
                break  # survivals fall along the positions
            total += above
        return total

    def gain(self, longest: int, threshold: float) -> float:
        """The sum of those."""
        total = 0.0
        for column, sums in zip(self._columns[:longest], self._sums, strict=False):
            above = bisect_left(column, -threshold)
            if not above:
                break
            total -= sums[above]
        return total

    def part(self, threshold: float) -> float:
        """Part of the requests that draft at all."""
        return bisect_left(self._columns[0], -threshold) / self.curves if self.curves else 0.0


def _fill(drafted: _Columns, copied: _Columns, longest: int, free: float, threshold: float) -> float:
    """The lowest threshold, up to the given one, that keeps the count within the free rows."""
    low, high = LEAST, max(LEAST, threshold)
    if drafted.count(longest, low) + copied.count(copied.deepest, low) <= free:
        return low
    for _ in range(16):
        middle = (low + high) / 2
        count = drafted.count(longest, middle) + copied.count(copied.deepest, middle)
        low, high = (middle, high) if count > free else (low, middle)
    return high


def reach(curve: Sequence[float], threshold: float, longest: int) -> int:
    """How many positions of a falling curve lie above the threshold."""
    reach = 0
    for value in curve[:longest]:
        if value <= threshold:
            break
        reach += 1
    return reach
