"""A toy of the schedule on the arrivals of a planner's run, and the engine over it: what else is being paid for?

    python benchmarks/toy_schedule.py results/h200-planner.json results/h200-targets.json --json FILE
    python benchmarks/toy_schedule.py results/h200-schedule.json --simulate --json FILE
    python benchmarks/toy_schedule.py results/h200-planner.json --steps results/pass-drift-h200.json --json FILE

The files are those that `benchmarks/planner.py` wrote. The toy reads prompts first, the shortest first, within the gap;
everybody else drafts a fixed number of tokens in every step. Steps cost what the run's engine measured at its start,
or, with `--steps`, what the steps of another run took in traffic (`benchmarks/pass_drift.py`). It leaves out that the
draft reads prompts, padding of passes, host work and memory. An engine with these costs should come near it. Arms are
those of the file with a `gap`: with drafts, or `plain` without. Latencies are in ms, of all requests of all seeds.

With `--simulate` no engine's figures are read but the run's costs: the planner runs in the simulator, on seeds that no
rule was chosen on. Beside the toy stands one whose draft reads every prompt after the first token, as the engine's
does, and beside the planner one whose draft needs to read nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from h200 import unpacked
from script import command_line, keep

from verifypd.bench.figures import Outcome, Record, figures
from verifypd.bench.provenance import provenance
from verifypd.bench.workload import Arrival, mixed
from verifypd.control.cost import Coefficients, CostModel, Work
from verifypd.control.factory import make_architecture, make_controller
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import TrueCosts, gpu_settings

ALPHA, DRAFTS = 0.8, 4
LONG = 60.0  # s, of the files long-RATE-seedN
BATCH, CHUNKS = 128, 8  # requests that decode, and prompts in one step
LEAST, STEP = 32, 8  # tokens of a chunk at least, and to which its size is searched
SEEDS = (1, 2)
SHOWN = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99", "gap_ms_max")
UNSEEN, UNSEEN_SECONDS = range(261, 277), 15.0  # seeds of --simulate, and traffic of each
TARGETS = {"slo_gap": 45.0, "slo_ttft": 200.0}  # ms


@dataclass(slots=True)
class Request:
    """One request, and when its outputs came."""

    arrival: Arrival
    left: int  # prompt tokens that are not read yet
    owed: int = 0  # tokens that its draft has not read yet
    tokens: int = 0
    outputs: list[float] = field(default_factory=list)

    def chunk(self, tokens: int) -> Work:
        """The next tokens of its prompt, in a pass."""
        context = self.arrival.prompt_tokens - self.left + tokens
        return Work(tokens, context, tokens, tokens * context)


def play(
    arrivals: Sequence[Arrival], cost: CostModel, gap: float, drafts: int, seed: int, draft_chunk: int = 0
) -> Outcome:
    """What the toy makes of these arrivals. gap: s. A step is planned while the one before it runs.

    draft_chunk: tokens of prompts that the draft reads in a step, before which it does not draft; 0: it need not.
    """
    noise = random.Random(seed)
    todo = [Request(each, each.prompt_tokens) for each in arrivals][::-1]
    every = todo[::-1]
    waiting: list[Request] = []
    decoding: list[Request] = []
    now = planned = 0.0
    while todo or waiting or decoding:
        if not waiting and not decoding:
            now = planned = max(now, todo[-1].arrival.at)
        while todo and todo[-1].arrival.at <= planned:
            waiting.append(todo.pop())
        if not waiting and not decoding:
            planned = now
            continue
        read = catch_up(decoding, draft_chunk)
        drafting = [each for each in decoding if not each.owed]
        rows = len(decoding) + len(drafting) * drafts
        caught_up = len(drafting) * (drafts + 1) + read
        steps = drafts if drafting else 0
        loop = cost.draft_seconds(steps, caught_up, contexts(drafting)) if drafts else 0.0
        pass_work = Work(rows, contexts(decoding))
        taken, work = prompts(waiting, pass_work, cost, gap - loop if decoding else None, BATCH - len(decoding))
        planned, now = now, now + loop + cost.pass_seconds(work)
        for each in list(decoding):
            stood = 0
            while not each.owed and stood < drafts and noise.random() < ALPHA:
                stood += 1
            each.tokens += min(stood + 1, each.arrival.output_tokens - each.tokens)
            each.outputs.append(now)
            if each.tokens >= each.arrival.output_tokens:
                decoding.remove(each)
        for each, count in taken:
            each.left -= count
            if not each.left:
                waiting.remove(each)
                each.tokens = 1
                each.owed = each.arrival.prompt_tokens if draft_chunk else 0
                each.outputs.append(now)
                decoding += [each] if each.arrival.output_tokens > 1 else []
    records = [Record(each.arrival.at, each.arrival.at, tuple(each.outputs), each.tokens, 1, True) for each in every]
    return Outcome(tuple(records), len(records), now)


def contexts(requests: Sequence[Request]) -> float:
    """Tokens of these requests."""
    return float(sum(each.arrival.prompt_tokens + each.tokens for each in requests))


def catch_up(decoding: Sequence[Request], tokens: int) -> int:
    """Let the draft read so many tokens of prompts at most, the shortest first; how many it has read."""
    left = tokens
    for each in sorted(decoding, key=lambda request: request.owed):
        taken = min(each.owed, left)
        each.owed, left = each.owed - taken, left - taken
    return tokens - left


def prompts(
    waiting: Sequence[Request], work: Work, cost: CostModel, limit: float | None, room: int
) -> tuple[list[tuple[Request, int]], Work]:
    """Whose prompts are read in a step, how far, and the whole pass. limit: s of the pass; None: there is none."""
    taken: list[tuple[Request, int]] = []
    for each in sorted(waiting, key=lambda request: request.left)[: min(room, CHUNKS)]:
        count = each.left
        if limit is not None and cost.pass_seconds(work + each.chunk(count)) > limit:
            low, high = (0 if taken else min(LEAST, count)), count
            while high - low > STEP:
                middle = (low + high) // 2
                fits = cost.pass_seconds(work + each.chunk(middle)) <= limit
                low, high = (middle, high) if fits else (low, middle)
            count = low
        if count <= 0:
            break
        taken.append((each, count))
        work = work + each.chunk(count)
        if count < each.left:
            break
    return taken, work


def gap_of(arm: str) -> float | None:
    """s; the gap of a planner's arm, if it has one."""
    given = dict(part.split("=") for part in arm.split(",") if "=" in part)
    return float(given["gap"]) * 1e-3 if "gap" in given else None


def planned(arrivals: Sequence[Arrival], cost: Coefficients, arch: str, seed: int, reads: bool = True) -> Outcome:
    """What the planner makes of these arrivals, simulated. reads: whether its draft has a cache to fill."""
    requests = replay([(a.at, a.prompt_tokens, a.output_tokens) for a in arrivals], ALPHA, seed=seed)
    settings = gpu_settings(batch_size=BATCH, max_draft=DRAFTS, drafter_has_cache=reads, **TARGETS)
    believed = CostModel(cost)
    policy = make_architecture(arch, make_controller("throughput", DRAFTS, believed), believed)
    report = Simulation(policy, requests, TrueCosts(cost), settings, seed=seed).run()
    records = [
        Record(each.arrival, each.arrival, tuple(accumulate((each.first or 0.0, *each.gaps))), each.tokens, 1, True)
        for each in report.outcomes
    ]
    return Outcome(tuple(records), len(records), report.seconds)


def simulate(coefficients: Coefficients, rates: Sequence[int]) -> list[dict[str, Any]]:
    """The toy and the planner on unseen seeds, with the draft's reading of prompts and without."""
    cost, gap, chunk = CostModel(coefficients), TARGETS["slo_gap"] * 1e-3, gpu_settings().draft_chunk
    arms: dict[str, Callable[[Sequence[Arrival], int], Outcome]] = {
        "toy": lambda arrivals, seed: play(arrivals, cost, gap, DRAFTS, seed),
        "toy whose draft reads prompts": lambda arrivals, seed: play(arrivals, cost, gap, DRAFTS, seed, chunk),
        "planner whose draft reads no prompts": lambda arrivals, seed: planned(
            arrivals, coefficients, "auto", seed, False
        ),
        "planner": lambda arrivals, seed: planned(arrivals, coefficients, "auto", seed),
        "toy, plain": lambda arrivals, seed: play(arrivals, cost, gap, 0, seed),
        "planner, plain": lambda arrivals, seed: planned(arrivals, coefficients, "plain", seed),
    }
    cells = []
    for rate in rates:
        traffic = {seed: [a for a in mixed(rate, LONG, seed).arrivals if a.at <= UNSEEN_SECONDS] for seed in UNSEEN}
        for name, arm in arms.items():
            found = figures([arm(arrivals, seed) for seed, arrivals in traffic.items()])
            shown = {each: found[each] for each in ("ttft_ms_p50", "tpot_ms_p50", *SHOWN)}
            cells.append({"rate": rate, "arm": name, **shown})
            said = "  ".join(f"{each} {value:.1f}" for each, value in shown.items())
            print(f"{rate:>3}/s {name:<32} {said}", flush=True)
    return cells


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what benchmarks/planner.py wrote, with costs")
    parser.add_argument("--simulate", action="store_true", help="the planner in the simulator, in place of the engine")
    parser.add_argument(
        "--draft-row", type=float, metavar="S", help="s for a token that the draft reads, for the file's"
    )
    parser.add_argument("--steps", type=Path, metavar="FILE", help="a run of pass_drift.py whose steps say the costs")
    args = parser.parse_args(given)
    if args.simulate and len(args.files) > 1:
        parser.error("--simulate takes one file")
    report = {**provenance(args.commit), "alpha": ALPHA, "drafts": DRAFTS, "of": []}
    measured = None
    if args.steps is not None:
        recorded = json.loads(args.steps.read_text())
        measured = CostModel().fit(unpacked(recorded["steps"])).coefficients
        report["steps"] = {"file": args.steps.name, "commit": recorded["commit"]}
    cells: list[dict[str, Any]] = []
    for file in args.files:
        found = json.loads(file.read_text())
        costs = measured or Coefficients(**found["costs"])
        if args.draft_row is not None:
            costs = replace(costs, draft_row=args.draft_row)
        report["of"].append({"file": file.name, "commit": found["commit"], "costs": asdict(costs)})
        if args.simulate:
            rates = list(dict.fromkeys(cell["rate"] for cell in found["cells"]))
            report |= {"seeds": [*UNSEEN], "seconds": UNSEEN_SECONDS}
            cells += simulate(costs, rates)
        else:
            cells += [{"of": file.name, **cell} for cell in compare(found, CostModel(costs))]
    report["cells"] = cells
    keep(report, args.json)
    return report


def compare(found: dict[str, Any], cost: CostModel) -> list[dict[str, Any]]:
    """The engine of a planner's run over the toy on its arrivals."""
    cells = []
    for cell in found["cells"]:
        gap = gap_of(cell["arm"])
        if gap is None:
            continue
        drafts = 0 if cell["arm"].startswith("plain") else DRAFTS
        outcomes = []
        for seed in found.get("seeds", SEEDS):
            arrivals = [a for a in mixed(cell["rate"], LONG, seed).arrivals if a.at <= found["seconds"]]
            outcomes.append(play(arrivals, cost, gap, drafts, seed))
        toy = figures(outcomes)
        over = {name: cell["figures"][name] / toy[name] for name in SHOWN}
        both = {"toy": {name: toy[name] for name in SHOWN}, "engine": {n: cell["figures"][n] for n in SHOWN}}
        cells.append({"rate": cell["rate"], "arm": cell["arm"], **both, "over": over})
        said = "  ".join(f"{n} {cell['figures'][n]:.1f} / {toy[n]:.1f} = {over[n]:.2f}" for n in SHOWN)
        print(f"{cell['rate']:>3}/s {cell['arm']:<28} {said}")
    return cells


if __name__ == "__main__":
    main()
