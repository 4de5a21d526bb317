"""Pictures of costs, and how all pictures look. Knows numbers and matplotlib, an extra that is imported to draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.bench.charts import log_ticks
from verifypd.control.cost import CostModel, Work
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

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
        dress(axis)
        part(axis)
    model = setup["model"]
    title = f"{model['family']}, {model['parameters'] / 1e6:.0f} M, {model['dtype']} on {setup['device']}"
    figure.suptitle(title, color=SOFT, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _passes(axis: Axes, cost: CostModel, timings: list[StepTiming]) -> None:
    """ms of a verifier pass against its rows."""
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
        mark_powers(part)
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


def _each(timing: StepTiming) -> float:
    return timing.verify_context / max(1, timing.verify_requests)


def _shades(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]


def dress(axis: Axes) -> None:
    """Quiet ticks, a light grid, no frame above and to the right."""
    axis.tick_params(colors=SOFT, labelsize=8)
    axis.grid(color=LINE, linewidth=0.5)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(LINE)
    axis.xaxis.label.set_color(SOFT)
    axis.yaxis.label.set_color(SOFT)


def mark_powers(axis: Axis) -> None:
    """Plain numbers along a logarithmic axis, as many as tell where in its range one is. Its limits are set before."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(log_ticks(*axis.get_view_interval())))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _legend(axis: Axes) -> None:
    axis.legend(fontsize=7.5, frameon=False, labelcolor=SOFT)
