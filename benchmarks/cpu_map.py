"""The map on real hardware: architectures × concurrency on a CPU, with the built-in model, arms interleaved in one run.

    python benchmarks/cpu_map.py                             # about ten minutes on two quiet cores
    python benchmarks/cpu_map.py --quick --out /tmp/map.json
    python benchmarks/cpu_map.py --drift                     # text that switches between copying and prose
    python benchmarks/cpu_map.py --draft PATH                # with a draft model
    python benchmarks/cpu_map.py --print-only                # print again from the JSON

Closed loop: as many clients as the concurrency, each sends its next prompt when its last one has ended. Half of the
prompts invite copying (repeat, correct, go on with a pattern), half free prose; greedy, a fixed number of tokens each.
Every round runs every arm once on the same prompts in the same order, the arms in an order of its own, so that a slow
moment of the machine hits no arm more than another; rounds have other prompts. Throughput is all tokens emitted over
the time it took, prompts included. An arm that takes too long is stopped and counted up to there.

All arms share one engine and its weights. Each run has a fresh policy; `auto` keeps one cost model over the runs,
measured at start and learnt since, as a server would.

In `verifypd bench run` each arm has an engine of its own. Here nine arms share one, so that nothing but the policy
differs, and text can drift from one kind to another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from script import keep, log_progress

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance
from verifypd.bench.texts import STRETCH, drifting, prompts
from verifypd.control.architectures import Architecture
from verifypd.control.auto import Auto
from verifypd.control.cost import CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.engine.engine import Engine
from verifypd.metrics.stats import percentile
from verifypd.progress import bar
from verifypd.request import Request

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

ARMS = ("plain", "baseline:4", "pd:4", "pdv:4", "unified:2", "unified:4", "unified:8", "table", "auto")
DRIFT_ARMS = ("unified:0", "unified:1", "unified:2", "unified:4", "unified:8", "throughput")
ORDER = ("plain", "baseline", "pd", "pdv", "unified", "table", "auto", "throughput")  # of a table
MAX_DRAFT = 8
BATCH = 32
WORK = {1: 4, 4: 8, 16: 24, 32: 40}  # concurrency → requests of a run
CAP = 15.0  # s, after which a run is stopped


# -- work --------------------------------------------------------------------------------------------------------------


def policy(arm: str, cost: CostModel) -> Architecture:
    """`pd:4` is pd with L = 4; `table` has the original's controller; `throughput` is unified under that controller."""
    kind, _, length = arm.partition(":")
    if kind == "auto":
        return Auto(make_controller("throughput", MAX_DRAFT, cost), cost)
    if kind == "throughput":
        return make_architecture("unified", make_controller("throughput", MAX_DRAFT, cost), cost)
    if kind == "table":
        return make_architecture("table", make_controller("threshold", MAX_DRAFT), cost)
    return make_architecture(kind, make_controller("fixed", int(length or 0)), cost)


class Loop:
    """A closed loop of clients over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders = itertools.count()

    def run(self, work: list[list[int]], tokens: int, concurrency: int, cap: float) -> dict[str, Any]:
        """Everything in `work`, or what is done of it after `cap` seconds, in figures."""
        engine = self.engine
        assert not engine.busy, "the run before has ended"
        before = (engine.stats.drafted, engine.stats.accepted, engine.stats.steps)
        waiting, requests, active = deque(work), [], set()
        began = engine.clock()
        while (waiting or active) and engine.clock() - began < cap:
            while waiting and len(active) < concurrency:
                request = self._request(waiting.popleft(), tokens)
                engine.add(request)
                requests.append(request)
                active.add(request.order)
            for request in engine.step():
                if request.finished:
                    active.discard(request.order)
        seconds = engine.clock() - began
        for request in requests:
            engine.finish(request)
        engine.drain()
        engine.check()
        emitted = sum(request.output_len for request in requests)
        ended = [r for r in requests if r.finish_reason == "length"]
        drafted, accepted, steps = (now - then for now, then in zip(self._totals(), before, strict=True))
        return {
            "tokens": emitted,
            "seconds": seconds,
            "tokens_per_second": emitted / seconds,
            "tpot_p50": percentile([_tpot(r) for r in ended], 0.5),
            "tpot_p95": percentile([_tpot(r) for r in ended], 0.95),
            "ttft_p95": percentile([_ttft(r) for r in ended], 0.95),
            "ended": len(ended),
            "unfinished": len(work) - len(ended),
            "drafted": drafted,
            "accepted": accepted,
            "steps": steps,
        }

    def _totals(self) -> tuple[int, int, int]:
        stats = self.engine.stats
        return stats.drafted, stats.accepted, stats.steps

    def _request(self, ids: list[int], tokens: int) -> Request:
        order = next(self._orders)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return Request(
            str(order), ids, params, seed=order, max_length=len(ids) + tokens, arrival=self.engine.clock(), order=order
        )


def believed(cost: CostModel) -> dict[str, Any]:
    """What a cost model believes now."""
    return {"coefficients": asdict(cost.coefficients), "factors": cost.factors, "overhead": cost.overhead}


def _tpot(request: Request) -> float:
    """ms per output token after the first."""
    first, last = request.metrics.first_token_time, request.metrics.finished_time
    assert first is not None and last is not None
    return 1e3 * (last - first) / max(1, request.output_len - 1)


def _ttft(request: Request) -> float:
    assert request.metrics.first_token_time is not None
    return 1e3 * (request.metrics.first_token_time - request.metrics.arrival_time)


# -- the two experiments -----------------------------------------------------------------------------------------------


def run_map(llm: LLM, cost: CostModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds × concurrency × arms."""
    loop, tokenizer = Loop(llm.engine), llm.get_tokenizer()
    arms = args.arms.split(",") if args.arms else list(ARMS)
    levels = [int(part) for part in args.concurrency.split(",")]
    share = 0.5 if args.quick else 1.0
    warm_up(llm, loop, cost, prompts(tokenizer, 6, 99), arms, 4)
    runs = []
    with bar(desc="runs", total=args.rounds * len(levels) * len(arms)) as shown:
        for round_index in timely(args):
            for level in levels:
                count = max(level, math.ceil(share * WORK.get(level, level + 8)))
                work = prompts(tokenizer, count, seed=1000 * round_index + level)
                for arm in random.Random(round_index * 100 + level).sample(arms, len(arms)):
                    shown.set_postfix_str(f"round {round_index + 1}, {level} at once, {arm}")
                    chosen = llm.engine.architecture = policy(arm, cost)
                    found = loop.run(work, args.tokens, level, args.cap)
                    runs.append({"arm": arm, "concurrency": level, "round": round_index, **found, **_mind(chosen)})
                    shown.update()
    return runs


def run_drift(llm: LLM, cost: CostModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds × arms over one stream of requests whose kind changes every few of them."""
    loop, tokenizer = Loop(llm.engine), llm.get_tokenizer()
    arms = args.arms.split(",") if args.arms else list(DRIFT_ARMS)
    warm_up(llm, loop, cost, prompts(tokenizer, 4, 99), arms, args.drift_concurrency)
    count = STRETCH * (4 if args.quick else 8) * args.drift_concurrency
    runs = []
    with bar(desc="runs", total=args.rounds * len(arms)) as shown:
        for round_index in timely(args):
            work = drifting(tokenizer, count, seed=round_index)
            for arm in random.Random(round_index).sample(arms, len(arms)):
                shown.set_postfix_str(f"round {round_index + 1}, {arm}")
                chosen = llm.engine.architecture = policy(arm, cost)
                found = loop.run(work, args.tokens, args.drift_concurrency, math.inf)
                level = args.drift_concurrency
                runs.append({"arm": arm, "concurrency": level, "round": round_index, **found, **_mind(chosen)})
                shown.update()
    return runs


def timely(args: argparse.Namespace) -> Iterator[int]:
    """Numbers of the rounds that end in time, the first in any case."""
    began = time.perf_counter()
    for index in range(args.rounds):
        if index and (time.perf_counter() - began) * (index + 1) / index > 60 * args.minutes:
            print(f"{index} of {args.rounds} rounds: another would end after {args.minutes:g} minutes", file=sys.stderr)
            return
        yield index


def warm_up(llm: LLM, loop: Loop, cost: CostModel, work: list[list[int]], arms: list[str], level: int) -> None:
    """A short run of every arm, not counted."""
    for arm in arms:
        llm.engine.architecture = policy(arm, cost)
        loop.run(work, 8, level, CAP)


def _mind(chosen: Architecture) -> dict[str, Any]:
    """What `auto` settled on, and how often it changed its mind."""
    if not isinstance(chosen, Auto):
        return {}
    return {"settled": chosen.label, "decisions": len(chosen.decisions)}


# -- what came of it ---------------------------------------------------------------------------------------------------


def ratios(runs: list[dict[str, Any]], level: int, arm: str, other: str) -> list[float]:
    """tokens/s of one arm over another's, round by round."""
    rate = {(r["arm"], r["round"]): r["tokens_per_second"] for r in runs if r["concurrency"] == level}
    return [rate[arm, i] / rate[other, i] for name, i in sorted(rate) if name == other and (arm, i) in rate]


def points(runs: list[dict[str, Any]], watched: str) -> list[dict[str, Any]]:
    """A row for each concurrency: rates, the best of the others, and ratios with their range over the rounds."""
    rows = []
    for level in sorted({run["concurrency"] for run in runs}):
        here = [run for run in runs if run["concurrency"] == level]
        arms = list(dict.fromkeys(run["arm"] for run in here))
        rates = {a: fmean([r["tokens_per_second"] for r in here if r["arm"] == a]) for a in arms}
        tails = {a: fmean([r["tpot_p95"] for r in here if r["arm"] == a]) for a in arms}
        plain = "plain" if "plain" in rates else "unified:0"
        fixed = [a for a in arms if a not in (watched, "table")]
        if watched not in rates or plain not in rates:
            raise SystemExit(f"--arms must hold {watched} and {plain}")
        best = max(fixed, key=rates.__getitem__)
        rows.append(
            {
                "concurrency": level,
                "rates": rates,
                "tpot_p95": tails,
                "best": best,
                "over_best": ratios(here, level, watched, best),
                "over_plain": ratios(here, level, watched, plain),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], watched: str) -> str:
    """Markdown: tokens/s of every arm, TPOT p95 of the one watched, and its ratios."""
    arms = sorted(rows[0]["rates"], key=_place)
    figures = [f"{watched} / best (rounds)", f"{watched} / plain", f"TPOT p95: {watched}", "plain"]
    header = ["at once", *arms, *figures]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        rates = [f"**{row['rates'][a]:.1f}**" if a == row["best"] else f"{row['rates'][a]:.1f}" for a in arms]
        best, plain, tails = row["over_best"], geometric_mean(row["over_plain"]), row["tpot_p95"]
        over_best = f"{geometric_mean(best):.3f} ({min(best):.3f}–{max(best):.3f})"
        lines.append(
            f"| {row['concurrency']} | {' | '.join(rates)} | {over_best} | {plain:.3f} "
            f"| {tails[watched]:.0f} ms | {tails.get('plain', tails.get('unified:0', 0)):.0f} ms |"
        )
    return "\n".join(lines)


def _place(arm: str) -> tuple[int, int]:
    kind, _, length = arm.partition(":")
    return ORDER.index(kind), int(length or 0)


def main() -> None:
    """Run, write, print."""
    log_progress()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="ngram", help="ngram, or a draft model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", default="1,4,16,32")
    parser.add_argument("--arms", help="only these, comma-separated")
    parser.add_argument("--rounds", type=int, help="at most (default: 3, with --quick 1)")
    parser.add_argument("--tokens", type=int, help="of each request (default: 40, with --quick 16)")
    parser.add_argument("--cap", type=float, default=CAP, help="s after which a run of the map is stopped")
    parser.add_argument("--minutes", type=float, default=12.0, help="no round is begun that would end after this")
    parser.add_argument("--slo-tpot", type=float, default=150.0, help="target per output token, ms: one a CPU can meet")
    parser.add_argument("--slo-ttft", type=float, default=3000.0, help="target for the first token, ms")
    parser.add_argument("--drift", action="store_true", help="fixed draft lengths against the throughput controller")
    parser.add_argument("--drift-concurrency", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="less work, one round: a smoke test, no figures")
    parser.add_argument("--out", type=Path, help="JSON (default: benchmarks/results/cpu-map[-drift][-DRAFT].json)")
    parser.add_argument("--print-only", action="store_true", help="print from the JSON of an earlier run")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.tokens = args.tokens or (16 if args.quick else 40)
    stem = "cpu-drift" if args.drift else "cpu-map"
    stem += "" if args.draft == "ngram" else f"-{Path(args.draft).name}"
    out = args.out or RESULTS / f"{stem}.json"
    out.parent.mkdir(parents=True, exist_ok=True)  # before the long work
    watched = "throughput" if args.drift else "auto"
    if args.print_only:
        report = json.loads(out.read_text())
    else:
        report = measure(args)
        keep(report, out)
    rows = points(report["runs"], watched)
    print(table(rows, watched))
    print(f"\n{report['minutes']:.1f} minutes, {report['cpu']}, {report['threads']} threads, {report['dtype']} weights")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One engine, all runs."""
    report = provenance()
    began = time.perf_counter()
    options: dict[str, Any] = {"dtype": args.dtype, "batch_size": BATCH, "max_draft": MAX_DRAFT, "prefix_cache": False}
    options |= {"max_model_len": 1024, "kv_memory": "1GiB", "arch": "auto", "controller": "throughput"}
    options |= {"slo_tpot": args.slo_tpot, "slo_ttft": args.slo_ttft}
    with LLM(args.model, draft=args.draft, measure_costs=True, **options) as llm:
        auto = llm.engine.architecture
        assert isinstance(auto, Auto)
        report["coefficients_at_start"] = believed(auto.cost)
        report["runs"] = (run_drift if args.drift else run_map)(llm, auto.cost, args)
        report["coefficients_at_end"] = believed(auto.cost)
        report["dtype"] = str(llm.engine.verify.runner.model.dtype).removeprefix("torch.")
    asked = ("model", "draft", "concurrency", "rounds", "tokens", "cap", "minutes", "slo_tpot", "slo_ttft")
    for name in (*asked, "drift", "drift_concurrency", "quick"):
        report[name] = getattr(args, name)
    report["rounds_done"] = 1 + max(run["round"] for run in report["runs"])
    report["minutes"] = (time.perf_counter() - began) / 60
    return report


if __name__ == "__main__":
    sys.exit(main())
