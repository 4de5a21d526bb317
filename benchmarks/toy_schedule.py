"""A toy of the schedule on the arrivals of a planner's run, and the engine over it: what else is being paid for?

    python benchmarks/toy_schedule.py benchmarks/results/h200-targets.json --json benchmarks/results/toy-schedule.json

The toy reads prompts first, the shortest first, within the gap; everybody else drafts a fixed number of tokens in every
step. Steps cost what the run's engine measured at its start. It leaves out the draft's own reading of prompts, padding
of passes, host work and memory. An engine with the same costs should come near it. Arms are those of the file with a
`gap`: with drafts, or `plain` without. Latencies are in ms, of all requests of all seeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from script import command_line, keep

from verifypd.bench.figures import Outcome, Record, figures
from verifypd.bench.provenance import provenance
from verifypd.bench.workload import Arrival, mixed
from verifypd.control.cost import Coefficients, CostModel, Work

ALPHA, DRAFTS = 0.8, 4
LONG = 60.0  # s, of the files long-RATE-seedN
BATCH, CHUNKS = 128, 8  # requests that decode, and prompts in one step
LEAST, STEP = 32, 8  # tokens of a chunk at least, and to which its size is searched
SEEDS = (1, 2)
SHOWN = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99", "gap_ms_max")


@dataclass(slots=True)
class Request:
    """One request, and when its outputs came."""

    arrival: Arrival
    left: int  # prompt tokens that are not read yet
    tokens: int = 0
    outputs: list[float] = field(default_factory=list)

    def chunk(self, tokens: int) -> Work:
        """The next tokens of its prompt, in a pass."""
        context = self.arrival.prompt_tokens - self.left + tokens
        return Work(tokens, context, tokens, tokens * context)


def play(arrivals: Sequence[Arrival], cost: CostModel, gap: float, drafts: int, seed: int) -> Outcome:
    """What the toy makes of these arrivals. gap: s. A step is planned while the one before it runs."""
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
        contexts = float(sum(each.arrival.prompt_tokens + each.tokens for each in decoding))
        rows = len(decoding) * (drafts + 1)
        loop = cost.draft_seconds(drafts, rows, contexts) if decoding and drafts else 0.0
        taken, work = prompts(
            waiting, Work(rows, contexts), cost, gap - loop if decoding else None, BATCH - len(decoding)
        )
        planned, now = now, now + loop + cost.pass_seconds(work)
        for each in list(decoding):
            stood = 0
            while stood < drafts and noise.random() < ALPHA:
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
                each.outputs.append(now)
                decoding += [each] if each.arrival.output_tokens > 1 else []
    records = [Record(each.arrival.at, each.arrival.at, tuple(each.outputs), each.tokens, 1, True) for each in every]
    return Outcome(tuple(records), len(records), now)


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


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("file", type=Path, help="what benchmarks/planner.py wrote, with costs")
    args = parser.parse_args(given)
    found = json.loads(args.file.read_text())
    cost = CostModel(Coefficients(**found["costs"]))
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
    report = {**provenance(args.commit), "of": {"file": args.file.name, "commit": found["commit"]}, "alpha": ALPHA}
    report |= {"drafts": DRAFTS, "costs": found["costs"], "cells": cells}
    keep(report, args.json)
    return report


if __name__ == "__main__":
    main()
