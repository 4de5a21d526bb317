"""Times passes at start, through the lanes as the engine runs them, on scratch requests that leave nothing behind.

Knows plans and their times. What to make of them is the cost model's affair, where they are kept that of `costs`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verifypd.control.observe import StepTiming
from verifypd.drafters.base import Drafter
from verifypd.engine.engine import Engine
from verifypd.engine.scratch import SHORT, STEPS, Point, Probe, aside, forget, length_of, plan_of, run_step, scratch
from verifypd.errors import EngineError
from verifypd.progress import bar
from verifypd.runtime.streams import keep_busy

BUDGET = 5.0  # s for all of it, about: a point is begun only if it should still fit
STRETCH = 2.0  # times that, where it must be to tell the coefficients apart
REPEATS = STEPS - 1  # of a point, the median counts; fewer where a pass is long
LONG_PASS = 0.06  # s: two repeats do from here on
SHARE = 0.2  # of the time left, for one point
LONG = 1024  # tokens of context
LAUNCHING = 6e-3  # s that launching a step may take the host
ATTEMPTS = 3  # steps that may be no timing because they captured or compiled


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of the points: a median timing for each, and the host's part of a step."""

    timings: tuple[StepTiming, ...]
    overhead: float  # s of a step outside its passes; 0 where only the device knows
    seconds: float  # how long measuring took
    skipped: int = 0  # points left out for want of time or memory


def grid(
    batch_size: int,
    max_draft: int,
    max_len: int,
    prefill_chunk: int,
    draft_chunk: int,
    drafter: Drafter | None,
    quick: bool = False,
) -> tuple[list[Point], list[Point]]:
    """What to time: the points that tell each coefficient from the others, then the rest, each with the least work
    first, so that what a budget cuts off are the passes easiest to extrapolate.

    quick: passes are soon run and slow only to capture, so that large chunks, too, come before the rest. So does all
    that a draft catches up with at once: without it the price of a row is what a pass of few rows takes more than a
    step of the loop. And so does a loop for several requests, which tells their contexts from that.
    """
    long = min(LONG, max_len // 2)
    short = max(2, min(SHORT, long // 2))
    counts = _doubling(1, batch_size)
    few = sorted({1, min(4, batch_size), min(8, batch_size), batch_size})
    longest = max_draft if drafter else 0
    lengths = [length for length in (1, 2, 4, 8, 16) if length <= longest]
    if longest:
        lengths = sorted({*lengths, longest})
    points = [Point(count, 0, context) for count in counts for context in (short, long)]
    points += [Point(count, drafts, short) for count in few for drafts in lengths]
    points += [Point(count, drafts, long) for count in few for drafts in {*lengths[:1], *lengths[-1:]}]
    chunks = sorted({min(rows, prefill_chunk) for rows in (64, 256, 512, 1024, prefill_chunk)})
    points += [Point(chunk=rows, context=at) for rows in chunks for at in (0, long)]
    points += [Point(count, 0, short, chunk=rows) for count in few[:3] for rows in chunks[::2]]
    if drafter and drafter.has_cache:
        lags = sorted({min(16, draft_chunk), min(64, draft_chunk), draft_chunk})
        points += [Point(1, drafts, long, lag) for lag in lags for drafts in (0, 1)]
    fitting = [point for point in points if length_of(point) <= max_len and point.lag <= point.context]
    some = min(8, batch_size)
    telling = {
        *(Point(count, 0, context) for count in (1, some) for context in (short, long)),
        *(Point(1, drafts, short) for drafts in lengths[:3]),
        *(Point(1, drafts, long) for drafts in lengths[:1]),
        *(Point(chunk=rows, context=at) for rows in (chunks if quick else chunks[:1]) for at in (0, long)),
        Point(some, 0, short, chunk=chunks[0]),
        Point(1, 0, long, min(64, draft_chunk)),
    }
    if quick:
        telling |= {Point(1, 0, long, draft_chunk), Point(some, longest, long)}
    ordered = sorted(dict.fromkeys(fitting), key=lambda point: point.work)
    return [point for point in ordered if point in telling], [point for point in ordered if point not in telling]


def measure(engine: Engine, budget: float = BUDGET, progress: bool = True) -> Measured:
    """Time the grid on an idle engine, within `budget` seconds, or twice that on a slow one.

    Progress goes to a terminal, or to the log.
    """
    if engine.busy:
        raise EngineError("costs are measured on an idle engine: wait until its requests have ended")
    config = engine.config
    telling, rest = grid(
        config.batch_size,
        config.max_draft,
        engine.max_model_len,
        config.prefill_chunk,
        config.draft_chunk,
        engine.drafter,
        quick=engine.slots.device.type == "cuda",
    )
    probe = Probe()
    begun = time.monotonic()
    timings: list[StepTiming] = []
    skipped = 0
    points = [*telling, *rest]
    with aside(engine, probe), bar(points, desc="measuring costs", unit="points", shown=progress) as shown:
        for point in telling[:1]:
            _time(engine, probe, point, budget)  # the first passes of a process are slow: not counted
        per_work = 0.0  # s, of the passes timed last
        for number, point in enumerate(shown):
            left = budget * (STRETCH if number < len(telling) else 1.0) - (time.monotonic() - begun)
            if engine.slots.device.type == "cuda" and per_work * point.work < left:
                _time(engine, probe, point, 0.0)  # the first pass of a shape compiles or captures
            found = _time(engine, probe, point, left) if per_work * point.work < left else []
            if not found:
                skipped += 1
                continue
            timings.append(_median(found))
            per_work = timings[-1].device_seconds / point.work
    engine.check()
    host = [t.step_seconds - t.device_seconds for t in timings if t.step_seconds]
    overhead = max(0.0, statistics.median(host)) if host else 0.0
    return Measured(tuple(timings), overhead, time.monotonic() - begun, skipped)


def time_points(engine: Engine, points: Sequence[Point], seconds: float = 60.0) -> list[StepTiming | None]:
    """Median timing of each point on an idle engine, after one that does not count; None where it does not fit."""
    if engine.busy:
        raise EngineError("points are timed on an idle engine: wait until its requests have ended")
    probe = Probe()
    found: list[StepTiming | None] = []
    with aside(engine, probe):
        for point in points:
            if length_of(point) > engine.max_model_len:
                found.append(None)
                continue
            _time(engine, probe, point, 0.0)  # the first pass of a shape compiles or captures
            timings = _time(engine, probe, point, seconds)
            found.append(_median(timings) if timings else None)
    engine.check()
    return found


def _time(engine: Engine, probe: Probe, point: Point, left: float) -> list[StepTiming]:
    """Run a point a few times, `left` seconds being left for all; nothing where the pool or the slots are too small."""
    requests = scratch(engine, point)
    if not requests:
        return []
    found: list[StepTiming] = []
    try:
        wanted, tried = 1, 0
        while len(found) < wanted:
            probe.timings.clear()
            if point.chunk:  # the same chunk every time: none of it counts as read
                requests[-1].admitted(point.context, draft_lag=point.chunk + 1)
            probe.next = plan_of(engine, point, requests)
            keep_busy(engine.slots.device, LAUNCHING)
            run_step(engine)
            found += probe.timings
            tried += 1
            if found:
                wanted = _repeats(sum(timing.seconds for timing in found) / len(found), left)
            elif tried > ATTEMPTS:
                raise EngineError("a pass could not be timed: every run of it captured a graph or compiled a kernel")
    finally:
        forget(engine, requests)
    return found


def _repeats(seconds: float, left: float) -> int:
    """How often a pass of that length is timed: less often near the end of the budget."""
    wanted = REPEATS if seconds < LONG_PASS else 2
    return max(1, min(wanted, int(SHARE * left / seconds)))


def _median(timings: Sequence[StepTiming]) -> StepTiming:
    """One timing out of several of the same work: the median of each lane, and of the host's part."""
    names = ("draft_seconds", "verify_seconds", "prefill_seconds")
    middle = {name: statistics.median(getattr(timing, name) for timing in timings) for name in names}
    whole = replace(timings[len(timings) // 2], **middle, decode_wait=0.0, step_seconds=0.0)
    if not all(timing.step_seconds for timing in timings):
        return whole
    host = statistics.median(timing.step_seconds - timing.device_seconds for timing in timings)
    return replace(whole, step_seconds=whole.device_seconds + max(0.0, host))


def _doubling(first: int, last: int) -> list[int]:
    """first, twice that, and so on, up to and with `last`."""
    found = [first]
    while found[-1] * 2 < last:
        found.append(found[-1] * 2)
    return sorted({*found, last})
