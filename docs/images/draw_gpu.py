"""Draws what was measured on a GPU: throughput and tails beside vLLM, and the original system's protocols."""

from __future__ import annotations

import json
from typing import Any

import matplotlib.pyplot as plt
from draw import DARK, LIGHT, RESULTS, Theme, save
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

LEVELS, RATES = ("1", "8", "32", "128"), ("4", "8", "16")
LABELS = {"ours": "Verify-PD, head", "vllm": "vLLM, head"}
WIDTH = 0.26  # of a bar; groups are 1 apart


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / name).read_text()))


def _plain(axes: Axes, theme: Theme, title: str) -> None:
    axes.set_facecolor(theme.page)
    axes.set_title(title, color=theme.soft, fontsize=10)
    axes.tick_params(colors=theme.soft, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.line)
    axes.set_yticks([])


def _groups(
    axes: Axes,
    theme: Theme,
    names: tuple[str, ...],
    arms: dict[str, tuple[str, list[float]]],
    digits: int,
    width: float = WIDTH,
) -> None:
    """Bars side by side, each group scaled to its highest: what matters is who is ahead in each."""
    highest = [max(values[place] for _, values in arms.values()) for place in range(len(names))]
    for index, (label, (colour, values)) in enumerate(arms.items()):
        for place, value in enumerate(values):
            x = place + (index - (len(arms) - 1) / 2) * (width + 0.02)
            height = value / highest[place]
            axes.bar(x, height, width, color=colour, alpha=0.85, label=label if not place else None)
            turned = 90 if len(arms) > 3 else 0  # narrow bars: their numbers would touch
            axes.text(
                x,
                height + 0.015,
                f"{value:,.{digits}f}",
                ha="center",
                color=theme.ink,
                fontsize=7,
                rotation=turned,
                va="bottom",
            )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.2 if len(arms) > 3 else 1.12)


def h200(theme: Theme) -> None:
    """benchmarks/results/h200.json beside vllm-h200.json."""
    ours, theirs = _read("h200.json")["figures"], _read("vllm-h200.json")
    closed, mixed = theirs["closed"]["tok_s"], theirs["mixed"]
    figure, grid = plt.subplots(2, 2, figsize=(10, 6), facecolor=theme.page)
    axes = grid.flatten()
    best = [max(arm[level] for arm in closed.values()) for level in LEVELS]
    arms = {
        "auto": (theme.verify, [ours[f"tok_s_{level}"] for level in LEVELS]),
        "plain": (theme.prefill, [ours[f"plain_tok_s_{level}"] for level in LEVELS]),
        "vLLM, its better arm": (theme.gone, best),
    }
    _groups(axes[0], theme, LEVELS, arms, 0)
    _plain(axes[0], theme, "tokens/s by requests at once (more is better)")

    def better(kind: str, name: str) -> list[float]:
        """Of the settings that were run: no single one of them has all of these."""
        arms = [arm for label, arm in mixed.items() if label.startswith(kind)]
        return [min(arm[rate][name] for arm in arms if rate in arm) for rate in RATES]

    for where, name, title in (
        (axes[1], "tpot_ms_p95", "mixed traffic by requests/s: TPOT p95, ms (less is better)"),
        (axes[2], "gap_ms_p99", "mixed traffic by requests/s: gap p99, ms (less is better)"),
        (axes[3], "ttft_ms_p95", "mixed traffic by requests/s: TTFT p95, ms (less is better)"),
    ):
        arms = {
            "auto": (theme.verify, [ours[f"mixed_{rate}_{name}"] for rate in RATES]),
            "vLLM plain": (theme.gone, better("plain", name)),
            "vLLM speculative": (theme.draft, better("speculative", name)),
        }
        _groups(where, theme, RATES, arms, 0 if name.startswith("ttft") else 1)
        _plain(where, theme, title)
    for where in axes:
        where.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=8, labelcolor=theme.ink
        )
    figure.tight_layout()
    save(axes[0], "h200", theme)


def heads(theme: Theme) -> None:
    """benchmarks/results/bench-serve-h200-{closed,mixed}.json: our server and vLLM's, both with a head, in one run."""
    closed, mixed = (_read(f"bench-serve-h200-{load}.json")["scenarios"] for load in ("closed", "mixed"))
    figure, grid = plt.subplots(2, 2, figsize=(10, 6), facecolor=theme.page)
    axes = grid.flatten()
    colours = {"ours": theme.verify, "vllm": theme.draft}
    arms = {
        LABELS[arm]: (
            colour,
            [closed[f"fixed 128x128 closed {level}"]["arms"][arm]["figures"]["tok_s"] for level in LEVELS],
        )
        for arm, colour in colours.items()
    }
    _groups(axes[0], theme, LEVELS, arms, 0)
    _plain(axes[0], theme, "tokens/s by requests at once (more is better)")
    found = {arm: mixed["mixed poisson 16/s"]["arms"][arm]["figures"] for arm in colours}
    for where, name, shares, title in (
        (axes[1], "tpot_ms", ("p50", "p95"), "mixed traffic, 16 requests/s: time per token, ms (less is better)"),
        (axes[2], "gap_ms", ("p99", "max"), "the same: gaps between outputs, ms (less is better)"),
        (axes[3], "ttft_ms", ("p50", "p95"), "the same: first token, ms (less is better)"),
    ):
        arms = {
            LABELS[arm]: (colours[arm], [figures[f"{name}_{share}"] for share in shares])
            for arm, figures in found.items()
        }
        _groups(
            where, theme, tuple(share.replace("max", "longest") for share in shares), arms, 1 if "tpot" in name else 0
        )
        _plain(where, theme, title)
    for where in axes:
        where.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4, frameon=False, fontsize=8, labelcolor=theme.ink
        )
    figure.tight_layout()
    save(axes[0], "beside-vllm", theme)


def protocols(theme: Theme) -> None:
    """benchmarks/results/protocols-h200.json: P95 of every architecture on every load, coloured against `plain`."""
    report = _read("protocols-h200.json")
    loads = [
        (f"{pair.split(':')[1]}, {load}", arms)
        for pair, found in report["pairs"].items()
        for load, arms in found.items()
    ]
    names = list(loads[0][1])
    ratios = [[arms[name]["p95_s"] / arms["plain"]["p95_s"] for name in names] for _, arms in loads]
    colours = LinearSegmentedColormap.from_list("ratio", [theme.verify, theme.page, theme.draft])
    figure, axes = plt.subplots(figsize=(9, 4.2), facecolor=theme.page)
    axes.imshow(
        [[min(max(r, 0.6), 1.4) for r in row] for row in ratios], cmap=colours, vmin=0.6, vmax=1.4, aspect="auto"
    )
    for y, (_, arms) in enumerate(loads):
        for x, name in enumerate(names):
            value = arms[name]["p95_s"]
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=theme.ink, fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(loads)), [label for label, _ in loads])
    axes.tick_params(colors=theme.ink, length=0, labelsize=9)
    axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("P95 of a request, s; green is faster than plain, orange slower", color=theme.soft, fontsize=9)
    figure.tight_layout()
    save(axes, "protocols", theme)


if __name__ == "__main__":
    for style in (LIGHT, DARK):
        h200(style)
        heads(style)
        protocols(style)
