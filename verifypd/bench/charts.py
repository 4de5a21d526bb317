"""Which charts a report has: data only, drawn as SVG by `svg` and as PNG by `plots`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifypd.bench.campaign import AGAIN
from verifypd.bench.order import in_order
from verifypd.bench.pipelining import SAID, mark
from verifypd.bench.statistics import COMPARED, HIGHER_IS_BETTER

TITLES = {
    "ttft": "TTFT: time to the first token",
    "tpot": "TPOT: time a token after the first",
    "e2e": "E2E: time of a whole request",
    "gap": "Gap: time between two outputs of one request",
}
NONE_GOOD = "No request met both targets."
FEW = 5  # requests: with fewer, tokens/s of an open loop are those of chance
FAR = 10.0  # times: bars of latencies so far apart are not legible from 0
FALL = 0.9  # of the tokens/s of a load below: less does not tangle lines
JOINED = "lines join them in the order of the loads."
TANGLED = f"they are not joined: some had fewer than {FEW} requests, and their tokens/s are those of chance."


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the bars of one colour."""

    name: str
    xs: tuple[float, ...]  # places of groups, for bars
    ys: tuple[float, ...]  # of bars: not a number where it is not known
    labels: tuple[str, ...] = ()  # of points
    highs: tuple[float, ...] = ()  # of bars: a second, fainter part up to here
    marks: tuple[str, ...] = ()  # above bars
    colour: int | None = None  # of the page's, where it has a meaning of its own


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of some series."""

    name: str  # of its file
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: str = "lines"  # "bars", "stacked" bars, "lines", "points" without lines, "steps"
    groups: tuple[str, ...] = ()  # names along x, for bars
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Ratios by row and column: 1 is neutral, more is better."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    words: tuple[tuple[str, ...], ...]
    note: str = ""
    marks: tuple[tuple[str, ...], ...] = ()  # behind values


def arms_of(found: dict[str, Any]) -> list[str]:
    """Names of all arms, the one that ran twice once."""
    return list(found["arms"])


def overview(found: dict[str, Any]) -> list[Chart]:
    """Charts over all scenarios."""
    charts = [
        _bars(found, "throughput_comparison", "Throughput: all tokens of the window", "tokens/s", "tok_s", 1.0),
        _bars(found, "goodput", f"Goodput: {_targets(found)}", "requests/s", "goodput", 1.0),
        _bars(found, "latency_comparison", "E2E: mean, and up to p95", "seconds", "e2e_ms_mean", 1e-3, "e2e_ms_p95"),
        _bars(found, "ttft", "TTFT: p50, and up to p95", "ms", "ttft_ms_p50", 1.0, "ttft_ms_p95"),
        _bars(found, "tpot", "TPOT: p50, and up to p95", "ms", "tpot_ms_p50", 1.0, "tpot_ms_p95"),
        _bars(found, "gaps", "Gap between outputs: p50, and up to p99", "ms", "gap_ms_p50", 1.0, "gap_ms_p99"),
    ]
    return charts + _frontiers(found)


def _targets(found: dict[str, Any]) -> str:
    targets = found["targets"]
    return f"TTFT ≤ {1e3 * targets['ttft']:g} ms and TPOT ≤ {1e3 * targets['tpot']:g} ms"


def _bars(
    found: dict[str, Any], name: str, title: str, unit: str, figure: str, scale: float, high: str | None = None
) -> Chart:
    series = []
    for arm in arms_of(found):
        have = [
            (i, each["arms"][arm]["figures"])
            for i, each in enumerate(found["scenarios"].values())
            if arm in each["arms"]
        ]
        highs = tuple(scale * f[high] for _, f in have) if high else ()
        series.append(
            Series(arm, tuple(float(i) for i, _ in have), tuple(scale * f[figure] for _, f in have), (), highs)
        )
    low = [y for each in series for y in each.ys if not math.isnan(y)]
    wide = high is not None and min(low, default=0.0) > 0 and max(low) > FAR * min(low)
    note = f"Log scale: a dot is the {_end(figure)}, its bar goes up to the {_end(high)}." if high and wide else ""
    y = f"{unit}, log scale" if wide else unit
    return Chart(name, title, "", y, tuple(series), "bars", tuple(found["scenarios"]), log_y=wide, note=note)


def _end(figure: str) -> str:
    """`p95` of `e2e_ms_p95`."""
    return figure.rpartition("_")[2]


def _frontiers(found: dict[str, Any]) -> list[Chart]:
    """Latency against throughput: a line an arm, a point a scenario; pairs of models apart."""
    pairs: dict[str, list[str]] = {}
    for scenario in found["scenarios"]:
        pairs.setdefault(found["grid"].get(scenario, ("", ""))[0], []).append(scenario)
    return [_frontier(found, pair, own) for pair, own in pairs.items() if len(own) > 1]


def _frontier(found: dict[str, Any], pair: str, scenarios: Sequence[str]) -> Chart:
    shared = _shared_words(scenarios)
    series = []
    for arm in arms_of(found):
        points = []
        for scenario in scenarios:
            if arm in (arms := found["scenarios"][scenario]["arms"]):
                label = found["grid"].get(scenario, ("", _from_word(scenario, shared)))[1]
                points.append((arms[arm]["figures"]["tok_s"], arms[arm]["figures"]["tpot_ms_p95"], label))
        xs, ys, labels = zip(*points, strict=True) if points else ((), (), ())
        series.append(Series(arm, xs, ys, labels))
    every = [y for each in series for y in each.ys]
    owns = [found["scenarios"][scenario]["arms"] for scenario in scenarios]
    few = min(each["figures"].get("requests", FEW) for own in owns for each in own.values()) < FEW
    tangled = few and any(x1 < FALL * x0 for each in series for x0, x1 in itertools.pairwise(each.xs))
    note = f"Right and down is better. A point is a scenario; {TANGLED if tangled else JOINED}"
    title = f"Latency and throughput\n{pair or ' '.join(scenarios[0].split()[:shared])}".rstrip()
    wide = min(every, default=0.0) > 0 and max(every) > 8 * min(every)
    kind = "points" if tangled else "lines"
    y = "TPOT p95, ms, log scale" if wide else "TPOT p95, ms"
    return Chart("frontier", title, "tokens/s", y, tuple(series), kind, log_y=wide, note=note)


def _shared_words(names: Sequence[str]) -> int:
    """Words that all names begin with."""
    alike = (len(set(words)) == 1 for words in zip(*(name.split() for name in names), strict=False))
    return sum(itertools.takewhile(bool, alike))


def _from_word(name: str, index: int) -> str:
    return " ".join(name.split()[index:]) or name


def distributions(found: dict[str, Any], scenario: str) -> list[Chart]:
    """Curves of single times in one scenario: the share of requests, or of gaps, that took no longer."""
    own = found["scenarios"][scenario]["arms"]
    charts = []
    for time, title in TITLES.items():
        series = []
        for arm in arms_of(found):
            values = own.get(arm, {}).get("curves", {}).get(time)
            if values:
                shares = tuple(i / (len(values) - 1) for i in range(len(values)))
                series.append(Series(arm, tuple(max(1e-3, 1e3 * value) for value in values), shares))
        if series:
            charts.append(Chart(f"cdf-{time}", title, "ms, log scale", "share", tuple(series), log_x=True))
    return charts


def histograms(found: dict[str, Any], scenario: str) -> list[Chart]:
    """Counts of single times in one scenario."""
    own = found["scenarios"][scenario]["arms"]
    charts = []
    for time, title in TITLES.items():
        series = []
        for arm in arms_of(found):
            bins = own.get(arm, {}).get("histograms", {}).get(time, {"counts": []})
            if sum(bins["counts"]):
                edges, counts = [1e3 * edge for edge in bins["edges"]], bins["counts"]
                total = sum(counts)
                series.append(Series(arm, tuple(edges), tuple(each / total for each in [*counts, counts[-1]])))
        if series:
            charts.append(
                Chart(f"histogram-{time}", title, "ms, log scale", "share", tuple(series), "steps", log_x=True)
            )
    return charts


def improvement(found: dict[str, Any], metric: str = "tok_s") -> Heatmap | None:
    """How much better each arm is than the reference, by pair of models and load, or by scenario; not clipped."""
    arms = [arm for arm in arms_of(found) if arm != found["reference"] and not arm.endswith(AGAIN)]
    if not arms or metric not in COMPARED or not found["scenarios"]:
        return None
    known = found.get("grid", {})
    grid = {tuple(known[name]): name for name in found["scenarios"] if name in known}
    pairs = list(dict.fromkeys(pair for pair, _ in grid))
    if len(grid) < len(found["scenarios"]):
        grid, pairs = {("", name): name for name in found["scenarios"]}, [""]
    columns = tuple(in_order(level for _, level in grid))
    lines = [(arm, pair) for pair in pairs for arm in arms]
    cells = [
        [found["scenarios"][grid[pair, c]]["compared"].get(arm, {}).get(metric) if (pair, c) in grid else None
         for c in columns]
        for arm, pair in lines
    ]  # fmt: skip
    names = tuple(arm if len(pairs) == 1 else f"{pair}\n{arm}" for arm, pair in lines)
    better = 1 if metric in HIGHER_IS_BETTER else -1
    values = tuple(tuple(None if each is None else each["ratio"] ** better for each in line) for line in cells)
    words = tuple(tuple("" if each is None else each["verdict"] for each in line) for line in cells)
    what, own = found["reference"], "the arm's"
    if metric == "tok_s":
        title, note = f"Throughput over {what}'s", f"Tokens/s: {own} over {what}'s; +100 % is twice as many."
    else:
        title, note = f"Speed over {what}, by mean E2E", f"Mean E2E: {what}'s over {own}; +100 % is half the time."
    marks = tuple(
        tuple(mark(found["scenarios"][grid[pair, c]], arm) if each is not None else ""
              for c, each in zip(columns, line, strict=True))
        for (arm, pair), line in zip(lines, cells, strict=True)
    )  # fmt: skip
    note = f"{note} {SAID}" if any(map(any, marks)) else note
    return Heatmap("improvement_heatmap", title, names, columns, values, words, note, marks)


def by_pair(found: dict[str, Any], chart: Chart) -> list[Chart]:
    """The chart; where it has scenarios of some pairs of models side by side, one for each pair. Names along x have
    what tells them apart, the title or the axis what they share. Bars of a PDV that hardly pipelined have a mark."""
    chart = _marked(found, chart)
    own = {group: found["grid"][group] for group in chart.groups if group in found["grid"]}
    pairs = list(dict.fromkeys(pair for pair, _ in own.values()))
    if not pairs:
        shared = _shared_words(chart.groups) if len(chart.groups) > 1 else 0
        names = tuple(_from_word(group, shared) for group in chart.groups)
        return [replace(chart, groups=names, x=" ".join(chart.groups[0].split()[:shared]))] if shared else [chart]
    made = []
    for pair in pairs:
        kept = [i for i, group in enumerate(chart.groups) if own.get(group, [pair])[0] == pair]
        names = tuple(own[chart.groups[i]][1] if chart.groups[i] in own else chart.groups[i] for i in kept)
        series = tuple(_moved(each, {float(old): float(new) for new, old in enumerate(kept)}) for each in chart.series)
        made.append(replace(chart, title=f"{chart.title}\n{pair}".rstrip(), groups=names, series=series))
    return made


def _marked(found: dict[str, Any], chart: Chart) -> Chart:
    """The chart with a mark above each bar of a PDV that hardly pipelined in the bar's scenario, and what it says."""
    scenarios = found.get("scenarios", {})
    owns = {float(i): scenarios[group] for i, group in enumerate(chart.groups) if group in scenarios}
    series = tuple(
        replace(each, marks=tuple(mark(owns[x], each.name) if x in owns else "" for x in each.xs))
        for each in chart.series
    )
    if not any(any(each.marks) for each in series):
        return chart
    return replace(chart, series=series, note=f"{chart.note} {SAID}".lstrip())


def _moved(series: Series, places: dict[float, float]) -> Series:
    """The bars that stand at some places, at others."""
    kept = [i for i, x in enumerate(series.xs) if x in places]
    highs = tuple(series.highs[i] for i in kept) if series.highs else ()
    marks = tuple(series.marks[i] for i in kept) if series.marks else ()
    xs, ys = tuple(places[series.xs[i]] for i in kept), tuple(series.ys[i] for i in kept)
    return replace(series, xs=xs, ys=ys, highs=highs, marks=marks)


def coloured(found: dict[str, Any], chart: Chart) -> Chart:
    """The chart with each arm in the same colour as on the others; one without bars says why."""
    places = {arm: place for place, arm in enumerate(arms_of(found))}
    own = (replace(each, colour=places[each.name]) if each.name in places else each for each in chart.series)
    bare = chart.name == "goodput" and not any(y > 0 for each in chart.series for y in each.ys)
    return replace(chart, series=tuple(own), note=f"{NONE_GOOD} {chart.note}".rstrip() if bare else chart.note)


def labelled(found: dict[str, Any], chart: Chart) -> Chart:
    """Coloured, with what must stand on every picture of a report: that it is simulated, scaled, of random weights."""
    chart = coloured(found, chart)
    return replace(chart, note=" ".join(filter(None, (chart.note, f"[{found['note']}]")))) if found["note"] else chart


def ticks(low: float, high: float, count: int = 5) -> Sequence[float]:
    """Round numbers that cover a range."""
    if high <= low:
        return (low,)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= raw)
    first = math.floor(low / step + 1e-9)
    return [step * i for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> Sequence[float]:
    """1, 2, 5 times powers of ten within a range; powers alone where it is wide, other round numbers where narrow."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (1, 2, 5) if high < 1000 * low else (1,)

    def within(values: Sequence[float]) -> list[float]:
        return [each for each in values if low * 0.999 <= each <= high * 1.001]

    found = within([m * 10.0**p for p in powers for m in marks])
    finer = (within(ticks(low, high, count)) for count in (4, 5, 8))
    return next((each for each in (found, *finer) if len(each) > 2), [low, high])
