"""Pictures of what was measured. Knows numbers and matplotlib, which is an extra and imported only to draw."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.bench.charts import Chart, Heatmap, Series
from verifypd.control.cost import CostModel, Work
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from verifypd.control.observe import StepTiming
    from verifypd.engine.measure import Measured

KINDS = (".png", ".svg", ".pdf")
INK, SOFT, LINE = "#1f2328", "#59636e", "#d1d9e0"
BLUE, AMBER, GREEN, VIOLET = "#2563c9", "#b35900", "#1a7f37", "#8250df"
PALETTE = (BLUE, AMBER, GREEN, VIOLET, "#bf3989", "#0e7490", "#8b939c", "#a16207")  # in the page's order


def require(file: str) -> None:
    """Refuse what could not be drawn: an unknown kind of file, a folder that is not there, no matplotlib."""
    path = Path(file)
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--plot {file}: the name must end in {', '.join(KINDS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'verifypd[bench]'") from None


def draw_costs(
    file: str, cost: CostModel, measured: Measured, setup: dict[str, Any], alphas: dict[str, list[float | None]]
) -> None:
    """Passes by rows, draft loops by steps, and the acceptance that pays: dots measured, lines predicted."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    timings = list(measured.timings)
    parts: list[Callable[[Axes], None]] = [lambda axis: _passes(axis, cost, timings)]
    if any(timing.draft_seconds for timing in timings):
        parts.append(lambda axis: _loops(axis, cost, timings))
    if alphas:
        parts.append(lambda axis: _break_even(axis, alphas))
    figure, axes = plt.subplots(1, len(parts), figsize=(4.8 * len(parts), 4.1), squeeze=False, facecolor="white")
    for axis, part in zip(axes[0], parts, strict=True):
        _dress(axis)
        part(axis)
    model = setup["model"]
    title = f"{model['family']}, {model['parameters'] / 1e6:.0f} M, {model['dtype']} on {setup['device']}"
    figure.suptitle(title, color=SOFT, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _passes(axis: Axes, cost: CostModel, timings: list[StepTiming]) -> None:
    """ms of a verifier pass against its rows."""
    from matplotlib.ticker import LogLocator, NullLocator

    decode = [t for t in timings if not t.chunk_rows]
    contexts = sorted({_each(t) for t in decode})
    middle = (contexts[0] + contexts[-1]) / 2
    groups = (
        ("decode, short context", [t for t in decode if _each(t) <= middle], BLUE, "o"),
        ("decode, long context", [t for t in decode if _each(t) > middle], VIOLET, "s"),
        ("prompt chunk", [t for t in timings if t.chunk_rows and not t.verify_requests], AMBER, "^"),
        ("decode and chunk", [t for t in timings if t.chunk_rows and t.verify_requests], GREEN, "D"),
    )
    for label, members, colour, mark in groups:
        if not members:
            continue
        axis.plot(
            [t.verify_rows for t in members],
            [t.verify_seconds * 1e3 for t in members],
            mark,
            color=colour,
            markersize=5,
            label=label,
        )
        for t in members:
            predicted = cost.pass_seconds(Work(t.verify_rows, t.verify_context, t.chunk_rows, t.chunk_context)) * 1e3
            axis.plot([t.verify_rows] * 2, [t.verify_seconds * 1e3, predicted], color=colour, linewidth=0.8, alpha=0.6)
            axis.plot(t.verify_rows, predicted, "_", color=colour, markersize=9)
    most = max(t.verify_rows for t in timings)
    rows = [most ** (i / 60) for i in range(61)]
    line = [cost.pass_seconds(Work(r, contexts[0])) * 1e3 for r in rows]
    axis.plot(rows, line, color=INK, linewidth=1.2, label="predicted, one short context", zorder=1)
    knee = cost.coefficients.knee
    if 1.0 < knee < most:
        axis.axvline(knee, color=SOFT, linewidth=0.8, linestyle=":")
        axis.text(knee, axis.get_ylim()[0], " knee", color=SOFT, fontsize=8, va="bottom")
    axis.set(xscale="log", yscale="log", xlabel="rows in the pass", ylabel="ms")
    for part in (axis.xaxis, axis.yaxis):
        part.set_major_locator(LogLocator(subs=(1, 2, 5)))
        part.set_major_formatter("{x:g}")
        part.set_minor_locator(NullLocator())
    axis.set_title("verifier pass (bar: predicted)", color=INK, fontsize=10)
    _legend(axis)


def _loops(axis: Axes, cost: CostModel, timings: list[StepTiming]) -> None:
    """ms of a draft loop against its steps."""
    loops = [t for t in timings if t.draft_seconds]
    counts = sorted({t.draft_requests for t in loops})
    for count, colour in zip(counts, _shades(len(counts)), strict=True):
        members = sorted((t for t in loops if t.draft_requests == count), key=lambda t: t.draft_steps)
        axis.plot(
            [t.draft_steps for t in members],
            [t.draft_seconds * 1e3 for t in members],
            "o",
            color=colour,
            markersize=5,
            label=f"{count} request{'s' if count > 1 else ''}",
        )
        for t in members:
            predicted = cost.draft_seconds(t.draft_steps, t.draft_rows, t.draft_context) * 1e3
            axis.plot([t.draft_steps] * 2, [t.draft_seconds * 1e3, predicted], color=colour, linewidth=0.8, alpha=0.6)
            axis.plot(t.draft_steps, predicted, "_", color=colour, markersize=9)
    axis.set(xlabel="draft tokens", ylabel="ms")
    axis.set_ylim(0, 1.3e3 * max(t.draft_seconds for t in loops))
    axis.set_title("draft loop (bar: predicted)", color=INK, fontsize=10)
    _legend(axis)


def _break_even(axis: Axes, alphas: dict[str, list[float | None]]) -> None:
    """Least α that pays, against the draft length, for some numbers of requests."""
    for (count, values), colour in zip(alphas.items(), _shades(len(alphas)), strict=True):
        points = [(length, alpha) for length, alpha in enumerate(values, 1) if alpha is not None]
        label = f"{count} request{'s' if count != '1' else ''}"
        if not points:
            label += ": never"
        axis.plot(*zip(*points, strict=True) if points else ([], []), "o-", color=colour, markersize=4, label=label)
    axis.set(xlabel="draft length L", ylabel="acceptance α", ylim=(0, 1.02))
    axis.set_title("drafting pays above", color=INK, fontsize=10)
    _legend(axis)


# -- charts of a benchmark ---------------------------------------------------------------------------------------------


def draw_chart(file: Path, parts: Sequence[Chart], title: str = "", note: str = "") -> None:
    """One chart, or some side by side; `note` stands below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    wide = max(6.4, 1.3 * max((len(part.groups) for part in parts), default=1)) if len(parts) == 1 else 4.6 * len(parts)
    figure, axes = plt.subplots(1, len(parts), figsize=(wide, 3.9), squeeze=False, facecolor="white")
    for axis, part in zip(axes[0], parts, strict=True):
        _dress(axis)
        _bar_groups(axis, part) if part.groups else _curves(axis, part)
        axis.set(xlabel=part.x, ylabel=part.y)
        axis.set_title(part.title, color=INK, fontsize=10 if len(parts) == 1 else 8.5)
        axis.set_axisbelow(True)
        highest = max((y for each in part.series for y in (*each.ys, *each.highs)), default=1.0)
        if part.kind == "stacked":
            highest = max(sum(column) for column in zip(*(each.ys for each in part.series), strict=True))
        axis.set_ylim(0, (1.4 if part.groups else 1.2) * highest or 1.0)  # room for the legend
        _legend(axis, columns=3 if part.groups else 1)
    figure.suptitle(title, color=SOFT, fontsize=9)
    figure.tight_layout(rect=(0, 0.05 if note else 0, 1, 1))
    _below(figure, note)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _below(figure: Figure, note: str) -> None:
    if note:
        figure.text(
            0.01, 0.015, "\n".join(textwrap.wrap(note, int(17 * figure.get_figwidth()))), color=SOFT, fontsize=7
        )


def _bar_groups(axis: Axes, chart: Chart) -> None:
    if chart.kind == "stacked":
        bottoms = [0.0] * len(chart.groups)
        for i, series in enumerate(chart.series):
            axis.bar(series.xs, series.ys, 0.6, bottom=bottoms, color=_colour(i, series), label=series.name)
            bottoms = [bottom + y for bottom, y in zip(bottoms, series.ys, strict=True)]
        _name_groups(axis, chart)
        return
    width = 0.8 / max(1, len(chart.series))
    for i, series in enumerate(chart.series):
        colour = _colour(i, series)
        places = [x + width * (i + 0.5) - 0.4 for x in series.xs]
        if series.highs:
            axis.bar(places, series.highs, 0.92 * width, color=colour, alpha=0.35)
        axis.bar(places, series.ys, 0.92 * width, color=colour, label=series.name)
    _name_groups(axis, chart)


def _name_groups(axis: Axes, chart: Chart) -> None:
    names = [group.replace(", ", "\n", 1).replace(":", ":\n", 1) for group in chart.groups]
    long = max((len(line) for name in names for line in name.split("\n")), default=0) > 14
    turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if long else {}
    axis.set_xticks(range(len(names)), names, fontsize=7.5, **turned)


def _curves(axis: Axes, chart: Chart) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    for i, series in enumerate(chart.series):
        colour = _colour(i, series)
        axis.plot(series.xs, series.ys, color=colour, marker="o" if len(series.xs) <= 16 else "", label=series.name)
        for x, y, label in zip(series.xs, series.ys, series.labels, strict=False):
            axis.annotate(label, (x, y), (4, 4), textcoords="offset points", fontsize=7, color=SOFT)
    if chart.log_x:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_heatmap(file: Path, chart: Heatmap, note: str = "") -> None:
    """Improvements in per cent, coloured to both sides of none; `note` stands below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shares = [[float("nan") if v is None else 100 * (v - 1) for v in line] for line in chart.values]
    far = max((abs(v) for line in shares for v in line if v == v), default=0.0) or 1.0
    size = (2.4 + 1.3 * len(chart.columns), 1.4 + 0.6 * len(chart.rows))
    figure, axis = plt.subplots(figsize=size, facecolor="white")
    axis.imshow(shares, cmap="RdBu", vmin=-far, vmax=far, aspect="auto")
    axis.set_xticks(range(len(chart.columns)), chart.columns, rotation=20, ha="right", fontsize=8)
    axis.set_yticks(range(len(chart.rows)), chart.rows, fontsize=8)
    for i, line in enumerate(shares):
        for k, value in enumerate(line):
            ink = "white" if abs(value) > 0.6 * far else INK
            text = "–" if value != value else f"{value:+.1f} %\n{chart.words[i][k]}"
            axis.text(k, i, text, ha="center", va="center", fontsize=7.5, color=ink)
    figure.suptitle(chart.title, color=INK, fontsize=10)
    figure.tight_layout(rect=(0, 0.08 if note else 0, 1, 1))
    _below(figure, note)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _each(timing: StepTiming) -> float:
    return timing.verify_context / max(1, timing.verify_requests)


def _shades(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]


def _colour(place: int, series: Series) -> str:
    return PALETTE[(place if series.colour is None else series.colour) % len(PALETTE)]


def _dress(axis: Axes) -> None:
    axis.tick_params(colors=SOFT, labelsize=8)
    axis.grid(color=LINE, linewidth=0.5)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(LINE)
    axis.xaxis.label.set_color(SOFT)
    axis.yaxis.label.set_color(SOFT)


def _legend(axis: Axes, columns: int = 1) -> None:
    where: dict[str, Any] = {"loc": "upper left", "ncols": columns} if columns > 1 else {}
    axis.legend(fontsize=7.5, frameon=False, labelcolor=SOFT, **where)
