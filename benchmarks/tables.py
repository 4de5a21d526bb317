"""Tables of the documentation, made from the JSON of the results they show.

    python benchmarks/tables.py            # write them into the pages
    python benchmarks/tables.py --check    # say which are out of date

A page has a table between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from verifypd.bench.figures import Outcome, cut, figures
from verifypd.bench.results import HEADER, ratio, row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {
    "ours:head": "ours, head",
    "vllm:eagle": "vLLM, head",
    "ours:plain": "ours, plain",
    "vllm:plain": "vLLM, plain",
}


def read(name: str) -> dict[str, Any]:
    """A result."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def rows(header: list[str], lines: list[list[str]]) -> str:
    """A markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines]) + "\n"


def source(*names: str) -> str:
    """Where a table comes from."""
    commits = {name: read(name)["commit"][:7] for name in names}
    links = ", ".join(f"[`{name}.json`](RESULTS/{name}.json) ({commit})" for name, commit in commits.items())
    return f"\nFrom {links}.\n"


def over(cell: dict[str, Any], arm: str, reference: str, figure: str) -> str:
    """A ratio with its interval."""
    found = cell[arm]["over"][reference][figure]
    return f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def closed() -> str:
    """Tokens/s of all arms in the closed loop, and ours over vLLM's."""
    cells = read("beside-vllm-closed")["cells"]
    levels = sorted(cells, key=lambda name: int(name.split()[1]))
    lines = [
        [NAMES[arm], *(f"{cells[level][arm]['figures']['tok_s']:,.0f}" for level in levels)]
        for arm in ("ours:head", "vllm:eagle", "ours:plain", "vllm:plain")
    ]
    for ours, theirs in (("ours:head", "vllm:eagle"), ("ours:plain", "vllm:plain")):
        label = f"{NAMES[ours]} over {NAMES[theirs]}"
        lines.append([label, *(over(cells[level], ours, theirs, "tok_s") for level in levels)])
    header = ["tokens/s at requests at once", *(level.split()[1] for level in levels)]
    return rows(header, lines) + source("beside-vllm-closed")


def closed_tails() -> str:
    """Latencies of the closed loop."""
    cells = read("beside-vllm-closed")["cells"]
    lines = []
    for level in sorted(cells, key=lambda name: int(name.split()[1])):
        for arm in ("ours:head", "vllm:eagle"):
            lines.append([level.split()[1], NAMES[arm], *_tails(cells[level][arm]["figures"])])
    return rows(["at once", "arm", *TAILS], lines) + source("beside-vllm-closed")


def mixed(name: str = "beside-vllm-mixed") -> str:
    """Latencies of mixed traffic."""
    cells = read(name)["cells"]
    lines = []
    for rate in sorted(cells, key=lambda name: int(name.split()[1])):
        for arm in ("ours:head", "vllm:eagle"):
            lines.append([rate.split()[1], NAMES[arm], *_tails(cells[rate][arm]["figures"])])
    return rows(["requests/s", "arm", *TAILS], lines) + source(name)


TAILS = ["TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "gap p99 (longest), ms"]


def _tails(figures: dict[str, float]) -> list[str]:
    return [
        f"{figures['ttft_ms_p50']:.0f} / {figures['ttft_ms_p95']:.0f}",
        f"{figures['tpot_ms_p50']:.1f} / {figures['tpot_ms_p95']:.1f}",
        f"{figures['gap_ms_p99']:.0f} ({figures['gap_ms_max']:.0f})",
    ]


def low_acceptance() -> str:
    """The head's engine over one without a draft, where few drafts stand."""
    lines = []
    for alpha, names in (("0.3", ("head-alpha-0.3", "head-alpha-0.3-128")), ("0.5", ("head-alpha-0.5",))):
        cells = {level: cell for name in names for level, cell in read(name)["cells"].items()}
        levels = ("closed 1", "closed 32", "closed 128")
        lines.append([alpha, *(over(cells[level], "ours:head", "ours:plain", "tok_s") for level in levels)])
    cells = read("beside-vllm-closed")["cells"]
    lines.append(
        [
            "0.8",
            *(
                over(cells[level], "ours:head", "ours:plain", "tok_s")
                for level in ("closed 1", "closed 32", "closed 128")
            ),
        ]
    )
    names = ("head-alpha-0.3", "head-alpha-0.3-128", "head-alpha-0.5", "beside-vllm-closed")
    return rows(["α", "1 request", "32", "128"], lines) + source(*names)


def original_metric() -> str:
    """One arm that ran twice, cut off at three times: all tokens of the window, and those of finished requests."""
    found = read("bench-original-metric")
    one, two = (Outcome.unpacked(run) for run in found["runs"].values())
    lines = []
    for seconds in (39.0, 39.5, 45.0):
        both = [figures([cut(each, seconds)]) for each in (one, two)]
        line = [f"{seconds:g} s"]
        for figure in ("tok_s", "tok_s_original"):
            first, second = (each[figure] for each in both)
            more = f"{100 * (second / first - 1):+,.0f} %" if first else "from nothing"
            line += [f"{first:.1f}", f"{second:.1f}", more]
        lines.append(line)
    header = ["cut off at", "all tokens/s: once", "again", "", "of finished requests: once", "again", ""]
    return rows(header, lines) + source("bench-original-metric")


def serve_cpu() -> str:
    """Two servers over HTTP on a CPU."""
    found = read("bench-serve-cpu")
    lines = []
    for scenario, own in found["scenarios"].items():
        lines += [[scenario, *row(arm, each)[:7]] for arm, each in own["arms"].items()]
    lines += [
        [scenario, f"{arm} over {found['reference']}", ratio(each["tok_s"]), "", "", "", ratio(each["e2e_ms_mean"]), ""]
        for scenario, own in found["scenarios"].items()
        for arm, each in own["compared"].items()
    ]
    return rows(["scenario", *HEADER[:7]], lines) + source("bench-serve-cpu")


def planner() -> str:
    """The planner beside the rules before it, with a draft model; ratios are over the rule of the same ms."""
    lines = []
    for name in ("h200-planner-16", "h200-planner"):
        report = read(name)
        for cell in report["cells"]:
            mine, _, budget = cell["arm"].partition("=")
            arm = f"planner, `--slo-gap {budget}`" if mine == "gap" else f"4342614, {cell['arm'][6:]} ms rule"
            over = _intervals(cell["over"][f"other:{budget}"]) if mine == "gap" else [""] * 3
            lines.append([report["commit"][:7], str(cell["rate"]), arm, *_tails(cell["figures"]), *over])
    header = ["commit", "requests/s", "planner", *TAILS, "× TTFT p95", "× TPOT p95", "× gap p99"]
    return rows(header, lines) + source("h200-planner-16", "h200-planner")


def targets() -> str:
    """The planner under other targets; ratios are over the first line."""
    lines = []
    for cell in read("h200-targets")["cells"]:
        over = _intervals(cell["over"]["ttft=500"]) if cell["over"] else [""] * 3
        lines.append([f"`--slo-{cell['arm'].replace('=', ' ')}`", *_tails(cell["figures"]), *over])
    return rows(["target, ms", *TAILS, "× TTFT p95", "× TPOT p95", "× gap p99"], lines) + source("h200-targets")


def _intervals(found: dict[str, dict[str, float]]) -> list[str]:
    names = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")
    return [f"{found[name]['ratio']:.2f} ({found[name]['low']:.2f}–{found[name]['high']:.2f})" for name in names]


TABLES: dict[str, Callable[[], str]] = {
    "head-mixed-before": partial(mixed, "beside-vllm-mixed-before"),
    "planner": planner,
    "planner-targets": targets,
    "bench-original-metric": original_metric,
    "bench-serve-cpu": serve_cpu,
    "head-closed": closed,
    "head-closed-tails": closed_tails,
    "head-mixed": mixed,
    "head-low-acceptance": low_acceptance,
}


def written(page: Path) -> str:
    """The page with its tables made anew."""
    results = "benchmarks/results" if page.parent == ROOT else "../benchmarks/results"
    return PLACE.sub(
        lambda match: match[1] + TABLES[match[2]]().replace("RESULTS", results) + match[4], page.read_text()
    )


def main(given: list[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(given)
    old = [page for page in PAGES if written(page) != page.read_text()]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
        if not args.check:
            page.write_text(written(page))
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
