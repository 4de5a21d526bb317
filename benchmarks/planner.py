"""The planner under other targets, and beside another checkout's: mixed traffic on one GPU, in one run, in turn.

    python benchmarks/planner.py --arms gap=30 gap=45 other:30 other:45 --other ../before --json results/planner.json
    python benchmarks/planner.py --arms ttft=500 ttft=200 ttft=100 tpot=60 tpot=4 --rates 16 --seeds 1,2
    python benchmarks/planner.py --arms gap=45 plain,gap=45 ttft=100@16 --rates 8,16,20  # one of them at 16/s alone
    python benchmarks/planner.py --tiny --arms gap=30 gap=45 --rates 16 --seconds 2      # a CPU: tests this script

An arm is `NAME=VALUE,…` with names of gap, ttft and tpot: this tree's engine with these targets in ms. With `plain`
among them it drafts nothing. `other:BUDGET` is the engine of the checkout --other, whose chunks of prompts
(`prefill_chunk` in control/auto.py, as it stood before there was one planner) follow one rule instead: as many tokens
as keep the step within BUDGET ms. `ARM@RATE,…` runs at these rates only. Each checkout is a process of its own with
weights of its own, random, in the shape of --pair; one computes at a time. Arrivals are those of `long-RATE-seedN`, the
first --seconds of them. Ratios are over the other checkout's arms, or over the first arm, as means over seeds with 95 %
intervals. `costs` are this tree's, as its engine measured them at start. Each cell has the steps behind its longest gap
(of all seeds), and what was compiled, captured and collected in its runs. What lives after the start is left out of
garbage collections, as in a server.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from script import command_line, keep

ALPHA = 0.8
LONG = 60.0  # s, of the files long-RATE-seedN
LEAST, MOST = 32, 2048  # tokens of a chunk, by the one rule
NAMES = {"gap": "slo_gap", "ttft": "slo_ttft", "tpot": "slo_tpot"}
FIGURES = ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "gap_ms_p99", "gap_ms_max", "good_share")
RATIOS = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")


# -- one checkout, in a process of its own: imports only what both have ------------------------------------------------


def one_rule(budget: float) -> Any:
    """As many prompt tokens as keep the step within the budget (ms): in place of the older checkout's rules."""
    from verifypd.control import chunks

    def rule(snapshot: Any, ready: Any, cost: Any, drafting: Any, stretch: Any, apart: bool, idle: bool = False) -> Any:
        waiting = [view for view in snapshot.requests if view.prefill_left]
        if not waiting or not cost.known:
            return chunks.Chunk(snapshot.prefill_chunk)
        if not ready:
            return chunks.Chunk(MOST)
        served = ready[: snapshot.batch_size]
        step = chunks.Step(
            rows=len(served) + (drafting.rows if drafting else 0.0),
            context=float(sum(view.length_bound for view in served)),
            draft_seconds=drafting.draft_seconds if drafting else 0.0,
            start=min(waiting, key=lambda view: view.rank).chunk_start,
            apart=apart,
        )
        return chunks.Chunk(chunks._largest(cost, step, budget * 1e-3, LEAST, MOST))

    return rule


def work(pair: str, tiny: bool) -> None:
    """Answer every line of standard input, a task, with a line: the times of its requests."""
    replies, sys.stdout = sys.stdout, sys.stderr
    from verifypd import LLM
    from verifypd.bench import drive as driving
    from verifypd.bench.dummy import dummy_model
    from verifypd.bench.workload import Arrival
    from verifypd.control.cost import CostModel
    from verifypd.engine.wiring import policies

    model, draft = pair.split(",")
    with tempfile.TemporaryDirectory() as folder:
        try:
            from verifypd.bench.dummy import dummy_draft
        except ImportError:  # before there were heads
            dummy_draft = dummy_model
        options: dict[str, Any] = {"draft": dummy_draft(draft, Path(folder), tiny), "load_format": "dummy"}
        options |= {"batch_size": 4 if tiny else 128, "max_draft": 4, "synthetic_acceptance": ALPHA}
        options |= {"prefix_cache": False, "measure_costs": not tiny}
        options |= {"kv_memory": "32MB", "dtype": "float32"} if tiny else {"kv_memory": "40GB"}
        llm = LLM(dummy_model(model, Path(folder), tiny), **options)
        engine, sent = llm.engine, {}
        ending = driving.Run.end

        def end(run: Any, wanted: int) -> Any:
            sent["run"] = {
                "wanted": wanted,
                "seconds": run.elapsed,
                "requests": [(s.request.metrics.arrival_time - run.began, [at - run.began for at in s.outputs],
                              s.request.output_len, s.request.finish_reason == "length") for s in run.sent.values()],
                "pauses": run.pauses() if hasattr(run, "pauses") else {},  # an older checkout notes neither
                "longest_gap": run.steps.summary() if hasattr(run, "steps") else {},
            }  # fmt: skip
            return ending(run, wanted)

        driving.Run.end = end  # type: ignore[method-assign]
        driving.Drive(engine).closed(4, 8, 20, 8)
        gc.collect()
        gc.freeze()
        known = getattr(engine, "cost", None)
        costs = {} if known is None else asdict(known.coefficients)
        print(json.dumps({"costs": costs}), file=replies, flush=True)
        config = engine.config
        for line in sys.stdin:
            task = json.loads(line)
            if "budget" in task:
                from verifypd.control import auto

                auto.prefill_chunk = one_rule(task["budget"])  # type: ignore[attr-defined]
            else:
                engine.config = replace(config, **task["targets"])
            engine.architectures = policies(engine.config, engine.cost or CostModel())
            engine.architecture = engine.architectures(task.get("arch", "auto"))
            arrivals = [Arrival(*each) for each in task["arrivals"]]
            driving.Drive(engine, task["seed"]).arriving(arrivals, cap=task["cap"])
            print(json.dumps(sent["run"]), file=replies, flush=True)


# -- the comparison ----------------------------------------------------------------------------------------------------


class Checkout:
    """The process of one tree."""

    def __init__(self, tree: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--pair", args.pair]
        self.process = subprocess.Popen(
            command + ["--tiny"] * args.tiny,
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.costs = self.answer()["costs"]

    def answer(self) -> dict[str, Any]:
        """The next line it writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a checkout's engine ended: see its error above")
        return dict(json.loads(line))

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """What comes of a task."""
        assert self.process.stdin is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """It ends when nothing more comes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@dataclass(frozen=True, slots=True)
class Arm:
    """What is run, and where."""

    name: str
    rates: frozenset[int] | None = None  # None: all

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`NAME`, or `NAME@RATE,RATE`."""
        name, _, rates = text.partition("@")
        return cls(name, frozenset(map(int, rates.split(","))) if rates else None)

    @property
    def other(self) -> bool:
        """Whether it is the other checkout's."""
        return self.name.startswith("other:")

    def runs(self, rate: int) -> bool:
        """Whether it runs at a rate."""
        return self.rates is None or rate in self.rates

    def told(self) -> dict[str, Any]:
        """The part of a task that says what it is."""
        if self.other:
            return {"budget": float(self.name.removeprefix("other:"))}
        parts = self.name.split(",")
        targets = {NAMES[name]: float(value) for name, value in (part.split("=") for part in parts if part != "plain")}
        return {"targets": targets, "arch": "plain" if "plain" in parts else "auto"}


def explained(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Pauses of an arm's runs, and the steps behind the longest gap of any of them."""
    pauses: dict[str, float] = {}
    for run in runs:
        for name, value in run["pauses"].items():
            pauses[name] = pauses.get(name, 0) + value
    return {
        "pauses": pauses,
        "longest_gap": max([run["longest_gap"] for run in runs], key=lambda gap: gap.get("ms", 0.0)),
    }


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("--arms", nargs="+", default=["gap=30", "gap=45"], metavar="ARM")
    parser.add_argument("--other", type=Path, metavar="DIR", help="a checkout of an older commit, for other:BUDGET")
    parser.add_argument("--pair", default="llama-2-7b,tinyllama-1.1b", help="verifier,draft: built-in shapes")
    parser.add_argument("--rates", default="8,16,24", help="requests/s")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--seconds", type=float, default=12.0, help="of traffic, for each arm, rate and seed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short work: tests this script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.worker:
        work(args.pair, args.tiny)
        return {}
    arms = [Arm.parse(text) for text in args.arms]
    if any(arm.other for arm in arms) and args.other is None:
        parser.error("other:BUDGET needs --other, a checkout of an older commit")

    from verifypd.bench.figures import Outcome, Record, figures
    from verifypd.bench.provenance import provenance
    from verifypd.bench.statistics import compare
    from verifypd.bench.workload import mixed

    rates, seeds = ([int(n) for n in text.split(",")] for text in (args.rates, args.seeds))
    trees = {"ours": Path(__file__).resolve().parents[1]}
    if args.other is not None:
        trees["other"] = args.other.resolve()
    report: dict[str, Any] = {
        **provenance(args.commit),
        "pair": args.pair,
        "seconds": args.seconds,
        "seeds": seeds,
        "cells": [],
    }
    if args.other is not None:
        found = subprocess.run(["git", "-C", str(trees["other"]), "rev-parse", "HEAD"], capture_output=True, text=True)
        report["other_commit"] = found.stdout.strip()
    workers = {name: Checkout(tree, args) for name, tree in trees.items()}  # one after the other: each times its passes
    report["costs"] = workers["ours"].costs
    for rate in rates:
        here = [arm for arm in arms if arm.runs(rate)]
        references = [arm.name for arm in here if arm.other] or [arm.name for arm in here[:1]]
        runs: dict[str, list[Outcome]] = {arm.name: [] for arm in here}
        noted: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in here}
        for turn, seed in enumerate(seeds):
            workload = mixed(rate, LONG, seed)
            kept = (workload.scaled(60, 8) if args.tiny else workload).arrivals
            arrivals = [(a.at, a.prompt_tokens, a.output_tokens) for a in kept if a.at <= args.seconds]
            for arm in here[:: -1 if turn % 2 else 1]:
                task = {"arrivals": arrivals, "seed": seed, "cap": args.seconds + 10.0, **arm.told()}
                data = workers["other" if arm.other else "ours"].run(task)
                records = tuple(
                    Record(due, due, tuple(outputs), tokens, 1, finished)
                    for due, outputs, tokens, finished in data["requests"]
                )
                runs[arm.name].append(Outcome(records, data["wanted"], data["seconds"]))
                noted[arm.name].append(data)
        for name, outcomes in runs.items():
            pooled = figures(outcomes)
            over = {each: compare(outcomes, runs[each]) for each in references if each != name}
            ratios = {
                each: {key: found[key].packed() for key in RATIOS if key in found} for each, found in over.items()
            }
            cell = {"rate": rate, "arm": name, "figures": pooled, "over": ratios, **explained(noted[name])}
            report["cells"].append(cell)
            print(f"{rate:>3}/s {name:<10} " + "  ".join(f"{key} {pooled[key]:.2f}" for key in FIGURES))
            for each, found in ratios.items():
                said = [f"{key} {r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" for key, r in found.items()]
                print(f"{'':>6}/ {each:<10} " + "  ".join(said), flush=True)
            print(f"{'':>6}longest gap: {json.dumps(cell['longest_gap'])}", flush=True)
        keep(report, args.json)
    for worker in workers.values():
        worker.close()
    return report


if __name__ == "__main__":
    main()
