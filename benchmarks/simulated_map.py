"""The simulated map: acceptance × load × architecture, with beliefs that are wrong. No GPU and no model.

Every run drives the real policy code (`verifypd.control`) with the costs of an H200 and a 7B verifier. The policy
believes the measured table; the truth is 20 % off in every coefficient, noisy and drifting, and acceptance differs
between requests and along each of them. Arms see the same requests at the same times, after others that warm them up,
as in every bench: what a policy learns in its first second is no part of the map. Load is relative to what `plain`
serves in the middle of a run that never lacks work. Rules were looked at on seeds below 1800 and above 3000; the map is
made with others, once.

    python benchmarks/simulated_map.py                       # the map, some minutes on two cores
    python benchmarks/simulated_map.py --quick --out /tmp/map.json
    python benchmarks/simulated_map.py --part tails          # `auto` against `plain` where drafts gain least
    python benchmarks/simulated_map.py --plot-only           # draw again from the JSON
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verifypd.bench.provenance import provenance
from verifypd.control.architectures import Architecture
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.simulate.engine import Simulation
from verifypd.simulate.tables import h200
from verifypd.simulate.traffic import Acceptance, poisson
from verifypd.simulate.world import Settings, TrueCosts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "simulated-map.json"
TAILS = RESULTS.with_name("simulated-tails.json")
IMAGES = ROOT / "docs" / "images"

ALPHAS = (0.3, 0.5, 0.7, 0.9)
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.2)
SEEDS = (1801, 1802, 1803, 1804)
TAIL_ALPHA, TAIL_SEEDS = 0.3, tuple(range(1801, 1825))  # where four seeds cannot tell `auto` from `plain`
FIXED = (1, 2, 3, 4, 6)
ERROR = 0.2  # of every coefficient
NOISE = 0.05  # of every pass
DRIFT = 0.1  # slow swing of all costs
REQUESTS = 200
WARM_UP, WARM_LOAD = 64, 0.7  # requests before them, of another seed, and their load
MIDDLE = (0.2, 0.7)  # of the requests: the part of a saturated run that its capacity is taken from
SETTINGS = Settings(batch_size=32, verify_batch=16)
LATENCIES = ("tpot_p95", "tpot_p99", "e2e_p95", "e2e_p99", "ttft_p95", "gap_p99")
SHOWN = ("goodput", "throughput", *LATENCIES)


# -- arms --------------------------------------------------------------------------------------------------------------


def arm(name: str, settings: Settings, belief: Coefficients | None = None) -> Architecture:
    """`unified:4` is unified with L = 4; `table` has the original's controller; `auto` believes the measured table."""
    kind, _, length = name.partition(":")
    cost = CostModel(belief or h200().coefficients)
    if kind == "auto":
        return make_architecture("auto", make_controller("throughput", settings.max_draft, cost), cost)
    if kind == "table":
        return make_architecture("table", make_controller("threshold", settings.max_draft), cost)
    return make_architecture(kind, make_controller("fixed", int(length or 0)), cost)


def arms() -> list[str]:
    """Everything that is compared."""
    fixed = [f"unified:{length}" for length in FIXED] + ["pd:2", "pdv:2"]
    return ["plain", *fixed, "table", "auto"]


def capacity(seed: int, settings: Settings, costs: TrueCosts) -> float:
    """Requests a second that `plain` serves while it never lacks work: load 100 %. The drain at the end is left out."""
    arrivals = poisson(math.inf, REQUESTS, Acceptance(0.5), seed=seed)
    report = Simulation(arm("plain", settings), arrivals, costs, settings, seed=seed).run()
    ends = sorted(outcome.last or 0.0 for outcome in report.outcomes)
    first, last = (int(part * REQUESTS) for part in MIDDLE)
    return (last - first) / (ends[last] - ends[first])


def truth(seed: int) -> TrueCosts:
    """What passes really cost in this seed's world."""
    return TrueCosts(h200().coefficients, noise=NOISE, drift=DRIFT).off_by(ERROR, seed)


def point(job: tuple[str, float, float, int, float, int]) -> dict[str, Any]:
    """One run."""
    name, alpha, load, seed, rate, requests = job
    played, costs, other = arm(name, SETTINGS), truth(seed), seed + 10_000
    before = poisson(WARM_LOAD * rate, WARM_UP, Acceptance(alpha), seed=other)
    Simulation(played, before, costs, SETTINGS, seed=other).run()
    arrivals = poisson(load * rate, requests, Acceptance(alpha), seed=seed)
    began = time.perf_counter()
    report = Simulation(played, arrivals, costs, SETTINGS, seed=seed).run()
    took = time.perf_counter() - began
    return {"arm": name, "alpha": alpha, "load": load, "seed": seed, "took": took, **report.summary()}


def run_map(
    alphas: tuple[float, ...], loads: tuple[float, ...], seeds: tuple[int, ...], names: list[str], workers: int
) -> dict[str, Any]:
    """All runs, spread over processes."""
    rates = {seed: capacity(seed, SETTINGS, truth(seed)) for seed in seeds}
    jobs = [
        (name, alpha, load, seed, rates[seed], REQUESTS)
        for alpha in alphas
        for load in loads
        for seed in seeds
        for name in names
    ]
    with ProcessPoolExecutor(workers) as pool:
        runs = []
        for number, run in enumerate(pool.map(point, jobs, chunksize=4), 1):
            runs.append(run)
            if number % 100 == 0:
                print(f"{number} of {len(jobs)} runs", flush=True)
    return {
        "settings": asdict(SETTINGS),
        "requests": REQUESTS,
        "warm_up": WARM_UP,
        "warm_load": WARM_LOAD,
        "error": ERROR,
        "noise": NOISE,
        "drift": DRIFT,
        "capacity": {str(seed): rate for seed, rate in rates.items()},
        "truth": {str(seed): asdict(truth(seed)) for seed in seeds},
        "runs": runs,
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def mean(runs: list[dict[str, Any]], name: str, alpha: float, load: float, figure: str) -> float:
    """Mean over seeds of one figure of one arm at one point."""
    return statistics.fmean(
        run[figure] for run in runs if (run["arm"], run["alpha"], run["load"]) == (name, alpha, load)
    )


def points(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The map point by point: the best fixed arm, and how `auto`, `table` and `plain` stand beside it."""
    names = list(dict.fromkeys(run["arm"] for run in runs))
    fixed = [name for name in names if name not in ("auto", "table")]
    rows = []
    for alpha, load in sorted({(run["alpha"], run["load"]) for run in runs}):
        value = {name: {f: mean(runs, name, alpha, load, f) for f in SHOWN} for name in names}
        row: dict[str, Any] = {"alpha": alpha, "load": load, "arms": value}
        for figure in ("goodput", "throughput"):
            best = max(fixed, key=lambda name: value[name][figure])
            row[f"best_{figure}"] = best
            row[f"auto_{figure}_ratio"] = value["auto"][figure] / max(value[best][figure], 1e-9)
            row[f"auto_{figure}_plain_ratio"] = value["auto"][figure] / max(value["plain"][figure], 1e-9)
        for figure in LATENCIES:
            best = min(fixed, key=lambda name: value[name][figure])
            row[f"best_{figure}"] = best
            row[f"auto_{figure}_ratio"] = value["auto"][figure] / max(value[best][figure], 1e-9)
            row[f"auto_{figure}_plain_ratio"] = value["auto"][figure] / max(value["plain"][figure], 1e-9)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line a point."""
    heads = "α|load|goodput: best fixed|auto|table|plain|auto / best|E2E p95: best|auto|plain|TPOT p95: auto|plain"
    lines = ["| " + heads.replace("|", " | ") + " |", "|---" * (1 + heads.count("|")) + "|"]
    for row in rows:
        a, best, quick = row["arms"], row["best_goodput"], row["best_e2e_p95"]
        lines.append(
            f"| {row['alpha']} | {row['load']:.0%} | {a[best]['goodput']:.2f} ({best}) | {a['auto']['goodput']:.2f} "
            f"| {a['table']['goodput']:.2f} | {a['plain']['goodput']:.2f} | {row['auto_goodput_ratio']:.3f} "
            f"| {a[quick]['e2e_p95']:.0f} ({quick}) | {a['auto']['e2e_p95']:.0f} | {a['plain']['e2e_p95']:.0f} "
            f"| {a['auto']['tpot_p95']:.2f} | {a['plain']['tpot_p95']:.2f} |"
        )
    return "\n".join(lines)


def tail_table(runs: list[dict[str, Any]]) -> str:
    """Markdown: `auto` over `plain` at each load, mean over seeds of each seed's ratio ± its standard error."""
    shown = [figure for figure in SHOWN if figure != "throughput"]
    lines = ["| load | " + " | ".join(shown) + " |", "|---" * (1 + len(shown)) + "|"]
    value = {(run["arm"], run["load"], run["seed"]): run for run in runs}
    for load in sorted({run["load"] for run in runs}):
        cells = []
        for figure in shown:
            seeds = sorted({run["seed"] for run in runs})
            ratio = [value["auto", load, seed][figure] / value["plain", load, seed][figure] for seed in seeds]
            cells.append(f"{statistics.fmean(ratio):.4f} ± {statistics.stdev(ratio) / math.sqrt(len(ratio)):.4f}")
        lines.append(f"| {load:.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_text(result: dict[str, Any]) -> str:
    """JSON with a line for each run, figures to five digits."""
    head = json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1)[:-2]
    rounded = ({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in run.items()} for run in result["runs"])
    return head + ',\n "runs": [\n  ' + ",\n  ".join(map(json.dumps, rounded)) + "\n ]\n}\n"


# -- plots -------------------------------------------------------------------------------------------------------------

THEMES = {
    "": {"page": "#ffffff", "ink": "#1f2328", "soft": "#9aa4af", "line": "#d1d9e0"},
    "-dark": {"page": "#0d1117", "ink": "#e6edf3", "soft": "#6e7681", "line": "#3d444d"},
}
COLOURS = {
    "plain": "#8c959f",
    "unified": "#4493f8",
    "pd": "#d29922",
    "pdv": "#3fb950",
    "table": "#f778ba",
    "auto": "#f85149",
}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Goodput, TPOT and E2E against load, one column for each α; for a light and a dark page."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FormatStrFormatter

    folder.mkdir(parents=True, exist_ok=True)
    alphas = sorted({row["alpha"] for row in rows})
    figures = (("goodput", "goodput, requests/s"), ("tpot_p95", "TPOT p95, ms"), ("e2e_p95", "E2E p95, s"))
    for suffix, theme in THEMES.items():
        fig, axes = plt.subplots(len(figures), len(alphas), figsize=(13, 8), squeeze=False, sharex=True)
        fig.patch.set_facecolor(theme["page"])
        for column, alpha in enumerate(alphas):
            here = [row for row in rows if row["alpha"] == alpha]
            for line, (figure, label) in enumerate(figures):
                axis = axes[line][column]
                dress(axis, theme)
                scale = 1e-3 if figure.startswith("e2e") else 1.0
                for name in here[0]["arms"]:
                    kind = name.partition(":")[0]
                    strong = kind in ("auto", "plain", "table")
                    axis.plot(
                        [100 * row["load"] for row in here],
                        [scale * row["arms"][name][figure] for row in here],
                        color=COLOURS[kind],
                        linewidth=2.2 if kind == "auto" else 1.6 if strong else 0.8,
                        linestyle="--" if kind == "table" else "-",
                        alpha=1.0 if strong else 0.65,
                        zorder=3 if kind == "auto" else 2,
                    )
                if line == 0:
                    axis.set_title(f"mean α = {alpha}", color=theme["ink"], fontsize=11)
                if column == 0:
                    axis.set_ylabel(label, color=theme["ink"])
                if figure == "e2e_p95":
                    axis.set_yscale("log")
                    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
                    axis.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
                    axis.set_xlabel("load, % of plain's capacity", color=theme["ink"])
        handles = [plt.Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in COLOURS.items()]
        legend = fig.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)
        for text in legend.get_texts():
            text.set_color(theme["ink"])
        fig.tight_layout(rect=(0, 0.05, 1, 1))
        fig.savefig(folder / f"lanes-map{suffix}.png", dpi=110, facecolor=theme["page"])
        plt.close(fig)


def dress(axis: Any, theme: dict[str, str]) -> None:
    """Colours of the page."""
    axis.set_facecolor(theme["page"])
    axis.tick_params(colors=theme["ink"], labelsize=8)
    axis.grid(color=theme["line"], linewidth=0.5)
    for spine in axis.spines.values():
        spine.set_color(theme["line"])


def main() -> None:
    """Run, print, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--quick", action="store_true", help="two α, three loads, one seed")
    parser.add_argument("--plot-only", action="store_true", help="draw and print from the JSON of an earlier run")
    parser.add_argument("--arms", help="run these again, comma-separated, and keep the others of an earlier run")
    parser.add_argument("--part", choices=("map", "tails"), default="map")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.part == "tails":
        out = TAILS if args.out == RESULTS else args.out
        if not args.plot_only:
            made = provenance()
            loads, seeds = ((0.3, 1.2), (1, 2)) if args.quick else (LOADS, TAIL_SEEDS)
            runs = run_map((TAIL_ALPHA,), loads, seeds, ["plain", "auto"], args.workers)
            out.write_text(as_text({**runs, **made}))
        print(tail_table(json.loads(out.read_text())["runs"]))
        return
    if args.plot_only:
        result = json.loads(args.out.read_text())
    else:
        began, made = time.perf_counter(), provenance()
        grid = ((0.5, 0.9), (0.3, 0.7, 1.2), (1,)) if args.quick else (ALPHAS, LOADS, SEEDS)
        names = args.arms.split(",") if args.arms else arms()
        result = json.loads(args.out.read_text()) if args.out.exists() else {}
        kept = [run for run in result.get("runs", ()) if run["arm"] not in names]  # the others as they stand
        if args.arms and {run["seed"] for run in kept} != set(grid[2]):
            parser.error("--arms keeps the runs of an earlier map, and that one has other seeds: run all of it")
        result |= run_map(*grid, names, workers=args.workers)
        if args.arms:
            result["runs"] += kept
            result["kept"] = {"commit": result["commit"], "arms": sorted({run["arm"] for run in kept})}
        result["minutes"] = (time.perf_counter() - began) / 60
        result |= made
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(as_text(result))
    rows = points(result["runs"])
    draw(rows, args.images)
    print(table(rows))
    print("\n" + verdict(rows))


def verdict(rows: list[dict[str, Any]]) -> str:
    """How the map stands to its aims, in words and figures."""
    ratio = [row["auto_goodput_ratio"] for row in rows]
    plain = [row["auto_goodput_plain_ratio"] for row in rows]
    lines = [
        (
            f"goodput of auto / best fixed: {min(ratio):.3f} to {max(ratio):.3f}; 0.97 or more at "
            f"{sum(value >= 0.97 for value in ratio)} of {len(rows)} points"
        ),
        f"goodput of auto / plain: {min(plain):.3f} to {max(plain):.3f}; below 1 at {sum(v < 1 - 1e-9 for v in plain)}",
    ]
    for figure in LATENCIES:
        values = [row[f"auto_{figure}_plain_ratio"] for row in rows]
        over = [f"α {r['alpha']} load {r['load']:.0%} {v:.3f}" for r, v in zip(rows, values, strict=True) if v > 1]
        lines.append(f"{figure} of auto / plain: {min(values):.3f} to {max(values):.3f}; above 1 at {len(over)} {over}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
