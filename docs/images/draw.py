"""Draws the pictures of the documentation, each for a light and a dark page. Run: `make figures`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"


@dataclass(frozen=True)
class Theme:
    """Colours of one page style."""

    name: str
    page: str
    ink: str
    soft: str
    panel: str
    line: str
    prefill: str
    draft: str
    verify: str
    fresh: str  # tokens that came out of the verifier itself
    gone: str
    tint: float  # opacity of filled cells


LIGHT = Theme(
    "",
    "#ffffff",
    "#1f2328",
    "#59636e",
    "#f6f8fa",
    "#d1d9e0",
    "#2563c9",
    "#b35900",
    "#1a7f37",
    "#8250df",
    "#9aa4af",
    0.16,
)
DARK = Theme(
    "-dark",
    "#0d1117",
    "#e6edf3",
    "#9198a1",
    "#151b23",
    "#3d444d",
    "#6cb0ff",
    "#f0a04b",
    "#56d364",
    "#c297ff",
    "#6e7681",
    0.22,
)


def canvas(theme: Theme, width: float, height: float) -> Axes:
    """An empty picture measured in its own units: 100 wide."""
    figure = plt.figure(figsize=(width, height), facecolor=theme.page)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100 * height / width)
    axes.axis("off")
    return axes


def save(axes: Axes, name: str, theme: Theme) -> None:
    """Write the picture beside this file."""
    axes.figure.savefig(HERE / f"{name}{theme.name}.png", dpi=170, facecolor=theme.page, metadata={"Software": None})
    plt.close("all")


def panel(
    axes: Axes, x: float, y: float, w: float, h: float, theme: Theme, edge: str, *, fill: str | None = None
) -> None:
    """A rounded area."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y), w, h, boxstyle="round,pad=0,rounding_size=1.1", fc=fill or theme.panel, ec=edge, lw=1.4, zorder=1
        )
    )


def cell(
    axes: Axes,
    x: float,
    y: float,
    w: float,
    text: str,
    colour: str,
    theme: Theme,
    *,
    dashed: bool = False,
    gone: bool = False,
    height: float = 3.6,
) -> float:
    """A token; returns where the next one starts."""
    h = height
    axes.add_patch(
        FancyBboxPatch(
            (x, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.55", fc=theme.page, ec="none", zorder=3
        )
    )
    axes.add_patch(
        FancyBboxPatch(
            (x, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.55",
            fc=(*mpl.colors.to_rgb(colour), 0.0 if dashed or gone else theme.tint), ec=colour, lw=1.3,
            ls=(0, (3, 2)) if dashed else "-", zorder=4,
        )
    )  # fmt: skip
    axes.text(
        x + w / 2,
        y - 0.1,
        text,
        ha="center",
        va="center",
        fontsize=9.4,
        color=theme.gone if gone else theme.ink,
        zorder=5,
    )
    if gone:
        axes.plot([x + 0.6, x + w - 0.6], [y - 0.1, y - 0.1], color=colour, lw=1.3, zorder=6)
    return x + w + 0.7


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, *, bend: str = "arc3") -> None:
    """A pointer between two places."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=13, lw=1.6, color=colour, connectionstyle=bend, zorder=2,
            shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def label(axes: Axes, x: float, y: float, text: str, colour: str, size: float, **style: object) -> None:
    """Text."""
    axes.text(x, y, text, color=colour, fontsize=size, **{"va": "center", "zorder": 7} | style)


def width(text: str) -> float:
    """Room a token needs."""
    return 1.9 + 0.86 * max(len(text), 1)


def key(axes: Axes, x: float, y: float, text: str, colour: str, theme: Theme, **style: bool) -> float:
    """An entry of the legend; returns where the next one starts."""
    end = cell(axes, x, y, 2.2, "", colour, theme, height=2.0, **style)
    label(axes, end, y, text, theme.soft, 8.8)
    return end + 1.9 + 0.73 * len(text)


def lanes(theme: Theme) -> None:
    """Requests are rows, lanes are columns; one verifier pass takes all rows at once."""
    axes = canvas(theme, 10.2, 4.25)
    top, low = 40.8, 11.4
    prefill, decode, verify, verdict = (10.2, 16.8), (28.9, 18.6), (49.4, 23.4), (74.7, 24.6)  # x, width
    for (x, w), colour, title, what in (
        (prefill, theme.prefill, "Prefill lane", "prompts, in chunks"),
        (decode, theme.draft, "Decode lane", "a drafter proposes"),
        (verify, theme.verify, "Verify lane", "one pass checks all requests"),
        (verdict, theme.fresh, "Verdict", "what is accepted, what follows"),
    ):
        panel(axes, x, low, w, top - low, theme, theme.line)
        axes.add_patch(Circle((x + 2.1, top - 2.75), 0.8, fc=colour, ec="none", zorder=3))
        label(axes, x + 3.7, top - 2.8, title, theme.ink, 12.4, weight="bold")
        label(axes, x + 1.3, top - 5.9, what, theme.soft, 9.2)

    rows = {"A": 30.2, "B": 24.4, "C": 18.6}
    for name, y in rows.items():
        label(axes, 0.9, y + 0.9, f"Request {name}", theme.ink, 9.6, weight="bold")
        label(axes, 0.9, y - 1.2, "just arrived" if name == "C" else "running", theme.soft, 8.4)

    inner = (verify[0] + 0.9, verify[1] - 1.8)
    panel(axes, inner[0], 15.4, inner[1], 18.0, theme, theme.verify, fill=theme.page)
    label(axes, verify[0] + verify[1] / 2, 13.3, "4 + 3 + 3 rows, weights read once", theme.soft, 8.2, ha="center")

    spans = {"A": ("a", ["time", "there", "is"]), "B": ("=", ["4", "."])}
    for name, (last, words) in spans.items():
        x = decode[0] + 1.3
        for word in words:
            x = cell(axes, x, rows[name], width(word), word, theme.draft, theme, dashed=True)
        arrow(axes, (x - 0.2, rows[name]), (inner[0] - 0.1, rows[name]), theme.draft)
        x = cell(axes, inner[0] + 1.0, rows[name], width(last), last, theme.soft, theme)
        for word in words:
            x = cell(axes, x, rows[name], width(word), word, theme.draft, theme, dashed=True)
        arrow(axes, (inner[0] + inner[1], rows[name]), (verdict[0] + 1.0, rows[name]), theme.verify)
    label(axes, decode[0] + 1.3, 13.3, "draft length per request", theme.soft, 8.2)

    x, x2 = prefill[0] + 1.3, inner[0] + 1.0
    for word in ("Sum", "up", "this"):
        x = cell(axes, x, rows["C"], width(word), word, theme.prefill, theme)
        x2 = cell(axes, x2, rows["C"], width(word), word, theme.prefill, theme)
    arrow(axes, (x - 0.2, rows["C"]), (inner[0] - 0.1, rows["C"]), theme.prefill)
    arrow(axes, (inner[0] + inner[1], rows["C"]), (verdict[0] + 1.0, rows["C"]), theme.verify)
    label(axes, prefill[0] + 1.3, 13.3, "the rest waits its turn", theme.soft, 8.2)

    x = verdict[0] + 1.4
    for word in ("time", "there"):
        x = cell(axes, x, rows["A"], width(word), word, theme.verify, theme)
    x = cell(axes, x, rows["A"], width("is"), "is", theme.gone, theme, gone=True)
    cell(axes, x, rows["A"], width("was"), "was", theme.fresh, theme)
    x = verdict[0] + 1.4
    for word in ("4", "."):
        x = cell(axes, x, rows["B"], width(word), word, theme.verify, theme)
    cell(axes, x, rows["B"], width("Then"), "Then", theme.fresh, theme)
    label(axes, verdict[0] + 1.4, rows["C"], "in the cache; no token yet", theme.soft, 8.6)
    label(axes, verdict[0] + 1.3, 13.3, "tokens stream to the callers", theme.soft, 8.2)

    # round again
    turn = 8.6
    start, end = verdict[0] + verdict[1] / 2, decode[0] + decode[1] / 2
    axes.plot([start, start, end], [low, turn, turn], color=theme.fresh, lw=1.6, zorder=2)
    arrow(axes, (end, turn), (end, low - 0.1), theme.fresh)
    what = "the next draft starts after what was accepted: decided on the device, rolled back by length"
    label(axes, (start + end) / 2, turn - 1.7, what, theme.soft, 8.8, ha="center")

    x = 10.2
    x = key(axes, x, 2.2, "confirmed", theme.soft, theme)
    x = key(axes, x, 2.2, "prompt", theme.prefill, theme)
    x = key(axes, x, 2.2, "drafted", theme.draft, theme, dashed=True)
    x = key(axes, x, 2.2, "accepted", theme.verify, theme)
    x = key(axes, x, 2.2, "rejected", theme.gone, theme, gone=True)
    key(axes, x, 2.2, "the verifier's own token", theme.fresh, theme)
    save(axes, "lanes", theme)


BLOCK = 4  # tokens in a block of the picture; the engine's default is 16


def ragged(theme: Theme) -> None:
    """One verifier pass over four requests, and the pool blocks it reads and writes."""
    axes = canvas(theme, 10.2, 5.4)
    violet, blue, amber, green = theme.fresh, theme.prefill, theme.draft, theme.verify
    # slot, what, colour, first position, rows, block table
    spans = [
        (3, "prefill chunk", blue, 4, 6, [2, 9, 5]),
        (0, "plain token", violet, 6, 1, [7, 1]),
        (5, "verify, 4 drafts", amber, 9, 5, [4, 11, 6, 13]),
        (1, "verify, 2 drafts", green, 4, 3, [10, 3]),
    ]
    label(axes, 2, 50.4, "One verifier pass", theme.ink, 12.4, weight="bold")
    label(axes, 22.4, 50.3, "15 rows, laid end to end; no padding", theme.soft, 9.6)
    step, y = 5.3, 43.0
    x = 2.0
    for slot, what, colour, first, rows, _ in spans:
        left = x
        for j in range(rows):
            draft = what.startswith("verify") and j > 0
            cell(axes, x, y, step - 0.5, str(first + j), colour, theme, dashed=draft)
            x += step
        middle = (left + x - 0.5) / 2
        label(axes, middle, y + 3.6, what if rows > 1 else "plain", colour, 9.0, ha="center", weight="bold")
        label(axes, middle, y - 3.3, f"slot {slot}", theme.soft, 8.6, ha="center")
        x += 1.6
    label(
        axes,
        2,
        36.2,
        "Numbers are positions in the request. A verify span is the last confirmed token and its drafts;",
        theme.soft,
        8.6,
    )
    label(
        axes,
        2,
        34.0,
        "a chunk is any stretch of a prompt. Every row attends to its own request up to itself.",
        theme.soft,
        8.6,
    )

    label(axes, 2, 29.4, "Paged KV pool", theme.ink, 12.4, weight="bold")
    label(axes, 18.4, 29.3, "one per model; a block table per slot says which blocks are whose", theme.soft, 9.6)
    owner: dict[int, tuple[str, int, int, int]] = {}
    for slot, _, colour, first, rows, table in spans:
        for index, block in enumerate(table):
            owner[block] = (colour, slot, first - index * BLOCK, first + rows - index * BLOCK)
    across, gap, unit = 8, 1.5, 2.55
    for block in range(16):
        bx = 2.0 + (block % across) * (BLOCK * unit + gap)
        by = 20.6 - (block // across) * 8.2
        colour, slot, old, new = owner.get(block, (theme.gone, -1, 0, 0))
        for offset in range(BLOCK):
            written, held = old <= offset < new, offset < old
            alpha = 0.0 if slot < 0 else 0.85 if written else 0.25 if held else 0.0
            axes.add_patch(
                Rectangle(
                    (bx + offset * unit, by), unit, 3.4, fc=(*mpl.colors.to_rgb(colour), alpha), ec=colour,
                    lw=0.9, zorder=3,
                )
            )  # fmt: skip
        note = "null" if block == 0 else "free" if slot < 0 else f"slot {slot}"
        label(axes, bx, by + 4.6, str(block), theme.ink, 8.8, weight="bold")
        label(axes, bx + BLOCK * unit, by + 4.6, note, theme.soft, 8.4, ha="right")
    x = 2.0
    for text, alpha in (("context read", 0.25), ("written by this pass", 0.85), ("empty", 0.0)):
        axes.add_patch(Rectangle((x, 6.9), 2.2, 2.0, fc=(*mpl.colors.to_rgb(theme.soft), alpha), ec=theme.soft, lw=0.9))
        label(axes, x + 3.0, 7.9, text, theme.soft, 8.8)
        x += 5.4 + 0.78 * len(text)
    label(
        axes,
        2,
        3.6,
        "After the verdict a slot's length says what counts. Rejected drafts stay behind it and are overwritten.",
        theme.soft,
        8.6,
    )
    save(axes, "ragged-pass", theme)


if __name__ == "__main__":
    for style in (LIGHT, DARK):
        lanes(style)
        ragged(style)
