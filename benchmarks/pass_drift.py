"""Do passes take longer in traffic than at start? Timed on a rested GPU, in mixed traffic and right behind it.

    python benchmarks/pass_drift.py --json results/pass-drift.json     # some three minutes on one GPU
    python benchmarks/pass_drift.py --tiny                             # a CPU: tests this script

Points are passes of one kind, timed as at start: after a rest, right behind the traffic, and after a rest again, as a
control. A formula is fitted to each of the three, and to what a server times at its start. `bias` says by how much each
prices the traffic's own steps too low or too high, by the prompt tokens in them: where the points behind the traffic
price them right and those after a rest do not, the device itself has become slower; where neither does, the traffic's
passes are of another kind. `steps` has each step of the traffic, `start` each pass that was timed at the start. Clock
and power are read every tenth of a second (by nvidia-ml-py).
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from h200 import packed
from script import command_line, keep

from verifypd import LLM
from verifypd.bench.drive import Drive
from verifypd.bench.dummy import dummy_draft, dummy_model
from verifypd.bench.provenance import provenance
from verifypd.bench.workload import mixed
from verifypd.control.cost import CostModel
from verifypd.control.observe import StepTiming
from verifypd.engine.engine import Engine
from verifypd.engine.measure import measure, time_points
from verifypd.engine.scratch import Point
from verifypd.metrics.pauses import freeze_heap

LONG = 60.0  # s, of the traffic a seed stands for
READ = 0.1  # s between two looks at the clock
CLASSES = ((0, 0), (1, 64), (65, 200), (201, 512), (513, 1024), (1025, 1 << 20))  # prompt tokens of a step


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("--pair", default="llama-2-7b,tinyllama-1.1b", help="verifier,draft: built-in shapes")
    parser.add_argument("--rate", type=int, default=24, help="requests/s")
    parser.add_argument("--seconds", type=float, default=12.0, help="of traffic")
    parser.add_argument("--rest", type=float, default=8.0, help="seconds without work before points")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short work: tests this script")
    args = parser.parse_args(given)
    if args.tiny:
        args.seconds, args.rest = min(args.seconds, 2.0), 0.0
    model, draft = args.pair.split(",")
    report = {**provenance(args.commit), "pair": args.pair, "rate": args.rate, "seconds": args.seconds}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"batch_size": 4, "kv_memory": "32MB", "dtype": "float32"} if args.tiny else {}
        options = {"batch_size": 128, "kv_memory": "45GB", "measure_costs": not args.tiny} | options
        options |= {"load_format": "dummy", "max_draft": 4, "synthetic_acceptance": 0.8, "prefix_cache": False}
        drafter = dummy_draft(draft, Path(folder), args.tiny)
        with LLM(dummy_model(model, Path(folder), args.tiny), draft=drafter, **options) as llm:
            report |= look(llm.engine, args.rate, args.seconds, args.rest, args.seed, args.tiny)
    keep(report, args.json)
    return report


def look(engine: Engine, rate: int, seconds: float, rest: float, seed: int, tiny: bool) -> dict[str, Any]:
    """Points, traffic, points, rest, points."""
    Drive(engine).closed(4, 8, 20, 8)
    freeze_heap()
    workload = mixed(rate, LONG, seed)
    arrivals = [a for a in (workload.scaled(60, 8) if tiny else workload).arrivals if a.at <= seconds]
    points = grid(engine)
    found: dict[str, Any] = {"points": [asdict(point) for point in points], "ms": {}, "clock": {}, "bias": {}}
    timed: dict[str, list[StepTiming]] = {}

    def time_all(name: str) -> None:
        with clocks() as seen:
            each = time_points(engine, points)
        timed[name] = [timing for timing in each if timing is not None]
        found["ms"][name] = [None if timing is None else 1e3 * timing.device_seconds for timing in each]
        found["clock"][name] = summary(seen)

    measured = measure(engine, progress=False)
    timed["at start"] = list(measured.timings)
    found["start"] = packed(measured.timings)
    time.sleep(rest)
    time_all("rested")
    steps: list[StepTiming] = []
    learn = engine.architecture.observe_step

    def note(timing: StepTiming) -> None:
        steps.append(timing)
        learn(timing)

    engine.architecture.observe_step = note  # type: ignore[method-assign]
    with clocks() as seen:
        Drive(engine, seed).arriving(arrivals, cap=seconds + 10.0)
    engine.architecture.observe_step = learn  # type: ignore[method-assign]
    found["clock"]["traffic"] = summary(seen)
    time_all("behind")
    time.sleep(rest)
    time_all("rested again")
    padded = engine.cost is not None and engine.cost.padded
    found["steps"] = packed(steps)
    for name, timings in timed.items():
        found["bias"][name] = bias(timings, steps, padded)
    for name, each in found["bias"].items():
        print(
            f"{name:>13}: " + "  ".join(f"{label} {own['mean']:+.1%} ({own['steps']})" for label, own in each.items())
        )
    for point, *each in zip(points, *found["ms"].values(), strict=True):
        print(f"{point}: " + " / ".join("–" if ms is None else f"{ms:.2f}" for ms in each))
    for name, clock in found["clock"].items():
        print(f"{name:>13}: {clock}")
    return found


def grid(engine: Engine) -> list[Point]:
    """Prompt chunks with little and much before them, decoding with drafts and without, drafts that catch up."""
    most = engine.config.prefill_chunk
    long = min(1024, engine.max_model_len // 4)
    chunks = sorted({min(rows, most) for rows in (64, 256, 512, 1024, 2048)})
    counts = [count for count in (1, 16, 64) if count <= engine.config.batch_size]
    points = [Point(chunk=rows, context=at) for rows in chunks for at in (0, long)]
    points += [Point(count, drafts, long // 2) for count in counts for drafts in (0, engine.config.max_draft)]
    lags = sorted({min(rows, long, engine.config.draft_chunk) for rows in (64, 512, 1024)})
    return points + [Point(1, 1, long, lag) for lag in lags]


def bias(timings: Sequence[StepTiming], steps: Sequence[StepTiming], padded: bool) -> dict[str, dict[str, float]]:
    """Price over time of the traffic's steps, less 1, by their prompt tokens; prices by a fit to these timings."""
    model = CostModel()
    model.padded = padded
    model.fit(timings)
    found = {}
    for least, most in CLASSES:
        here = [step for step in steps if least <= step.chunk_rows <= most and step.device_seconds > 0.0]
        over = [model.step_seconds(step) / step.device_seconds - 1.0 for step in here]
        if over:
            label = f"{least} to {most}" if most < 1 << 20 else f"{least} and more"
            found[label] = {"mean": statistics.fmean(over), "steps": len(over)}
    return found


@contextmanager
def clocks() -> Any:
    """What NVML reads meanwhile: (MHz, watts, reasons for a lower clock); nothing without a GPU."""
    seen: list[tuple[int, float, int]] = []
    over = threading.Event()

    def watch() -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        while not over.wait(READ):
            clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            seen.append((clock, watts, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))

    thread = threading.Thread(target=watch, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def summary(seen: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    """Median and lowest clock, median and highest power, and every reason that was given."""
    if not seen:
        return {}
    mhz, watts, reasons = ([each[i] for each in seen] for i in range(3))
    return {
        "mhz": statistics.median(mhz), "mhz_least": min(mhz),
        "watts": statistics.median(watts), "watts_most": max(watts),
        "reasons": sorted({hex(int(reason)) for reason in reasons}),
    }  # fmt: skip


if __name__ == "__main__":
    main()
