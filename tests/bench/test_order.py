"""Scenarios stand in the order of their loads, however a command lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bench.test_report import RESULTS
from verifypd import cli
from verifypd.bench import charts
from verifypd.bench.order import by_load, in_order
from verifypd.bench.report import read_kept


def test_names_of_a_kind_stand_by_their_numbers() -> None:
    assert in_order(["mixed 16/s", "mixed 8/s", "mixed 20/s"]) == ["mixed 8/s", "mixed 16/s", "mixed 20/s"]
    given = ["p closed 8", "q poisson 2.5/s", "half", "p closed 1", "q poisson 0.5/s"]
    assert in_order(given) == ["p closed 1", "p closed 8", "q poisson 0.5/s", "q poisson 2.5/s", "half"]


def test_pairs_of_models_stay_together() -> None:
    grid = {"A C=8, y": ["y", "C=8"], "A C=64, x7b": ["x7b", "C=64"], "A C=1, x7b": ["x7b", "C=1"]}
    assert list(by_load(dict.fromkeys(grid), grid)) == ["A C=8, y", "A C=1, x7b", "A C=64, x7b"]


def test_a_report_lists_loads_from_low_to_high(tmp_path: Path) -> None:
    """A run, and a file that was kept in the order of a command."""
    command = [
        "bench",
        "simulate",
        "three-way",
        "--quick",
        "--num-requests",
        "20,2,5",
        "--seeds",
        "2",
        "--arm",
        "plain",
    ]
    assert cli.main([*command, "--arm", "auto", "--out", str(tmp_path), "--no-png"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [name.split(",")[0] for name in found["scenarios"]] == ["B n=2", "B n=5", "B n=20"]
    heat = charts.improvement(found, "e2e_ms_mean")
    assert heat is not None and heat.columns == ("n=2", "n=5", "n=20")
    summary = (tmp_path / "summary.md").read_text()
    assert summary.index("## B n=2,") < summary.index("## B n=5,") < summary.index("## B n=20,")
    mixed = read_kept(RESULTS / "bench-serve-h200-mixed.json")
    [frontier] = [each for each in charts.overview(mixed) if each.name == "frontier"]
    assert [each.labels for each in frontier.series] == [("8/s", "16/s", "20/s")] * 2
    assert charts.overview(mixed)[0].groups == tuple(f"mixed poisson {rate}/s" for rate in (8, 16, 20))


def frontier(tokens: list[float], requests: int) -> charts.Chart:
    loads = {f"A C={8 * (i + 1)}": {"tok_s": value, "tpot_ms_p95": 5.0} for i, value in enumerate(tokens)}
    scenarios: dict[str, Any] = {
        name: {"arms": {"pd": {"figures": {**own, "requests": requests}, "drafts": None}}}
        for name, own in loads.items()
    }
    return charts._frontiers({"arms": {"pd": {}}, "scenarios": scenarios, "grid": {}})[0]


def test_a_frontier_of_few_requests_is_not_a_tangle() -> None:
    assert frontier([16.0, 55.0, 12.0], 1).kind == "points" and charts.TANGLED in frontier([16.0, 55.0, 12.0], 1).note
    assert frontier([16.0, 55.0, 90.0], 1).kind == "lines", "there is no tangle"
    many = frontier([16.0, 55.0, 12.0], charts.FEW)
    assert many.kind == "lines" and many.note.endswith(charts.JOINED), "a fold of many requests is a finding"
