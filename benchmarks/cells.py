"""What tables of results are written with: a result by its name, a markdown table, words, a source, ratios, tails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verifypd.bench.order import by_load
from verifypd.bench.results import number
from verifypd.bench.statistics import FASTER, NONE, SLOWER

HERE = Path(__file__).resolve().parent
RESULTS, TEXTS = HERE / "results", HERE / "texts"
TAILS = ["TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "gap p99 (longest), ms"]
TAIL_RATIOS = ["× TTFT p95", "× TPOT p95", "× gap p99"]
TAIL_FIGURES = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")


def read(name: str) -> dict[str, Any]:
    """A result; scenarios of a bench by their loads."""
    found = dict(json.loads((RESULTS / f"{name}.json").read_text()))
    return found | {"scenarios": by_load(found["scenarios"], found["grid"])} if "grid" in found else found


def scenarios(name: str) -> dict[int, dict[str, Any]]:
    """Those of a result by their clients or requests/s."""
    found = {re.findall(r"(?:closed |poisson |E )(\d+)", key)[0]: own for key, own in read(name)["scenarios"].items()}
    return {int(level): found[level] for level in sorted(found, key=int)}


def over_vllm(name: str, figure: str) -> dict[int, dict[str, Any]]:
    """A figure of ours over vLLM's, compared, by clients or requests/s."""
    return {level: own["compared"]["ours"][figure] for level, own in scenarios(name).items()}


def rows(header: list[str], lines: list[list[str]]) -> str:
    """A markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines]) + "\n"


def text(name: str, **figures: str) -> str:
    """Words of `texts/` with figures in them."""
    return (TEXTS / f"{name}.md").read_text().format(**figures)


def source(*names: str) -> str:
    """Where a table comes from."""
    commits = {name: read(name)["commit"][:7] for name in names}
    links = ", ".join(f"[`{name}.json`](RESULTS/{name}.json) ({commit})" for name, commit in commits.items())
    return f"\nFrom {links}.\n"


def interval(found: dict[str, float]) -> str:
    """A ratio with its interval."""
    return f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def listed(values: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = values
    return f"{', '.join(first)} and {last}" if first else last


def quotients(found: dict[int, dict[str, Any]]) -> str:
    """Of comparisons by load: `1.15, 1.05 and 1.09`."""
    return listed(f"{each['ratio']:.2f}" for each in found.values())


def certain(each: dict[str, Any]) -> bool:
    """Whether a comparison's interval leaves 1 out."""
    return each["verdict"] in (FASTER, SLOWER)


def where_certain(found: dict[int, dict[str, Any]]) -> str:
    """Of comparisons by load: `certain`, `not certain`, or `certain at` some."""
    sure = [str(level) for level, each in found.items() if certain(each)]
    if len(sure) == len(found):
        return "certain"
    return f"certain at {listed(sure)}" if sure else "not certain"


def which_certain(found: dict[int, dict[str, Any]]) -> str:
    """The same as a sentence."""
    sure = [f"{each['ratio']:.2f}" for each in found.values() if certain(each)]
    if len(sure) == len(found):
        return "All are certain: no 95 % interval contains 1"
    if not sure:
        return "None is certain: every 95 % interval contains 1"
    verb = "is" if len(sure) == 1 else "are"
    others = "interval contains" if len(found) - len(sure) == 1 else "intervals contain"
    return f"Only {listed(sure)} {verb} certain: the other 95 % {others} 1"


def ratios(compared: dict[str, Any] | None, *figures: str) -> list[str]:
    """Those of an arm to the reference; nothing for the reference itself."""
    return [judged(compared[name]).removesuffix(f" {NONE}") if compared else "" for name in figures]


def judged(each: dict[str, Any]) -> str:
    """`1.12 (1.05–1.19) faster`: an end of 1.00 has a digit more, which tells on what side of 1 it lies."""
    low, high = (f"{each[end]:.3f}" if number(each[end]) == "1.00" else number(each[end]) for end in ("low", "high"))
    return f"{number(each['ratio'])} ({low}–{high}) {each['verdict']}"


def tails(figures: dict[str, float]) -> list[str]:
    """As TAILS has them."""
    return [
        f"{figures['ttft_ms_p50']:.0f} / {figures['ttft_ms_p95']:.0f}",
        f"{figures['tpot_ms_p50']:.1f} / {figures['tpot_ms_p95']:.1f}",
        f"{figures['gap_ms_p99']:.0f} ({figures['gap_ms_max']:.0f})",
    ]
