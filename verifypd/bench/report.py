"""Writes the report of a campaign's folder: results.json, results.csv, summary.md, report.html and PNGs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifypd.bench import charts, page
from verifypd.bench.campaign import Folder, write_whole
from verifypd.bench.results import as_csv, as_markdown, results
from verifypd.errors import ConfigError


def write(path: Path, reference: str | None = None, pictures: bool = True) -> dict[str, Any]:
    """Make all files again from the runs that are there; `pictures`: PNGs too. Returns the results."""
    folder = Folder(path)
    if not folder.head:
        raise ConfigError(f"{path} holds no benchmark: there is no run.json in it")
    if reference is not None and reference not in folder.head["arms"]:
        raise ConfigError(f"--reference {reference!r} is none of the arms {', '.join(folder.head['arms'])}")
    found = results(folder, reference)
    write_whole(path / "results.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write_whole(path / "results.csv", as_csv(found))
    write_whole(path / "summary.md", as_markdown(found))
    write_whole(path / "report.html", page.page(found))
    if pictures and found["scenarios"]:
        _pictures(path, found)
    return found


def _pictures(path: Path, found: dict[str, Any]) -> None:
    """PNGs, where matplotlib is installed: the page needs none of them."""
    from verifypd.bench import plots

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    for name, parts, title in pictures_of(found):
        plots.draw_chart(path / f"{name}.png", parts, title)
    heat = charts.improvement(found)
    if heat is not None:
        plots.draw_heatmap(path / f"{heat.name}.png", heat)


def pictures_of(found: dict[str, Any]) -> list[tuple[str, list[charts.Chart], str]]:
    """Names of the pictures, what is on them, and their titles: one a chart, and one a scenario with its curves."""
    whole = [(chart.name, [chart], "") for chart in charts.overview(found)]
    curves = [(f"cdf-{i}", charts.distributions(found, each), each) for i, each in enumerate(found["scenarios"])]
    return whole + curves
