"""What tables of results are written with: a result by its name, a markdown table, words, a source, ratios, tails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifypd.bench.results import ratio

HERE = Path(__file__).resolve().parent
RESULTS, TEXTS = HERE / "results", HERE / "texts"
TAILS = ["TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "gap p99 (longest), ms"]
TAIL_RATIOS = ["× TTFT p95", "× TPOT p95", "× gap p99"]
TAIL_FIGURES = ("ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99")


def read(name: str) -> dict[str, Any]:
    """A result."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


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


def ratios(compared: dict[str, Any] | None, *figures: str) -> list[str]:
    """Those of an arm to the reference; nothing for the reference itself."""
    return [ratio(compared[name]).removesuffix(" no difference") if compared else "" for name in figures]


def tails(figures: dict[str, float]) -> list[str]:
    """As TAILS has them."""
    return [
        f"{figures['ttft_ms_p50']:.0f} / {figures['ttft_ms_p95']:.0f}",
        f"{figures['tpot_ms_p50']:.1f} / {figures['tpot_ms_p95']:.1f}",
        f"{figures['gap_ms_p99']:.0f} ({figures['gap_ms_max']:.0f})",
    ]
