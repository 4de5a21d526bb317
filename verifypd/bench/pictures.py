"""Charts of a report as PNGs. Knows charts and matplotlib, an extra that is imported to draw."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.bench.charts import Chart, Heatmap, Series
from verifypd.bench.labels import Sizes, placed
from verifypd.bench.plots import INK, PALETTE, SOFT, dress, mark_powers
from verifypd.bench.statistics import FASTER, NONE, SLOWER, UNKNOWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 6.4, 4.6  # inches of a chart alone, and beside others
LETTER = 4.8  # points of one
KEY = 26.0  # points of a legend's entry without its name
SAID = {
    FASTER: "Every arm is certainly faster.",
    SLOWER: "Every arm is certainly slower.",
    NONE: "No cell is a certain difference.",
    UNKNOWN: "There is one seed, so nothing is judged.",
}  # where all cells of a heatmap have one word
SHAPES = "os^DvPX*"  # of points, so that lines over each other are told apart
SIZES = Sizes(LETTER, line=9.0, dot=3.5)  # points


def draw_chart(file: Path, parts: Sequence[Chart], title: str = "", note: str = "") -> None:
    """One chart, or some side by side; their notes and `note` stand below."""
    plt = _matplotlib()
    most = max((len(part.groups) * len(part.series) for part in parts if part.kind == "bars"), default=1)
    names = max((len(part.groups) for part in parts), default=1)
    wide = max(WIDE, 1.05 * names, 0.2 * most) if len(parts) == 1 else max(NARROW, 0.12 * most) * len(parts)
    figure, axes = plt.subplots(1, len(parts), figsize=(wide, 4.1), squeeze=False, facecolor="white")
    if title:
        figure.suptitle(title, color=SOFT, fontsize=9)
    for axis, part in zip(axes[0], parts, strict=True):
        dress(axis)
        room = 72 * (wide / len(parts) - 0.8)
        _bar_groups(axis, part, room) if part.groups else _curves(axis, part)
        axis.set(xlabel=part.x, ylabel=part.y)
        axis.set_axisbelow(True)
        _heights(axis, part)
        _head(axis, part, room)
    _below(figure, " ".join(dict.fromkeys(filter(None, (*(part.note for part in parts), f"[{note}]" if note else "")))))
    for axis, part in zip(axes[0], parts, strict=True):
        _label_points(axis, part)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _matplotlib() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _heights(axis: Axes, part: Chart) -> None:
    """An axis from 0, or of powers, with room above the highest."""
    from matplotlib.ticker import MaxNLocator

    ys = [y for each in part.series for y in (*each.ys, *each.highs) if not math.isnan(y)]
    if part.log_y:
        axis.set_yscale("log")
        axis.set_ylim(0.7 * min(ys), 1.5 * max(ys))
        mark_powers(axis.yaxis)
    else:
        if part.kind == "stacked":
            axis.yaxis.set_major_locator(MaxNLocator(integer=all(y == int(y) for y in ys)))
            ys = [sum(column) for column in zip(*(each.ys for each in part.series), strict=True)]
        highest = max(ys, default=1.0) or 1.0
        marked = any(any(each.marks) for each in part.series)
        axis.set_ylim(0, 1.02 if part.y == "share" and highest <= 1.01 and not marked else 1.08 * highest)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _head(axis: Axes, part: Chart, room: float) -> None:
    """Title, and below it the legend: outside of the axes, where it covers nothing. room: points across."""
    names = [len(each.name) for each in part.series]
    lines = math.ceil(sum(KEY + LETTER * each for each in names) / room)
    columns = math.ceil(len(names) / lines)
    axis.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, fontsize=7.5, frameon=False,
                labelcolor=SOFT, borderaxespad=0.2, columnspacing=1.2, handlelength=1.4)  # fmt: skip
    axis.set_title(part.title, color=INK, fontsize=10, pad=8 + 13 * lines, loc="left")


def _below(figure: Figure, note: str) -> None:
    lines = textwrap.wrap(note, int(17 * figure.get_figwidth()))
    figure.tight_layout(rect=(0, (0.06 + 0.13 * len(lines)) / figure.get_figheight() if lines else 0, 1, 1))
    figure.text(0.01, 0.015, "\n".join(lines), color=SOFT, fontsize=7)


def _bar_groups(axis: Axes, chart: Chart, room: float) -> None:
    axis.grid(visible=False, axis="x")
    bottoms = [0.0] * len(chart.groups)
    width = 0.6 if chart.kind == "stacked" else 0.8 / max(1, len(chart.series))
    for i, series in enumerate(chart.series):
        colour = _colour(i, series)
        if chart.kind == "stacked":
            axis.bar(series.xs, series.ys, width, bottom=bottoms, color=colour, label=series.name)
            bottoms = [bottom + y for bottom, y in zip(bottoms, series.ys, strict=True)]
            continue
        places = [x + width * (i + 0.5) - 0.4 for x in series.xs]
        tops = [max(y, high) for y, high in zip(series.ys, series.highs or series.ys, strict=True)]
        if series.highs:
            more = [top - y for y, top in zip(series.ys, tops, strict=True)]
            axis.bar(places, more, 0.92 * width, bottom=series.ys, color=colour, alpha=0.35)
        if chart.log_y:  # has no ground for bars to stand on
            axis.plot(places, series.ys, "o", color=colour, markersize=5, label=series.name)
        else:
            known = [0.0 if math.isnan(y) else y for y in series.ys]
            axis.bar(places, known, 0.92 * width, color=colour, label=series.name)
        for x, y, top, mark in zip(places, series.ys, tops, series.marks or [""] * len(places), strict=True):
            if math.isnan(y):
                axis.text(x, 0.0, "–", color=SOFT, fontsize=8, ha="center", va="bottom",
                          transform=axis.get_xaxis_transform())  # fmt: skip
            elif mark:
                axis.text(x, top, mark, color=INK, fontsize=9, ha="center", va="bottom")
    letters = max(6, int(room / len(chart.groups) / LETTER) - 1)
    wrapped = (textwrap.wrap(name.replace(":", ": "), letters, break_long_words=False) for name in chart.groups)
    names = ["\n".join(lines) for lines in wrapped]
    axis.set_xticks(range(len(names)), names, fontsize=8)


def _curves(axis: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, series in enumerate(chart.series):
        marker = SHAPES[i % len(SHAPES)] if len(series.xs) <= 16 else ""
        line, colour = "none" if chart.kind == "points" else "solid", _colour(i, series)
        axis.plot(series.xs, series.ys, ls=line, color=colour, marker=marker, markersize=5, label=series.name)
    xs = [x for each in chart.series for x in each.xs]
    if chart.log_x:
        axis.set_xscale("log")
        axis.set_xlim(0.9 * min(xs), 1.1 * max(xs))
        mark_powers(axis.xaxis)
    else:
        places = all(x == int(x) and x <= 16 for x in xs)
        axis.set_xlim((0.5, max(xs) + 0.5) if places else (0, 1.08 * max(xs, default=1.0)))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _label_points(axis: Axes, chart: Chart) -> None:
    """Labels beside their points, in the colour of their line where they are of one."""
    labelled = [(_colour(i, each), each) for i, each in enumerate(chart.series) if each.labels]
    scale = 72 / axis.figure.dpi
    lines = [
        [(scale * x, scale * y) for x, y in axis.transData.transform(list(zip(each.xs, each.ys, strict=True)))]
        for _, each in labelled
    ]
    inside = axis.get_window_extent()
    frame = (scale * inside.x0, scale * inside.y0, scale * inside.x1, scale * inside.y1)
    points = [point for _, each in labelled for point in zip(each.xs, each.ys, strict=True)]
    for label in placed(lines, [each.labels for _, each in labelled], frame, SIZES, chart.kind == "lines"):
        ink = SOFT if label.series is None else labelled[label.series][0]
        place = (label.right, label.up)
        axis.annotate(label.text, points[label.of], place, textcoords="offset points", fontsize=7, color=ink)


def draw_heatmap(file: Path, chart: Heatmap, note: str = "") -> None:
    """Improvements in per cent, coloured to both sides of none by their logarithms; `note` stands below."""
    plt = _matplotlib()
    shares = [[float("nan") if v is None else math.log(v) for v in line] for line in chart.values]
    far = max((abs(v) for line in shares for v in line if v == v), default=0.0) or 1.0
    words = {word for line in chart.words for word in line if word}
    common = words.pop() if len(words) == 1 else ""  # said once, below
    letters = max(len(part) for row in chart.rows for part in row.split("\n"))
    size = (0.5 + 0.075 * letters + max(0.95 * len(chart.columns), 3.2), 1.2 + 0.42 * len(chart.rows))
    figure, axis = plt.subplots(figsize=size, facecolor="white")
    axis.imshow(shares, cmap="RdBu", vmin=-1.25 * far, vmax=1.25 * far, aspect="auto")
    axis.set_xticks(range(len(chart.columns)), chart.columns, fontsize=8)
    axis.set_yticks(range(len(chart.rows)), chart.rows, fontsize=8)
    axis.tick_params(length=0, colors=SOFT)
    for side in axis.spines.values():
        side.set_visible(False)
    for i, (values, line) in enumerate(zip(chart.values, shares, strict=True)):
        for k, (value, share) in enumerate(zip(values, line, strict=True)):
            text = "–" if value is None else f"{100 * (value - 1):+,.1f} %".replace("-", "−")
            text += chart.marks[i][k] if chart.marks else ""
            if value is not None and not common:
                text += f"\n{chart.words[i][k]}"
            ink = "white" if abs(share) > 0.75 * far else INK
            axis.text(k, i, text, ha="center", va="center", fontsize=7.5, color=ink)
    axis.set_title(chart.title, color=INK, fontsize=10, loc="left", pad=8)
    _below(figure, " ".join(filter(None, (chart.note, SAID.get(common, ""), f"[{note}]" if note else ""))))
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _colour(place: int, series: Series) -> str:
    return PALETTE[(place if series.colour is None else series.colour) % len(PALETTE)]
