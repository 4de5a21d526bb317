"""The curve of a training run as a picture. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def draw_curve(curve: list[dict[str, Any]], path: Path) -> bool:
    """Loss by draft position, and acceptance on held-out prompts, over the steps. False where it cannot be drawn."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        log.warning("no %s: pip install matplotlib", path.name)
        return False
    steps = [point["step"] for point in curve]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for depth in range(len(curve[0]["loss"]) if curve else 0):
        left.plot(steps, [point["loss"][depth] for point in curve], label=f"position {depth + 1}")
    left.set(xlabel="step", ylabel="loss", title="training")
    for temperature, style in (("0.0", "-"), ("0.8", "--")):
        for depth in range(len(curve[0]["loss"]) if curve else 0):
            values = [point["validation"][temperature]["all"]["alpha"][depth] for point in curve]
            right.plot(steps, values, style, color=f"C{depth}", label=f"α{depth + 1} at T = {temperature}")
    right.set(xlabel="step", ylabel="chance to stand", title="held-out prompts")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if curve:  # stopped before its first measurement
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
