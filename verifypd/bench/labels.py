"""Where labels of points stand: beside them, over neither a point, a line nor a label. Knows places; nothing of ink.

Places are (across, up) in any unit, in which letters, lines of text and dots have a size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is drawn."""

    letter: float  # across
    line: float  # of text, up
    dot: float  # from its middle to its edge


@dataclass(frozen=True, slots=True)
class Label:
    """A text whose lower left corner is moved from its point by (right, up)."""

    text: str
    of: int  # the point
    right: float
    up: float
    series: int | None  # that it is of; None: of several


@dataclass(slots=True)
class _Spot:
    """Points that are drawn over each other: they have one label."""

    at: Place
    of: int
    texts: list[str]
    series: set[int]


def placed(
    lines: Sequence[Sequence[Place]], texts: Sequence[Sequence[str]], frame: Box, sizes: Sizes, joined: bool = True
) -> list[Label]:
    """Labels of all points, line by line; points at one place have theirs together. One that finds no room is left out.

    joined: whether a line is drawn through its points. `Label.of` counts the points of all lines.
    """
    taken: list[Box] = [(x - sizes.dot, y - sizes.dot, x + sizes.dot, y + sizes.dot) for line in lines for x, y in line]
    taken += [(x, y, x, y) for line in lines if joined for x, y in _along(line)]
    found = []
    for spot in _spots(lines, texts, sizes):
        text = ", ".join(dict.fromkeys(spot.texts))
        wide = sizes.letter * len(text)
        for right, up in _sides(wide, sizes):
            left, low = spot.at[0] + right, spot.at[1] + up
            box = (left, low, left + wide, low + sizes.line)
            if _within(box, frame) and not any(_meet(box, other) for other in taken):
                one = next(iter(spot.series)) if len(spot.series) == 1 else None
                found.append(Label(text, spot.of, right, up, one))
                taken.append(box)
                break
    return found


def _spots(lines: Sequence[Sequence[Place]], texts: Sequence[Sequence[str]], sizes: Sizes) -> list[_Spot]:
    spots: list[_Spot] = []
    count = itertools.count()
    for series, (line, own) in enumerate(zip(lines, texts, strict=True)):
        for at, text in zip(line, own, strict=True):
            of = next(count)
            near = (each for each in spots if math.dist(each.at, at) < 2 * sizes.dot)
            spot = next(near, None)
            if spot is None:
                spots.append(_Spot(at, of, [text], {series}))
            else:
                spot.texts.append(text)
                spot.series.add(series)
    return spots


def _sides(wide: float, sizes: Sizes) -> Iterable[Place]:
    """Where a label may stand: close above, below and beside its point, then a line further."""
    gap = sizes.dot + 0.5
    near = (gap, -gap - sizes.line, -sizes.line / 2)
    for ups in (near, (gap + sizes.line, -gap - 2 * sizes.line)):
        for up, right in itertools.product(ups, (gap + 1, -wide / 2, -gap - 1 - wide)):
            yield right, up


def _along(line: Sequence[Place], apart: float = 3.0) -> list[Place]:
    """Places on the straight parts of a line, so far apart."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        count = max(1, int(math.hypot(x1 - x0, y1 - y0) / apart))
        found += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count)]
    return found


def _meet(one: Box, two: Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def _within(box: Box, frame: Box) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
