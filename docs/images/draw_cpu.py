"""Draws what was measured on a CPU: throughput beside transformers', and of every architecture. Run: `make figures`."""

from __future__ import annotations

import json
import statistics
from typing import Any

import matplotlib.pyplot as plt
from draw import DARK, LIGHT, RESULTS, Theme, save
from matplotlib.axes import Axes

ARMS = {  # of the map, in order
    "plain": "#8c959f",
    "baseline": "#a475f9",
    "pd": "#d29922",
    "pdv": "#3fb950",
    "unified": "#4493f8",
    "table": "#f778ba",
    "auto": "#f85149",
}
STRENGTH = {"2": 0.55, "4": 0.8, "8": 1.0, "": 1.0}  # longer drafts, stronger bars


def _bars(axes: Axes, theme: Theme) -> None:
    """Bars on the page, without a frame."""
    axes.set_facecolor(theme.page)
    axes.tick_params(colors=theme.soft, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.line)


def cpu(theme: Theme) -> None:
    """Bars of benchmarks/results/cpu_vs_transformers.json: medians, with every round as a dot."""
    report = json.loads((RESULTS / "cpu_vs_transformers.json").read_text())
    arms = {name: rounds for name, rounds in report["tokens_per_second"].items() if "fp32" not in name}
    figure, axes = plt.subplots(figsize=(9, 3.4), facecolor=theme.page)
    for place, (name, rounds) in enumerate(arms.items()):
        colour = theme.gone if "transformers" in name else theme.draft if "ngram" in name else theme.verify
        middle = statistics.median(rounds)
        axes.barh(place, middle, color=colour, height=0.62, alpha=0.85)
        axes.plot(rounds, [place] * len(rounds), "|", color=theme.ink, markersize=9)
        axes.text(max(rounds) + 2, place, f"{middle:.0f}", va="center", color=theme.ink, fontsize=10)
    axes.set_yticks(range(len(arms)), list(arms), color=theme.ink, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (more is better)", color=theme.soft)
    axes.set_title(f"SmolLM2-135M on {report['threads']} cores of a {report['cpu']}", color=theme.soft, fontsize=10)
    _bars(axes, theme)
    figure.tight_layout()
    save(axes, "cpu", theme)


def over_plain(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """tokens/s of each arm over plain's, round by round, of the runs at one concurrency."""
    rates = {(run["arm"], run["round"]): run["tokens_per_second"] for run in runs}
    found: dict[str, list[float]] = {}
    for arm, index in sorted(rates, key=_place):
        found.setdefault(arm, []).append(rates[arm, index] / rates["plain", index])
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """tokens/s of each arm at one concurrency: the median of its rounds, as in the table of docs/cpu.md."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run["arm"], []).append(run["tokens_per_second"])
    return {arm: statistics.median(each) for arm, each in rates.items()}


def _place(key: tuple[str, int]) -> tuple[int, int, int]:
    kind, _, length = key[0].partition(":")
    return list(ARMS).index(kind), int(length or 0), key[1]


def architectures(theme: Theme) -> None:
    """Bars of benchmarks/results/cpu-map-auto.json: medians over plain's, a panel for each level, rounds as ticks."""
    report = json.loads((RESULTS / "cpu-map-auto.json").read_text())
    levels: dict[int, list[dict[str, Any]]] = {}
    for run in report["runs"]:
        levels.setdefault(run["concurrency"], []).append(run)
    arms = list(over_plain(report["runs"]))
    figure, [row] = plt.subplots(
        1,
        len(levels),
        figsize=(3.2 * len(levels), 0.36 * len(arms) + 1.3),
        squeeze=False,
        sharey=True,
        facecolor=theme.page,
    )
    for axes, (level, runs) in zip(row, levels.items(), strict=True):
        speeds = medians(runs)
        shown = {arm: speed / speeds["plain"] for arm, speed in speeds.items()}
        best = max((arm for arm in arms if arm not in ("auto", "table")), key=shown.__getitem__)
        for place, (arm, each) in enumerate(over_plain(runs).items()):
            kind, _, length = arm.partition(":")
            axes.barh(place, shown[arm], color=ARMS[kind], alpha=STRENGTH[length], height=0.66)
            axes.plot(each, [place] * len(each), "|", color=theme.ink, markersize=7)
            text = f"{shown[arm]:.2f}" + ("  best" if arm == best else "")
            axes.text(max(*each, shown[arm]) + 0.03, place, text, va="center", color=theme.ink, fontsize=8)
        axes.axvline(1.0, color=theme.soft, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 1.25 * max(shown.values()) + 0.1)
        axes.set_title(f"{level} at once, plain {speeds['plain']:.0f} tokens/s", color=theme.ink, fontsize=9)
        _bars(axes, theme)
        axes.set_yticks(range(len(arms)), [arm.replace(":", ", L = ") for arm in arms])
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="y", labelcolor=theme.ink)
    row[0].invert_yaxis()
    figure.supxlabel("tokens/s over plain decoding's", color=theme.soft, fontsize=9)
    title = f"{report['model']}, {report['draft']} drafts, {report['cpu']}, {report['threads']} threads"
    figure.suptitle(title, color=theme.soft, fontsize=9)
    figure.tight_layout()
    save(row[0], "cpu-map-auto", theme)


if __name__ == "__main__":
    for style in (LIGHT, DARK):
        cpu(style)
        architectures(style)
