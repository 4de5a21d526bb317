"""Charts over pairs of models: the heatmap is pair × load and clips nothing; arms keep their colours."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifypd.bench import charts, page, part_charts, pictures, pipelining, results, svg
from verifypd.bench.charts import Chart, Series
from verifypd.bench.play import Drafts

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"tok_s": 10.0, "tpot_ms_p95": 5.0}


def found() -> dict[str, Any]:
    """Two pairs at two loads; `fast` is 40 times as fast in one of them."""
    scenarios, grid = {}, {}
    for pair in ("a:b", "c:d"):
        for level in ("C=1", "C=8"):
            ratio = 1 / 40 if (pair, level) == ("c:d", "C=8") else 2.0
            name = f"A {level}, {pair}"
            arms = {arm: {"figures": FIGURES, "drafts": None} for arm in ("slow", "fast")}
            scenarios[name] = {
                "arms": arms,
                "compared": {"fast": {"e2e_ms_mean": {"ratio": ratio, "verdict": "faster"}}},
            }
            grid[name] = [pair, level]
    return {"arms": {"slow": {}, "fast": {}}, "reference": "slow", "scenarios": scenarios, "grid": grid, "note": "SAID"}


def test_the_heatmap_is_pair_by_load_and_not_clipped(tmp_path: Path) -> None:
    heat = charts.improvement(found(), "e2e_ms_mean")
    assert heat is not None and heat.columns == ("C=1", "C=8") and heat.rows == ("a:b\nfast", "c:d\nfast")
    assert heat.values == ((0.5, 0.5), (0.5, pytest.approx(40.0)))
    assert "+3900.0 %" in svg.heatmap(heat) and "−50.0 %" in svg.heatmap(heat)
    assert "[SA&lt;ID]" in svg.heatmap(heat, "SA<ID")
    pytest.importorskip("matplotlib")
    pictures.draw_heatmap(tmp_path / "heat.png", heat, "SAID")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_the_heatmap_says_what_is_over_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A latency's cells are the reference's time over the arm's: +100 % is half the time."""
    heat = charts.improvement(found(), "e2e_ms_mean")
    assert heat is not None and heat.title == "Speed over slow, by mean E2E"
    assert heat.note == "Mean E2E: slow's over the arm's; +100 % is half the time." and heat.values[1][1] == 40.0
    assert f"<p class='note'>{svg.escape(heat.note)}</p>" in svg.heatmap(heat)
    tokens = charts.improvement(found(), "tok_s")
    assert tokens is not None and tokens.title == "Throughput over slow's" and "twice as many" in tokens.note
    pytest.importorskip("matplotlib")
    said: list[str] = []
    monkeypatch.setattr(pictures, "_below", lambda _figure, note: said.append(note))
    pictures.draw_heatmap(tmp_path / "heat.png", heat, "SAID")
    assert said == [f"{heat.note} Every arm is certainly faster. [SAID]"]


def test_words_of_the_heatmap_stand_out_from_its_strongest_colours() -> None:
    """Letters of the page's ink over 60 % of a colour, by WCAG's contrast; light and dark."""
    assert "color" not in re.findall(r"\.map small {(.*?)}", page.STYLE)[0]

    def light(rgb: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for theme in page.STYLE.split("@media")[:2]:
        colours = {name: [int(c * (3 - len(c)), 16) / 255 for c in re.findall("." * (len(hexed) // 3), hexed)]
                   for name, hexed in re.findall(r"--(\w+): #(\w+);", theme)}  # fmt: skip
        for side in ("c0", "c1"):
            cell = [0.6 * one + 0.4 * two for one, two in zip(colours[side], colours["card"], strict=True)]
            bright, dim = sorted((light(cell), light(colours["ink"])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) > 4


def test_bars_of_pairs_stand_apart() -> None:
    data = found()
    groups = (*data["scenarios"], "claimed")
    whole = Chart("x", "T", "", "s", (Series("fast", (0, 1, 2, 3, 4), (1, 2, 3, 4, 9)),), "bars", groups)
    one, two = charts.by_pair(data, whole)
    assert (one.title, two.title) == ("T\na:b", "T\nc:d")
    assert one.groups == two.groups == ("C=1", "C=8", "claimed")
    assert one.series[0].ys == (1, 2, 9) and two.series[0].ys == (3, 4, 9)
    assert one.series[0].xs == two.series[0].xs == (0.0, 1.0, 2.0)
    single = Chart("x", "T", "", "s", whole.series, "bars", ("p", "q"))
    assert charts.by_pair(data, single) == [single]


def test_an_arm_has_one_colour_and_every_picture_its_note() -> None:
    chart = Chart(
        "x", "T", "s", "s", (Series("fast", (0.0, 1.0), (1.0, 2.0)), Series("word", (0.0,), (1.0,), colour=6))
    )
    made = charts.labelled(found(), chart)
    assert [series.colour for series in made.series] == [1, 6] and made.note == "[SAID]"
    drawn = svg.draw(made)
    assert 'class="line s1"' in drawn and 'class="line s6"' in drawn and "[SAID]" in drawn


def test_stacked_bars_stand_on_each_other() -> None:
    parts = (Series("a", (0.0,), (1.0,)), Series("b", (0.0,), (3.0,)))
    drawn = svg.draw(Chart("x", "T", "", "share", parts, "stacked", ("arm",)))
    heights = [float(each.split('"')[0]) for each in drawn.split('height="')[1:]]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)

    assert "nan" not in drawn and len(heights) == 2


def test_a_bar_of_nothing_says_so() -> None:
    drawn = svg.draw(
        Chart("x", "T", "", "s", (Series("a", (0.0, 1.0, 2.0), (0.0, 3.0, math.nan)),), "bars", ("p", "q", "r"))
    )
    assert drawn.count(">0</text>") == 2 and drawn.count(">–</text>") == 1  # one 0 is the axis's


def test_acceptance_is_of_the_drafts_that_had_the_place() -> None:
    """One draft in ten has a second token, and half of those stand; of a third there are too few to say."""
    data = found()
    told = {"spans": 100, "by_place": [0.8, 0.5, 0.0], "drafted": [100, 10, 4]}
    for each in data["scenarios"].values():
        each["arms"]["fast"]["drafts"] = told
    chart = part_charts.acceptance(data)
    assert chart is not None
    assert chart.series[0].ys == pytest.approx((0.8, 0.5)) and chart.note == f"{part_charts.HAD}."
    assert chart.title == "Share of drafted tokens accepted, by place in the draft"
    older = {"spans": 100, "by_place": [0.8, 0.6, 0.4], "acceptance_rate": 0.6}  # three tokens each
    for each in data["scenarios"].values():
        each["arms"]["slow"]["drafts"] = older
    chart = part_charts.acceptance(data)  # type: ignore[assignment]
    slow, fast = (each.ys for each in chart.series)
    assert slow == pytest.approx((0.8, 0.6, 0.4)) and fast[:2] == pytest.approx((0.8, 0.5)) and math.isnan(fast[2])
    assert chart.note.startswith(f"{part_charts.HAD}. Of all drafts where nothing says how long they were: slow. –:")
    assert chart.note.endswith("under 20 of an arm's drafts had.")


def test_a_place_that_drafts_may_have_lacked_has_no_share() -> None:
    """Drafts of two tokens on average, three at most: of the third nothing can be said, nor of the second."""
    data = found()
    same, varied = ({"spans": 100, "by_place": by_place, "acceptance_rate": rate}
                    for by_place, rate in (([0.7, 0.5, 0.3], 0.51), ([0.7, 0.48, 0.0], 0.59)))  # fmt: skip
    for each in data["scenarios"].values():
        each["arms"]["slow"]["drafts"], each["arms"]["fast"]["drafts"] = same, varied
    chart = part_charts.acceptance(data)
    assert chart is not None and chart.kind == "bars" and chart.groups == ("1", "2", "3")
    slow, fast = (each.ys for each in chart.series)
    assert slow == pytest.approx((0.7, 0.5, 0.3)) and fast[0] == pytest.approx(0.7) and all(map(math.isnan, fast[1:]))
    assert chart.note == f"{part_charts.OF_ALL}; nothing says how long drafts were. {part_charts.LACKED}"
    varied["by_place"] = [0.0, 0.0, 0.0]
    varied["acceptance_rate"] = 0.0
    assert part_charts.acceptance(data) is not None
    same["by_place"] = varied["by_place"] = []
    assert part_charts.acceptance(data) is None


def test_shares_by_place_are_counted_over_all_seeds() -> None:
    def cells(*drafts: Drafts) -> list[Any]:
        return [SimpleNamespace(drafts=each) for each in drafts]

    one, two = Drafts(10, 12, (8, 1), drafted=(10, 2)), Drafts(10, 10, (4,), drafted=(10,))
    made = results._drafts(cells(one, two))  # type: ignore[arg-type]
    assert made is not None and made["by_place"] == [0.6, 0.5] and made["drafted"] == [20, 2]
    made = results._drafts(cells(one, Drafts(10, 10, (4,))))  # type: ignore[arg-type]
    assert made is not None and made["by_place"] == [0.6, 0.05] and "drafted" not in made, "one run does not say"


def piped() -> dict[str, Any]:
    """At one request PDV left no draft for a later verify, at eight it did; faster both times."""
    data = found()
    data["arms"]["pdv"] = {}
    for name, each in data["scenarios"].items():
        totals = {"plans_n": 100.0, "plans_left_n": 4.0 if "C=1" in name else 90.0}
        each["arms"]["pdv"] = {"figures": FIGURES, "drafts": None, "parts": {"totals": totals}}
        each["compared"]["pdv"] = each["compared"]["fast"]
    return data


def test_pdv_that_hardly_pipelined_is_marked_in_the_heatmap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heat = charts.improvement(piped(), "e2e_ms_mean")
    assert heat is not None and heat.note.endswith(f"half the time. {pipelining.SAID}")
    assert dict(zip(heat.rows, heat.marks, strict=True))["a:b\npdv"] == ("°", "") and heat.marks[0] == ("", "")
    assert svg.heatmap(heat).count(" %°<small>") == 2
    plain = charts.improvement(found(), "e2e_ms_mean")
    assert plain is not None and "°" not in svg.heatmap(plain)
    plt = pytest.importorskip("matplotlib.pyplot")
    told: list[str] = []
    monkeypatch.setattr(plt, "close", lambda figure: told.extend(t.get_text() for t in figure.axes[0].texts))
    pictures.draw_heatmap(tmp_path / "heat.png", heat)
    assert sum(text.split("\n")[0].endswith("%°") for text in told) == 2


def test_bars_of_pdv_that_hardly_pipelined_are_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = piped()
    whole = Chart("x", "T", "", "s", (Series("fast", (0, 1), (1, 2)), Series("pdv", (0, 1, 2, 3), (1, 2, 3, 4))),
                  "bars", tuple(data["scenarios"]), note="Said.")  # fmt: skip
    one, _ = made = charts.by_pair(data, whole)
    assert [series.marks for series in one.series] == [("", ""), ("°", "")] and one.note == f"Said. {pipelining.SAID}"
    assert svg.draw(one).count(">°</text>") == 1
    plt = pytest.importorskip("matplotlib.pyplot")
    told: list[str] = []
    monkeypatch.setattr(
        plt, "close", lambda figure: told.extend(t.get_text() for axis in figure.axes for t in axis.texts)
    )
    pictures.draw_chart(tmp_path / "bars.png", made)
    assert told == ["°", "°"]


def test_scenarios_in_which_pdv_hardly_pipelined_are_not_won() -> None:
    data = piped()
    assert pipelining.count(data["scenarios"])["pdv"]["e2e_ms_mean"] == {
        "faster": 2, "slower": 0, "no difference": 0, pipelining.HARDLY: 2,
    }  # fmt: skip
    chart = part_charts._won(data)
    assert chart is not None and chart.note.startswith(pipelining.APART)
    assert {each.name: each.ys for each in chart.series} == {
        "faster": (4.0, 2.0), "slower": (0.0, 0.0), "no difference": (0.0, 0.0), f"{pipelining.HARDLY}°": (0.0, 2.0),
    }  # fmt: skip
    assert ("mean E2E", "4 / 0 / 0", "2 / 0 / 0 + 2°") in results.won_rows(data)
    other = part_charts._won(found())
    assert other is not None and len(other.series) == 3 and "°" not in other.note


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (8.0, 300.0, [10, 20, 50, 100, 200]),
        (9.0, 14.0, [10, 12, 14]),
        (430.0, 830.0, [500, 600, 700, 800]),
        (1.4, 2.9, [1.5, 2, 2.5]),
        (5.0, 20000.0, [10, 100, 1000, 10000]),
    ],
)
def test_an_axis_of_powers_tells_where_in_its_range_a_value_is(low: float, high: float, marks: list[float]) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    assert charts.log_ticks(low, high) == pytest.approx(marks)
    figure, axis = plt.subplots()
    chart = Chart("cdf", "T", "ms", "share", (Series("a", (low / 0.9, high / 1.1), (0.0, 1.0)),), log_x=True)
    pictures._curves(axis, chart)
    figure.canvas.draw()
    assert [each.get_text() for each in axis.get_xticklabels()] == [f"{each:,g}" for each in marks]
    assert not axis.xaxis.get_minorticklocs().size
    plt.close(figure)


def test_latencies_far_apart_are_dots_on_an_axis_of_powers(tmp_path: Path) -> None:
    data = found() | {"targets": {"ttft": 1.0, "tpot": 0.1}}

    def latency(largest: float) -> Chart:
        for i, each in enumerate(data["scenarios"].values()):
            for own in each["arms"].values():
                own["figures"] = {"mean": 100.0 if i else largest, "p95": 2e4}
        return charts._bars(data, "latency_comparison", "T", "seconds", "mean", 1e-3, "p95")

    wide, near = latency(5000.0), latency(900.0)
    assert (wide.log_y, wide.y) == (True, "seconds, log scale") and "a dot is the mean" in wide.note
    assert (near.log_y, near.y, near.note) == (False, "seconds", "")
    assert not latency(math.nan).log_y and not latency(0.0).log_y
    drawn = svg.draw(wide)
    assert drawn.count("<circle") == 8 == drawn.count("<rect") and "nan" not in drawn and ">0.1<" in drawn
    pytest.importorskip("matplotlib")
    pictures.draw_chart(tmp_path / "x.png", [wide])


def test_frontiers_are_one_a_pair() -> None:
    one, two = charts._frontiers(found())
    assert one.title.endswith("a:b") and two.title.endswith("c:d")
    assert {label for series in one.series for label in series.labels} == {"C=1", "C=8"}
