"""Kernels of a steady batch on a GPU, timed one by one, and what each kind must at least take.

Knows kernels by name, and models by shape; nothing of how they are scheduled.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import Any

import torch

from verifypd.bench.device import SHAPES
from verifypd.bench.drive import Drive, Run
from verifypd.engine.engine import Engine
from verifypd.runtime.streams import HostCopy, synchronize

GRAPH_GAP_US = 8.0
TFLOP_S = 790.0  # bf16 products on random numbers
KINDS = (  # the first pattern that is found in a kernel's name
    ("attention", r"attend_|plan_(pairs|chunks)|flash|fmha"),
    ("cache write", r"write"),
    ("norm", r"norm_rows|divide_rows"),
    ("gate", r"gate_rows"),
    ("verdict", r"judge_|propose_|cut_rows"),
    ("product", r"gemm|gemv|cutlass|cublas|nvjet|splitK|product_tile|skinny"),
    ("copy", r"Memcpy|Memset|copy_kernel"),
)


def kind_of(name: str) -> str:
    """What a kernel is for."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def intervals(profile: torch.profiler.profile) -> list[tuple[float, float, str]]:
    """(begin, end, name) of everything the device ran, µs, in order."""
    events = profile.events() or ()
    found = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if str(event.device_type).endswith("CUDA")
    ]
    return sorted(found)


def between(spans: list[tuple[float, float, str]]) -> tuple[float, float]:
    """Time between kernels: all of it, and what is longer than a graph takes from one to the next; µs."""
    gaps = idle = 0.0
    end = spans[0][1]
    for begin, until, _ in spans[1:]:
        if begin > end:
            gaps += begin - end
            idle += begin - end if begin - end > GRAPH_GAP_US else 0.0
        end = max(end, until)
    return gaps, idle


def floors(pair: tuple[str, str], requests: int, drafts: int, context: int, copy: float) -> dict[str, float]:
    """ms a cycle at least takes, by kind: bytes at the speed of a copy, or FLOPs at that of large products."""
    names = [(pair[0], 1, drafts + 1)] + [(pair[1], 1, 1)] * drafts
    product = attention = 0.0
    for name, _, rows in names:
        layers, hidden, heads, kv_heads, width, mlp, vocab = SHAPES[name]
        weights = layers * hidden * (width * (2 * heads + 2 * kv_heads) + 3 * mlp) + vocab * hidden
        product += max(2 * weights / copy / 1e9, 2 * weights * requests * rows / TFLOP_S / 1e9)
        attention += requests * layers * kv_heads * width * 4 * context / copy / 1e9
    return {"product": product, "attention": attention}


def host_ms(engine: Engine, requests: int, steps: int) -> float:
    """ms of a steady batch's step in which the host does not wait for the device.

    A profiler leaves hooks in the process that slow the host down: ask this before `look`.
    """
    run = _steady(engine, requests)
    waited, began = 0.0, engine.clock()
    original = HostCopy.wait

    def wait(copy: HostCopy) -> Any:
        nonlocal waited
        begun = engine.clock()
        found = original(copy)
        waited += engine.clock() - begun
        return found

    HostCopy.wait = wait  # type: ignore[assignment, method-assign]
    try:
        for _ in range(steps):
            run.step()
    finally:
        HostCopy.wait = original  # type: ignore[method-assign]
    seconds = engine.clock() - began - waited
    run.stop()
    return 1e3 * seconds / steps


def _steady(engine: Engine, requests: int) -> Run:
    """A steady batch that has run for a while."""
    run = Drive(engine).steady(requests, 384, 4000)
    for _ in range(24):
        run.step()
    synchronize(engine.slots.device)
    return run


def look(engine: Engine, requests: int, steps: int) -> dict[str, Any]:
    """Profile `steps` steps of a steady batch."""
    run = _steady(engine, requests)
    emitted = engine.stats.emitted
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profile:
        warnings.simplefilter("ignore")
        for _ in range(steps):
            run.step()
        synchronize(engine.slots.device)
    tokens = (engine.stats.emitted - emitted) / steps
    run.stop()
    spans = intervals(profile)
    window = spans[-1][1] - spans[0][0]
    gaps, idle = between(spans)
    by_name: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in spans:
        by_name[name].append(end - begin)
    by_kind: dict[str, float] = defaultdict(float)
    for name, times in by_name.items():
        by_kind[kind_of(name)] += sum(times) / steps / 1e3
    return {
        "cycle_ms": window / steps / 1e3,
        "tokens": tokens,
        "gaps": gaps / window,
        "idle": idle / window,
        "kernels": len(spans) / steps,
        "kinds_ms": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "names": [
            {"name": name[:90], "kind": kind_of(name), "calls": len(t) / steps, "us": sum(t) / len(t)}
            for name, t in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]
        ],
    }
