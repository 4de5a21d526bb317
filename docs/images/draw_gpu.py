"""Draws what was measured on a GPU: throughput and tails beside vLLM."""

from __future__ import annotations

import json
from typing import Any

import matplotlib.pyplot as plt
from draw import DARK, LIGHT, RESULTS, Theme, save
from matplotlib.axes import Axes

LEVELS = ("1", "8", "32", "128")
LABELS = {"ours": "Verify-PD, head", "vllm": "vLLM, head"}
TWICE = {"ours": "", "vllm": " (the better of two runs)"}
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


def heads(theme: Theme) -> None:
    """Ours and vLLM's, with a head; 32 and 128 requests are of a run with memory for all of them."""
    few, many, mixed = (
        _read(f"bench-serve-h200-{load}.json")["scenarios"] for load in ("closed-384", "closed-45gb", "mixed")
    )
    closed = {**few, **many}
    figure, grid = plt.subplots(2, 2, figsize=(10, 6), facecolor=theme.page)
    axes = grid.flatten()
    colours = {"ours": theme.verify, "vllm": theme.draft}
    arms = {
        LABELS[arm]: (
            colour,
            [closed[f"fixed 384x256 closed {level}"]["arms"][arm]["figures"]["tok_s"] for level in LEVELS],
        )
        for arm, colour in colours.items()
    }
    _groups(axes[0], theme, LEVELS, arms, 0)
    _plain(axes[0], theme, "tokens/s by requests at once (more is better)")
    runs = {arm: each["figures"] for arm, each in mixed["mixed poisson 16/s"]["arms"].items()}
    best = {name: min(value, runs["vllm again"][name]) for name, value in runs["vllm"].items()}
    found = {"ours": runs["ours"], "vllm": best}
    for where, name, shares, title in (
        (axes[1], "tpot_ms", ("p50", "p95"), "mixed traffic, 16 requests/s: time per token, ms (less is better)"),
        (axes[2], "gap_ms", ("p99", "max"), "the same: gaps between outputs, ms (less is better)"),
        (axes[3], "ttft_ms", ("p50", "p95"), "the same: first token, ms (less is better)"),
    ):
        arms = {
            LABELS[arm] + TWICE[arm]: (colours[arm], [figures[f"{name}_{share}"] for share in shares])
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


if __name__ == "__main__":
    for style in (LIGHT, DARK):
        heads(style)
