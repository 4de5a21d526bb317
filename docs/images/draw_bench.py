"""Draws pictures of committed results, as `verifypd bench report FILE --out DIR` draws them. Run: `make figures`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from verifypd.bench.report import write_kept

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
SHOWN = {
    "bench-three-way-h200": (
        "throughput_comparison", "latency_comparison", "improvement_heatmap", "gpu_utilization", "acceptance_rate",
    ),
    "bench-serve-h200-closed-384": ("frontier",),
    "bench-three-way-cpu": ("cdf-1", "parts-1"),
}  # fmt: skip


def place(result: str, picture: str) -> Path:
    """Where a picture of a result is kept."""
    return HERE / f"{result}-{picture}.png"


if __name__ == "__main__":
    for name, wanted in SHOWN.items():
        with tempfile.TemporaryDirectory() as folder:
            write_kept(RESULTS / f"{name}.json", Path(folder))
            for each in wanted:
                shutil.copyfile(Path(folder) / f"{each}.png", place(name, each))
