"""How many tokens to draft in a step, by what each would bring and cost. Arithmetic over survival curves and costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
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
    looked_up: bool = False  # all who may draft do so by look-up: no model runs, and the loop costs next to nothing


@dataclass(frozen=True, slots=True)
class Allocation:
    """How much to draft in a step and what it comes to."""

    longest: int  # longest draft: what the loop costs
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


def allocations(
    curves: Sequence[Sequence[float]], load: Load, cost: CostModel, overlap: bool = False
) -> list[Allocation]:
    """For each longest draft 0, 1, 2 … the best filling: most (requests + Σ survivals) a second.

    `curves` holds the survivals of each request, falling along its positions. A loop costs its longest draft, however
    few reach that far, so each length is searched by itself; for one length, positions are taken from the likeliest
    down while they pay for their row: survival > rate · row (Dinkelbach's iteration), and rows below the knee are free.
    `overlap`: drafting runs beside the verifier, on a device of its own, so that the longer of the two counts.
    """
    c = cost.coefficients
    fixed = cost.verify_seconds(1, load.context, load.chunk_context, load.mixed) - max(c.floor, c.row) + cost.overhead
    plain = fixed + max(c.floor, c.row * load.rows)
    found = [Allocation(0, 1.0, float(load.requests), plain, 0.0, 0.0, load.aside)]
    deepest = max(map(len, curves), default=0)
    columns: list[list[float]] = []  # by position: survivals, negative and rising, so that bisect can count them
    sums: list[list[float]] = []
    for i in range(deepest):
        column = sorted([-curve[i] for curve in curves if len(curve) > i])
        columns.append(column)
        sums.append([0.0, *accumulate(column)])
    free = c.knee - load.rows  # rows that cost nothing more
    share = 1.0 / len(curves) if curves else 0.0
    rate = found[0].rate
    for longest in range(1, deepest + 1):
        best: Allocation | None = None
        for _ in range(6):
            threshold = rate * c.row
            count, gain = _above(columns, sums, longest, threshold)
            if count < free:
                threshold = _fill(columns, longest, math.ceil(free), threshold)
                count, gain = _above(columns, sums, longest, threshold)
            if not count:
                break
            part = bisect_left(columns[0], -threshold) * share  # of the candidates, how many draft at all
            draft = cost.draft_seconds(longest, load.draft_rows * part, load.draft_context * part)
            draft = 0.0 if load.looked_up else draft
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


def _above(
    columns: Sequence[Sequence[float]], sums: Sequence[Sequence[float]], longest: int, threshold: float
) -> tuple[int, float]:
    """How many of the first `longest` positions have a survival above the threshold, and the sum of those."""
    count, gain = 0, 0.0
    for i in range(longest):
        n = bisect_left(columns[i], -threshold)
        if not n:
            break  # survivals fall along the positions
        count += n
        gain -= sums[i][n]
    return count, gain


def _fill(columns: Sequence[Sequence[float]], longest: int, free: float, threshold: float) -> float:
    """The lowest threshold, up to the given one, that keeps the count within the free rows."""
    low, high = LEAST, max(LEAST, threshold)
    if sum(bisect_left(columns[i], -low) for i in range(longest)) <= free:
        return low
    for _ in range(16):
        middle = (low + high) / 2
        count = sum(bisect_left(columns[i], -middle) for i in range(longest))
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
