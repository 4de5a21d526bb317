"""Writes the report of a campaign's folder: results.json, results.csv, summary.md, report.html and PNGs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifypd.bench import charts, modes, page, part_charts
from verifypd.bench.campaign import Folder, write_whole
from verifypd.bench.kept import small
from verifypd.bench.meter import DRIVERS, SETTLES
from verifypd.bench.order import by_load
from verifypd.bench.results import as_csv, as_markdown, results
from verifypd.errors import ConfigError

CURVES = 8  # scenarios that have pictures of their own; the page has those of all


def write(path: Path, reference: str | None = None, pictures: bool = True) -> dict[str, Any]:
    """Make all files again from the runs that are there; `pictures`: PNGs too. Returns the results."""
    folder = Folder(path)
    if not folder.head:
        raise ConfigError(f"{path} holds no benchmark: there is no run.json in it")
    if reference is not None and reference not in folder.head["arms"]:
        raise ConfigError(f"--reference {reference!r} is none of the arms {', '.join(folder.head['arms'])}")
    found = results(folder, reference)
    _files(path, found, pictures)
    return found


def parts_of(path: Path) -> list[Path]:
    """The folders of runs: this one, or those within it that `bench all` wrote, the one that began first first."""
    if (path / "run.json").exists():
        return [path]
    parts = {each.parent: Folder(each.parent).head for each in path.glob("*/run.json")}
    if not parts:
        raise ConfigError(f"{path} holds no benchmark: there is no run.json in it, nor in the folders within it")
    return sorted(parts, key=lambda each: (parts[each]["sittings"][0]["date"], each.name))


def write_kept(file: Path, path: Path, pictures: bool = True) -> dict[str, Any]:
    """Make all files in a folder from results that `write_small` wrote: the same, but for charts of what they lack."""
    found = read_kept(file)
    _files(path, found, pictures)
    return found


def read_kept(file: Path) -> dict[str, Any]:
    """Results that `write_small` wrote; what the earliest lack is filled in."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(found.get(name) for name in ("scenarios", "sittings", "arms")):
        raise ConfigError(f"{file} is no result of `verifypd bench`: it has no scenarios")
    try:
        return _filled_in(found)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{file} is no result of `verifypd bench`: {error!r}") from None


def _filled_in(found: dict[str, Any]) -> dict[str, Any]:
    for scenario in found["scenarios"].values():
        scenario["arms"] = {arm: {"parts": None, "drafts": None} | own for arm, own in scenario["arms"].items()}
        for own in scenario["arms"].values():
            if own["parts"] and own["figures"]["seconds"] < SETTLES * len(own["seeds"]):
                for kind in ("means", "peaks"):
                    own["parts"][kind] = {k: v for k, v in own["parts"][kind].items() if k not in DRIVERS}
    whole: dict[str, Any] = {"note": "", "grid": {}, "headline": "tok_s", "protocol": None} | found
    return whole | {"scenarios": by_load(whole["scenarios"], whole["grid"])}


def _files(path: Path, found: dict[str, Any], pictures: bool) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / "results.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write_whole(path / "results.csv", as_csv(found))
    write_whole(path / "summary.md", as_markdown(found))
    write_whole(path / "modes.md", modes.as_markdown(found))
    write_whole(path / "report.html", page.page(found))
    if pictures and found["scenarios"]:
        _pictures(path, found)


def write_small(path: Path, file: Path) -> None:
    """The results of a folder, their curves thinned, as a file to be kept."""
    write_whole(file, small(results(Folder(path))))


def _pictures(path: Path, found: dict[str, Any]) -> None:
    """PNGs, where matplotlib is installed: the page needs none of them."""
    from verifypd.bench import pictures

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    for name, parts, title in pictures_of(found):
        pictures.draw_chart(
            path / f"{name}.png", [charts.coloured(found, each) for each in parts], title, found["note"]
        )
    heat = charts.improvement(found, found["headline"])
    if heat is not None:
        pictures.draw_heatmap(path / f"{heat.name}.png", heat, found["note"])


def pictures_of(found: dict[str, Any]) -> list[tuple[str, list[charts.Chart], str]]:
    """Names of the pictures, what is on them, and their titles: one a chart, and one a scenario with its curves."""
    named: dict[str, list[charts.Chart]] = {}
    for chart in (*charts.overview(found), *part_charts.overview(found)):
        named.setdefault(chart.name, []).extend(charts.by_pair(found, chart))
    whole = [(name, parts, "") for name, parts in named.items()]
    first = list(enumerate(found["scenarios"]))[:CURVES]
    curves = [(f"cdf-{i}", charts.distributions(found, each), each) for i, each in first]
    parts = [(f"parts-{i}", part_charts.of_scenario(found, each), each) for i, each in first]
    return whole + [picture for picture in curves + parts if picture[1]]


def write_index(path: Path, folders: list[Path]) -> Path:
    """A page that leads to the reports of some folders."""
    file = path / "index.html"
    write_whole(file, page.index([(each.name, json.loads((each / "results.json").read_text())) for each in folders]))
    return file
