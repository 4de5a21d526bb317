"""What half and double of each number in control/tuning.py do, in the simulator, on seeds that no rule was chosen on.

    python benchmarks/tuning.py --json benchmarks/results/tuning.json      # some minutes on two cores

Two kinds of traffic, on the costs of an H200 with a 7B verifier and a one-layer head: mixed (16 requests/s, 12 % long
prompts, α 0.8) and doubtful (the same lengths at 24 requests/s, α 0.35, where drafts hardly pay). With these costs the
simulator is within 10 % of the p95 that the server has shown over HTTP. Ratios are over the numbers as they stand,
means over seeds of each seed's ratio: below 1 is better for latencies, above 1 for tokens/s.
"""

from __future__ import annotations

import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from script import command_line, keep

from verifypd.bench.provenance import provenance
from verifypd.control import (
    acceptance,
    architectures,
    auto,
    cost,
    lanes,
    lengths,
    mode,
    prompts,
    snapshot,
    throughput,
    tuning,
)
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import Acceptance, poisson
from verifypd.simulate.world import TrueCosts, gpu_settings

MODULES = (acceptance, architectures, auto, cost, lanes, lengths, mode, prompts, snapshot, throughput)
HEAD = Coefficients(
    base=3.75e-3, row=9e-6, steep=14.2e-6, knee=128.0, context=0.165e-6, chunk_context=3e-9, mixed=0.5e-3,
    draft_step=0.28e-3, draft_context=5.7e-9, draft_row=0.65e-6,
)  # fmt: skip
TRAFFIC = {"mixed": (16.0, 0.8), "doubtful": (24.0, 0.35)}  # requests/s, mean α
SECONDS = 12.0  # of traffic
FIGURES = ("ttft_p95", "tpot_p95", "gap_p99", "throughput")


def names() -> list[str]:
    """The numbers, as they stand in the file."""
    return [name for name, value in vars(tuning).items() if name.isupper() and isinstance(value, int | float)]


def run(job: tuple[str, float, str, int]) -> dict[str, Any]:
    """One simulation with one number changed."""
    name, factor, kind, seed = job
    for module in MODULES:
        if name and hasattr(module, name):
            value = getattr(tuning, name)
            setattr(module, name, type(value)(value * factor))  # a count stays a count
    rate, alpha = TRAFFIC[kind]
    believed = CostModel(HEAD)
    policy = make_architecture("auto", make_controller("throughput", 4, believed), believed)
    arrivals = poisson(rate, round(rate * SECONDS), Acceptance(alpha), seed=seed)
    settings = gpu_settings(batch_size=128, max_draft=4, head=True)
    truth = TrueCosts(HEAD, noise=0.05, drift=0.1).off_by(0.1, seed)
    found = Simulation(policy, arrivals, truth, settings, seed=seed).run().summary()
    for module in MODULES:
        if name and hasattr(module, name):
            setattr(module, name, getattr(tuning, name))
    return {"name": name, "factor": factor, "kind": kind, "seed": seed, **{figure: found[figure] for figure in FIGURES}}


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown: a line for each number, half and double."""
    value = {(r["name"], r["factor"], r["kind"], r["seed"]): r for r in runs}
    seeds = sorted({r["seed"] for r in runs})
    shown = [(kind, figure) for kind in TRAFFIC for figure in FIGURES]
    lines = ["| number | times | " + " | ".join(f"{kind}: {figure}" for kind, figure in shown) + " |"]
    lines.append("|---" * (2 + len(shown)) + "|")
    for name in sorted({r["name"] for r in runs if r["name"]}, key=names().index):
        for factor in (0.5, 2.0):
            cells = []
            for kind, figure in shown:
                ratios = [value[name, factor, kind, s][figure] / value["", 1.0, kind, s][figure] for s in seeds]
                cells.append(f"{statistics.fmean(ratios):.3f}")
            lines.append(f"| `{name}` | {factor:g} | " + " | ".join(cells) + " |")
    return lines


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="101,102,103,104")
    parser.add_argument("--names", help="some of the numbers, comma-separated")
    args = parser.parse_args(given)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    chosen = args.names.split(",") if args.names else names()
    changed = [("", 1.0), *((name, factor) for name in chosen for factor in (0.5, 2.0))]
    jobs = [(name, factor, kind, seed) for name, factor in changed for kind in TRAFFIC for seed in seeds]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(run, jobs))
    report = {**provenance(args.commit), "numbers": {name: getattr(tuning, name) for name in names()}, "runs": runs}
    print("\n".join(table(runs)))
    keep(report, args.json)
    return report


if __name__ == "__main__":
    main()
