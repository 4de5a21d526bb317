"""Draws what was measured on a GPU: throughput, first tokens and tails beside vLLM."""

from __future__ import annotations

import json
from typing import Any

import matplotlib.pyplot as plt
from draw import DARK, LIGHT, RESULTS, Theme, save
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

LEVELS = ("1", "8", "32", "128")
LABELS = {"ours": "Verify-PD, head", "vllm": "vLLM, head (the better of two runs)"}
TAILS = (
    ("tpot_ms", "time per token", {"p50": "p50", "p95": "p95"}, 1),
    ("gap_ms", "gaps between outputs", {"p99": "p99", "max": "longest"}, 0),
    ("ttft_ms", "first token", {"p50": "p50", "p95": "p95", "p99": "p99"}, 0),
)
MORE_IS_BETTER = ("tok_s", "good_share")
WIDTH = 0.4  # of a bar; groups are 1 apart

Values = dict[str, list[float]]  # of each arm, one for each group


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"bench-serve-h200-{name}.json").read_text())["scenarios"])


def _figures(scenario: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of both servers; each of vLLM's is the better of its two runs."""
    found = {arm: each["figures"] for arm, each in scenario["arms"].items()}
    theirs = {
        name: (max if name in MORE_IS_BETTER else min)(value, found["vllm again"][name])
        for name, value in found["vllm"].items()
    }
    return {"ours": found["ours"], "vllm": theirs}


def _certain(scenario: dict[str, Any], *figures: str) -> list[bool]:
    """Of which figures the interval of ours over vLLM's leaves 1 out; some have none."""
    compared = scenario["compared"]["ours"]
    return [compared.get(each, {}).get("verdict") in ("faster", "slower") for each in figures]


def _panel(
    axes: Axes, theme: Theme, title: str, names: list[str], values: Values, certain: list[bool], digits: int = 0
) -> None:
    """Bars side by side, each group scaled to its highest: what matters is who is ahead in each."""
    for index, (arm, colour) in enumerate({"ours": theme.verify, "vllm": theme.draft}.items()):
        for place, value in enumerate(values[arm]):
            x, height = place + (index - 0.5) * (WIDTH + 0.04), value / max(values[each][place] for each in values)
            axes.bar(x, height, WIDTH, color=colour, alpha=0.85, label=None if place else LABELS[arm])
            text = f"{value:,.{digits}f}" + (" *" if arm == "ours" and certain[place] else "")
            axes.text(x, height + 0.015, text, ha="center", va="bottom", color=theme.ink, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.12)
    axes.set_yticks([])
    axes.set_facecolor(theme.page)
    axes.set_title(title, color=theme.soft, fontsize=10)
    axes.tick_params(colors=theme.soft, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.line)


def heads(theme: Theme) -> None:
    """Ours and vLLM's, with a head: the closed loop, first tokens of its crowd, and mixed traffic."""
    closed = _read("closed-384")
    busy = _read("mixed")["mixed poisson 16/s"]
    mixed = _figures(busy)
    figure = plt.figure(figsize=(10.4, 6.6), facecolor=theme.page)
    grid = figure.add_gridspec(2, 12, wspace=0.8, hspace=0.42, left=0.02, right=0.98, top=0.92, bottom=0.11)
    places = (grid[0, :7], grid[0, 7:10], grid[0, 10:], grid[1, :4], grid[1, 4:8], grid[1, 8:])
    speeds, late, kept, *tails = (figure.add_subplot(place) for place in places)

    found = {level: _figures(closed[f"fixed 384x256 closed {level}"]) for level in LEVELS}
    rates = {arm: [each[arm]["tok_s"] for each in found.values()] for arm in LABELS}
    sure = [each for level in LEVELS for each in _certain(closed[f"fixed 384x256 closed {level}"], "tok_s")]
    _panel(speeds, theme, "closed loop: tokens/s (more is better)\nby clients", list(found), rates, sure)
    crowd, compared = found["128"], closed["fixed 384x256 closed 128"]
    first = {arm: [crowd[arm][f"ttft_ms_{share}"] for share in ("p50", "p95")] for arm in LABELS}
    sure = _certain(compared, "ttft_ms_p50", "ttft_ms_p95")
    _panel(late, theme, "128 clients: first token, ms\n(less is better)", ["p50", "p95"], first, sure)
    good = {arm: [100 * crowd[arm]["good_share"]] for arm in LABELS}
    sure = _certain(compared, "good_share")
    _panel(kept, theme, "within targets, %\n(more is better)", ["500 ms, then\n15 ms a token"], good, sure)

    for axes, (figure_name, title, shares, digits) in zip(tails, TAILS, strict=True):
        values = {arm: [each[f"{figure_name}_{share}"] for share in shares] for arm, each in mixed.items()}
        _panel(
            axes,
            theme,
            f"mixed traffic, 16 requests/s:\n{title}, ms (less is better)",
            list(shares.values()),
            values,
            _certain(busy, *(f"{figure_name}_{share}" for share in shares)),
            digits,
        )
    handles, labels = speeds.get_legend_handles_labels()
    handles.append(Line2D([], [], linestyle=""))
    labels.append("* certain: the 95 % interval of the ratio to its first run leaves 1 out")
    figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.016),
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
    )
    said = "Llama-2-7B's shape with random weights; drafts accepted with probability 0.8"
    figure.text(0.5, 0.008, said, ha="center", color=theme.soft, fontsize=8)
    save(speeds, "beside-vllm", theme)


if __name__ == "__main__":
    for style in (LIGHT, DARK):
        heads(style)
