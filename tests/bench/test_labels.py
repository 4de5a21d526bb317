"""Labels of points: all that coincide are told, and where a chart is not joined no line is drawn."""

from __future__ import annotations

import re
from dataclasses import replace

from verifypd.bench import svg
from verifypd.bench.charts import Chart, Series
from verifypd.bench.labels import Sizes, placed

SIZES = Sizes(5.0, 9.0, 3.5)
FRAME = (0.0, 0.0, 400.0, 200.0)


def test_points_at_one_place_have_a_label_together() -> None:
    lines = [[(100.0, 100.0), (101.0, 101.0), (300.0, 100.0)], [(100.5, 100.0), (300.0, 60.0), (350.0, 150.0)]]
    found = placed(lines, [("n=1", "n=5", "n=20"), ("n=1", "n=5", "n=20")], FRAME, SIZES)
    assert [(each.text, each.of, each.series) for each in found] == [
        ("n=1, n=5", 0, None), ("n=20", 2, 0), ("n=5", 4, 1), ("n=20", 5, 1),
    ]  # fmt: skip


def test_a_page_tells_every_point_too() -> None:
    """Its labels are near each other here; one that is of one line has its colour."""
    series = (
        Series("a", (100.0, 101.0), (5.0, 5.0), ("C=1", "C=8")),
        Series("b", (110.0, 300.0), (5.0, 9.0), ("C=1", "C=8")),
    )
    chart = Chart("frontier", "T", "x", "y", series)
    told = re.findall(r'<text class="(point[^"]*)"[^>]*>([^<]*)<', svg.draw(chart))
    assert told == [("point s0", "C=1, C=8"), ("point s1", "C=1"), ("point s1", "C=8")]
    assert svg.draw(chart).count("<polyline") == 2
    apart = svg.draw(replace(chart, kind="points"))
    assert "<polyline" not in apart and apart.count("<circle") == 4
