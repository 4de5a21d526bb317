"""What each number of control/tuning.py is worth: half of it, double, and none, in the simulator, on unseen seeds.

    python benchmarks/tuning.py --json benchmarks/results/tuning.json      # some fifteen minutes of one core

Four kinds of traffic (`tuning_traffic.py`), on the costs of an H200 with a 7B verifier: *steady*, 16 requests/s with a
head; *changing*, where drafts of a 1.1B model pay for those who come in every other turn of four seconds only; *poor*,
where they never pay; and *overload*, 44 requests/s. Ratios are over the numbers as they stand, on the same arrivals:
means over seeds of each seed's ratio, ± their standard error. Below 1 is better for latencies, above 1 for tokens/s.
`again` is the numbers as they stand with other noise of the passes: what differs there is chance.

Each change runs in a process of its own, which sets the number before anything has read it.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from script import command_line, keep

from verifypd.bench.provenance import provenance
from verifypd.control import tuning
from verifypd.progress import bar

TRAFFIC = ("steady", "changing", "poor", "overload")
VARIED = "changing"  # its figures hang on when a change is noticed: it gets all seeds, the others half of them
NONE: dict[str, tuple[float, str]] = {  # what takes a rule away, and what is left of it
    "PROBE_SHARE": (0.0, "no probes"),
    "REVIEW_EVERY": (1, "every step"),
    "KIND_TRIALS": (1e9, "none forgotten"),
    "REQUEST_TRIALS": (1, "the last draft alone"),
    "PROMPT_SHARE": (0.0, "no share"),
    "OVERDUE": (math.inf, "never"),
    "LEARNING_RATE": (0.0, "all alike"),
}
AGAIN = 2  # times


class Arm(NamedTuple):
    """One number changed; or none, and other noise."""

    name: str = ""
    change: str = "as it stands"
    value: float = 0.0
    again: int = 0


def names() -> list[str]:
    """The numbers, as they stand in the file."""
    return [name for name, value in vars(tuning).items() if name.isupper() and isinstance(value, int | float)]


def arms(chosen: list[str]) -> list[Arm]:
    """The numbers as they stand, that again, and every change of those chosen."""
    found = [Arm(), *(Arm("again", str(k), again=k) for k in range(1, AGAIN + 1))]
    for name in chosen:
        value = getattr(tuning, name)
        found += [Arm(name, change, type(value)(value * by)) for change, by in (("half", 0.5), ("double", 2.0))]
        found += [Arm(name, "none", NONE[name][0])] if name in NONE else []
    return found


def run(job: tuple[Arm, list[str], list[int]]) -> list[dict[str, Any]]:
    """An arm's runs, in a process of its own: no module has read the number yet, at its birth or later."""
    arm, kinds, seeds = job
    if hasattr(tuning, arm.name):
        early = [name for name, module in sys.modules.items() if module is not tuning and hasattr(module, arm.name)]
        if early:
            raise RuntimeError(f"{', '.join(early)} read {arm.name} before it was changed")
        setattr(tuning, arm.name, arm.value)
    from tuning_traffic import play

    said = {"name": arm.name, "change": arm.change, "value": str(arm.value)}
    pairs = [(kind, seed) for kind in kinds for seed in (seeds if kind == VARIED else seeds[: -(-len(seeds) // 2)])]
    return [{**said, "kind": kind, "seed": seed, **play(kind, seed, arm.again)} for kind, seed in pairs]


def ratios(runs: list[dict[str, Any]], name: str, change: str, kind: str, figure: str) -> list[float]:
    """Over the numbers as they stand, seed by seed."""
    own = {(r["name"], r["change"], r["seed"]): r[figure] for r in runs if r["kind"] == kind}
    seeds = sorted({seed for _, _, seed in own})
    return [own[name, change, seed] / own["", Arm().change, seed] for seed in seeds]


def what(name: str, change: str) -> str:
    """A change in words."""
    return NONE[name][1] if change == "none" else change


def told(values: list[float]) -> str:
    """Mean ± standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def table(runs: list[dict[str, Any]], kind: str) -> list[str]:
    """Markdown: a line for each change."""
    figures = [figure for figure in runs[0] if figure not in ("name", "change", "value", "kind", "seed", "changes")]
    changes = [r["changes"] for r in runs if r["kind"] == kind and not r["name"]]
    lines = [f"{kind}: {statistics.fmean(changes):.1f} changes of mode a run", ""]
    lines += ["| number | changed | " + " | ".join(figures) + " |", "|---" * (2 + len(figures)) + "|"]
    for name, change in dict.fromkeys((r["name"], r["change"]) for r in runs if r["name"]):
        cells = [told(ratios(runs, name, change, kind, figure)) for figure in figures]
        lines.append(f"| `{name}` | {what(name, change)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default=",".join(map(str, range(2301, 2317))))
    parser.add_argument("--names", help="some of the numbers, comma-separated")
    parser.add_argument("--traffic", default=",".join(TRAFFIC), help="some of the traffic, comma-separated")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args(given)
    seeds, kinds = [int(seed) for seed in args.seeds.split(",")], args.traffic.split(",")
    jobs = [(arm, kinds, seeds) for arm in arms(args.names.split(",") if args.names else names())]
    made, runs = provenance(args.commit), []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        for each in bar(pool.map(run, jobs), desc="changes of a number", total=len(jobs)):
            runs += each
    report = {**made, "numbers": {name: getattr(tuning, name) for name in names()}, "seeds": seeds, "runs": runs}
    for kind in kinds:
        print("\n".join(table(runs, kind)))
    keep(report, args.json)
    return report


if __name__ == "__main__":
    main()
