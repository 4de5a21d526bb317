"""What the host does in a step, part by part, without a GPU: ms of the thread's own time, launches apart.

    python benchmarks/host_work.py --json benchmarks/results/host-work.json

A tiny pair on a CPU runs a steady batch; what the lanes launch is the device's part there and is left out. What passes
take on this machine is not learnt: the policy believes in a GPU, on which drafts pay. Of several rounds the quickest
counts, for other work on the machine only adds. On a GPU `verifypd.bench.profile.host_ms` says what
a step takes with its launches.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from script import command_line, keep

import verifypd.engine.engine as loop
from verifypd import LLM
from verifypd.bench.drive import Drive
from verifypd.bench.dummy import dummy_draft, dummy_model
from verifypd.bench.provenance import provenance
from verifypd.engine.engine import Engine


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Time every level and report."""
    parser = command_line(__doc__)
    parser.add_argument("--levels", default="1,32,128", help="concurrent requests")
    parser.add_argument("--steps", type=int, default=24, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    levels = [int(level) for level in args.levels.split(",")]
    report: dict[str, Any] = {**provenance(args.commit), "levels": {}}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "load_format": "dummy", "batch_size": max(levels), "max_draft": 4, "synthetic_acceptance": 0.8,
            "prefix_cache": False, "measure_costs": False, "kv_memory": "64MB", "dtype": "float32", "device": "cpu",
            "arch": "unified",
        }  # fmt: skip
        draft = dummy_draft("eagle", Path(folder), tiny=True)
        with LLM(dummy_model("llama-2-7b", Path(folder), tiny=True), draft=draft, **options) as llm:
            llm.engine.architecture.cost.observe = lambda timing: None  # type: ignore[method-assign]
            spent = watch(llm.engine)
            for level in levels:
                found = report["levels"][level] = look(llm.engine, spent, level, args.steps, args.rounds)
                print(f"{level:4} requests: " + ", ".join(f"{name} {ms:.3f}" for name, ms in found.items()))
    keep(report, args.json)
    return report


def watch(engine: Engine) -> Counter[str]:
    """From now on the thread's seconds in each part of a step are counted."""
    spent: Counter[str] = Counter()
    parts: list[tuple[Any, str, str]] = [
        (engine.decode, "launch", "launches"), (engine.verify, "launch", "launches"),
        (engine, "absorb", "verdicts"), (loop, "snapshot", "views"), (engine.architecture, "plan", "plan"),
        (engine.residents, "reserve", "blocks"), (engine, "_note_drafts", "notes"), (engine, "_note_launch", "notes"),
        (engine, "tell", "times"),
    ]  # fmt: skip
    for owner, method, part in parts:
        setattr(owner, method, _timed(getattr(owner, method), part, spent))
    return spent


def _timed(method: Callable[..., Any], part: str, spent: Counter[str]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[part] += time.thread_time() - began

    return timed


def look(engine: Engine, spent: Counter[str], requests: int, steps: int, rounds: int) -> dict[str, float]:
    """ms a step of each part, and of the host in all without what it launches; of the quickest round."""
    run = Drive(engine).steady(requests, 20, 20 + 6 * steps * (rounds + 1))
    found = []
    for _ in range(rounds + 1):  # the first warms up
        spent.clear()
        began = time.thread_time()
        for _ in range(steps):
            run.step()
        spent["host"] = time.thread_time() - began - spent["launches"]
        spent["rest"] = 2 * spent["host"] + spent["launches"] - sum(spent.values())
        found.append({name: 1e3 * seconds / steps for name, seconds in spent.items() if name != "launches"})
    run.stop()
    return dict(sorted(min(found[1:], key=lambda each: each["host"]).items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    main()
