"""The policy in the simulator: what changing each of its numbers does, where that is more than chance, and the map."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, stdev

from cells import read, rows, source, text
from simulated_map import points
from tuning import ratios, what

SHOWN = {
    "ttft_p95": "TTFT p95",
    "tpot_p95": "TPOT p95",
    "gap_p99": "gap p99",
    "e2e_mean": "E2E mean",
    "throughput": "tokens/s",
}
LEVEL = 0.001  # share of a goodput: less is no difference
LEAST, ERRORS = 0.01, 3.0  # of a ratio: the least that is shown, and by how many standard errors


def numbers() -> str:
    """A line for each change and traffic in which some figure moves, and what moves nothing."""
    runs = read("tuning")["runs"]
    kinds = list(dict.fromkeys(run["kind"] for run in runs))
    lines, still, chance = [], [], 0
    for name, change in dict.fromkeys((run["name"], run["change"]) for run in runs if run["name"]):
        moved = {kind: [cell(ratios(runs, name, change, kind, figure)) for figure in SHOWN] for kind in kinds}
        if name == "again":
            chance += sum(bool(each) for cells in moved.values() for each in cells)
            continue
        lines += [[f"`{name}`", what(name, change), kind, *cells] for kind, cells in moved.items() if any(cells)]
        still += [] if any(map(any, moved.values())) else [f"`{name}` {what(name, change)}"]
    again = len({run["change"] for run in runs if run["name"] == "again"}) * len(kinds) * len(SHOWN)
    said = f"\nNothing moves: {'; '.join(still)}.\n" if still else ""
    said += f"\nOther noise in place of a change moves {chance} of {again} figures by as much.\n"
    return rows(["number", "changed", "traffic", *SHOWN.values()], lines) + said + source("tuning")


def cell(values: list[float]) -> str:
    """Mean ± standard error; nothing where that may be chance."""
    mean, error = fmean(values), stdev(values) / sqrt(len(values))
    beyond = abs(mean - 1.0) >= max(LEAST, ERRORS * error)
    return f"{mean:.2f} ± {error:.2f}" if beyond else ""


def map_glance() -> str:
    """How `auto` stands in the simulated map."""
    made = read("simulated-map")
    found = points(made["runs"])
    lowest = min(found, key=lambda row: row["auto_goodput_ratio"])
    plain = [1.0 - row["auto_goodput_plain_ratio"] for row in found]
    better = sum(each > LEVEL for each in plain)
    figures = {
        "low": f"{lowest['auto_goodput_ratio']:.3f}",
        "high": f"{max(row['auto_goodput_ratio'] for row in found):.3f}",
        "points": f"{len(found)}",
        "alpha": f"{lowest['alpha']:g}",
        "load": f"{100 * lowest['load']:.0f}",
        "better": f"{better} of them, by {100 * max(plain):.1f} % at most" if better else "none of them",
        "first": f"{max(row['auto_ttft_p95_plain_ratio'] for row in found):.2f}",
    }
    kept = f" All arms but `auto`: {made['kept']['commit'][:7]}.\n" if "kept" in made else ""
    return text("map-glance", **figures) + source("simulated-map").rstrip("\n") + (kept or "\n")
