"""Charts as SVG to stand in a page: colours come from the page, so that they follow its light or dark."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from html import escape

from verifypd.bench.charts import Chart, Heatmap, Series, log_ticks, ticks
from verifypd.bench.labels import Sizes, placed

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 44
COLOURS = 8  # classes s0 … s7 of the page
SIZES = Sizes(letter=5.2, line=11.0, dot=3.5)  # pixels


def draw(chart: Chart) -> str:
    """One chart with its legend."""
    plot = _bars(chart) if chart.kind in ("bars", "stacked") else _lines(chart)
    names = [
        f'<span><i class="{_shade(i, each)}"></i>{escape(each.name)}</span>' for i, each in enumerate(chart.series)
    ]
    note = f"<p class='note'>{escape(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{plot}"
        f"<div class='legend'>{''.join(names)}</div>{note}</figure>"
    )


def _frame(chart: Chart, inside: list[str], y_marks: list[tuple[float, str]], x_marks: list[tuple[float, str]]) -> str:
    parts = []
    for y, text in y_marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
    for x, text in x_marks:
        for row, line in enumerate(text.split("\n")[:2]):
            parts.append(
                f'<text class="tick mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 17 + 13 * row}">{escape(line)}</text>'
            )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="axis mid" transform="translate(13 {middle}) rotate(-90)">{escape(chart.y)}</text>')
    if chart.x:
        parts.append(
            f'<text class="axis mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(chart.x)}</text>'
        )
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    label = escape(chart.title)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts + inside)}</svg>'


def _heights(chart: Chart, values: list[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Where a value stands on the upward axis, and the axis' marks: it begins at 0, or is of powers."""
    known = [each for each in values if not math.isnan(each)]
    room = HEIGHT - TOP - BOTTOM
    if chart.log_y:
        low, high = 0.8 * min(known), 1.1 * max(known)
        return _placed(lambda value: room * math.log(value / low) / math.log(high / low), log_ticks(low, high))
    marks = ticks(0.0, max(known, default=0.0) or 1.0)
    return _placed(lambda value: room * value / marks[-1], marks)


def _placed(
    above: Callable[[float], float], marks: Sequence[float]
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """The same in pixels from the top. above: pixels from the ground."""

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - above(value)

    return y_of, [(y_of(each), number(each)) for each in marks]


def _bars(chart: Chart) -> str:
    stacked = chart.kind == "stacked"
    tops = [sum(column) for column in zip(*(each.ys for each in chart.series), strict=True)] if stacked else []
    y_of, y_marks = _heights(chart, [*tops, *(y for each in chart.series for y in (*each.ys, *each.highs))])
    ground, room = HEIGHT - BOTTOM, (WIDTH - LEFT - RIGHT) / max(1, len(chart.groups))
    width = min(34.0, 0.8 * room / (1 if stacked else max(1, len(chart.series))))
    inside = []
    bases = dict.fromkeys(range(len(chart.groups)), 0.0)
    for i, series in enumerate(chart.series):
        for k, (group, y) in enumerate(zip(series.xs, series.ys, strict=True)):
            x = LEFT + room * (group + 0.5) + width * (-0.5 if stacked else i - len(chart.series) / 2)
            if math.isnan(y) or (y == 0.0 and not stacked):
                word = "–" if math.isnan(y) else "0"
                inside.append(f'<text class="mid" x="{x + width / 2:.1f}" y="{ground - 3}">{word}</text>')
                continue
            base = bases[int(group)]
            bases[int(group)] += y * stacked
            high = y_of(max(y, series.highs[k])) if series.highs else y_of(base + y)
            low = ground if chart.log_y else y_of(base)  # 0 has no place on an axis of powers
            title = f"<title>{escape(series.name)}, {escape(chart.groups[int(group)])}: {number(y)}"
            title += f" to {number(series.highs[k])}</title>" if series.highs else "</title>"
            inside.append(_bar(_shade(i, series), (x, width), (low, y_of(base + y), high), title, chart.log_y))
            if series.marks and series.marks[k]:
                inside.append(f'<text class="mid" x="{x + width / 2:.1f}" y="{high + 2:.1f}">{series.marks[k]}</text>')
    letters = max(6, int(room / 6.3))
    x_marks = [
        (LEFT + room * (i + 0.5), "\n".join(_cut(part, letters) for part in _two_lines(name, letters)))
        for i, name in enumerate(chart.groups)
    ]
    return _frame(chart, inside, y_marks, x_marks)


def _bar(shade: str, across: tuple[float, float], heights: tuple[float, float, float], title: str, log: bool) -> str:
    """A bar up to its value, fainter from there to its high end; on an axis of powers, that has no ground, a dot there.

    across: where it begins, and its width. heights: of the ground, its value and its high end.
    """
    (x, width), (ground, y, high) = across, heights
    box = f'x="{x + 1:.1f}" width="{max(1.0, width - 2):.1f}"'
    more = f'<rect class="{shade} faint" {box} y="{high:.1f}" height="{y - high:.1f}">{title}</rect>' * (high < y)
    if log:
        radius = min(5.0, width / 2)
        return f'{more}<circle class="{shade}" cx="{x + width / 2:.1f}" cy="{y:.1f}" r="{radius:.1f}">{title}</circle>'
    return f'{more}<rect class="{shade}" {box} y="{y:.1f}" height="{ground - y:.1f}">{title}</rect>'


def _lines(chart: Chart) -> str:
    xs = [x for each in chart.series for x in each.xs]
    share = chart.y == "share"
    ys = [y for each in chart.series for y in each.ys]
    y_of, y_marks = _heights(chart, [1.0] if share and chart.kind == "lines" else ys)
    across = WIDTH - LEFT - RIGHT
    if chart.log_x:
        low, high = math.log10(min(xs)), math.log10(max(xs))
        high = max(high, low + 0.3)
        marks = [(math.log10(each), number(each)) for each in log_ticks(10**low, 10**high)]
        places = [math.log10(x) for x in xs]
    else:
        step = all(x == int(x) for x in xs) and max(xs) <= 16
        low, high = (0.5, max(xs) + 0.5) if step else (0.0, max(xs) * 1.05 or 1.0)
        found = range(1, int(max(xs)) + 1) if step else ticks(low, high)
        marks = [(float(each), number(each)) for each in found if each <= high]
        places = xs
    place = dict(zip(xs, places, strict=True))

    def x_of(value: float) -> float:
        return LEFT + across * (value - low) / (high - low)

    inside = []
    for i, series in enumerate(chart.series):
        shade = _shade(i, series)
        points = [(x_of(place[x]), y_of(y)) for x, y in zip(series.xs, series.ys, strict=True)]
        if chart.kind == "steps":
            points = [(x, y) for (x0, y), (x1, _) in zip(points, points[1:], strict=False) for x in (x0, x1)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if chart.kind != "points":
            name = f"<title>{escape(series.name)}</title>"
            inside.append(f'<polyline class="line {shade}" points="{path}">{name}</polyline>')
        if len(series.xs) <= 16 and chart.kind != "steps":
            for k, (x, y) in enumerate(points):
                label = series.labels[k] if series.labels else number(series.xs[k])
                title = f"{series.name}, {label}: {number(series.xs[k])}, {number(series.ys[k])}"
                dot = f'<circle class="{shade}" cx="{x:.1f}" cy="{y:.1f}" r="{SIZES.dot}">'
                inside.append(f"{dot}<title>{escape(title)}</title></circle>")
    inside += _labels(chart, [[(x_of(place[x]), y_of(y)) for x, y in zip(each.xs, each.ys, strict=True)]
                              for each in chart.series if each.labels])  # fmt: skip
    return _frame(chart, inside, y_marks, [(x_of(at), text) for at, text in marks])


def _labels(chart: Chart, lines: list[list[tuple[float, float]]]) -> list[str]:
    """Of all points that have one, in the colour of their line where they are of one. lines: of points, in pixels."""
    labelled = [(i, each) for i, each in enumerate(chart.series) if each.labels]
    flipped = [[(x, -y) for x, y in line] for line in lines]
    frame = (LEFT, BOTTOM - HEIGHT, WIDTH - RIGHT, -TOP)
    points = [point for line in lines for point in line]
    made = []
    for label in placed(flipped, [each.labels for _, each in labelled], frame, SIZES, chart.kind == "lines"):
        x, y = points[label.of]
        shade = "" if label.series is None else f" {_shade(*labelled[label.series])}"
        place = f'x="{x + label.right:.1f}" y="{y - label.up - 2:.1f}"'
        made.append(f'<text class="point{shade}" {place}>{escape(label.text)}</text>')
    return made


def heatmap(chart: Heatmap, note: str = "") -> str:
    """A table of ratios, coloured to both sides of 1 by how far they are from it; `note` stands below."""
    far = max((abs(math.log(v)) for line in chart.values for v in line if v), default=0.0) or 1.0
    lines = ["<tr><th></th>" + "".join(f"<th>{escape(each)}</th>" for each in chart.columns) + "</tr>"]
    marks = chart.marks or [[""] * len(chart.columns)] * len(chart.rows)
    for name, values, words, line in zip(chart.rows, chart.values, chart.words, marks, strict=True):
        cells = []
        for value, word, mark in zip(values, words, line, strict=True):
            if value is None:
                cells.append("<td>–</td>")
                continue
            side = "up" if value >= 1 else "down"
            share = round(100 * abs(math.log(value)) / max(far, 0.05))
            gain = f"{100 * (value - 1):+.1f} %{mark}".replace("-", "−")
            cell = f'<td class="heat {side}" style="--share: {min(100, share)}%">{gain}'
            cells.append(f"{cell}<small>{escape(word)}</small></td>")
        lines.append(f"<tr><th>{escape(name).replace(chr(10), '<br>')}</th>{''.join(cells)}</tr>")
    table = f"<table class='map'>{''.join(lines)}</table>"
    told = " ".join(filter(None, (chart.note, f"[{note}]" if note else "")))
    below = f"<p class='note'>{escape(told)}</p>" if told else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{table}{below}</figure>"


def _shade(place: int, series: Series) -> str:
    """The class that colours a series."""
    return f"s{(place if series.colour is None else series.colour) % COLOURS}"


def number(value: float) -> str:
    """Short: three digits where it is not whole."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _two_lines(name: str, letters: int) -> list[str]:
    """A name in two lines at most: at its comma, else, where it is long, between words."""
    parts = name.split(", ", 1)
    if len(parts) == 1 and len(name) > letters:
        first, *rest = textwrap.wrap(name, letters)
        parts = [first, *([" ".join(rest)] if rest else [])]
    return parts


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
