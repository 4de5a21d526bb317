"""Changing the architecture of a running engine: what is set, what really ran, and who says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import make, texts
from verifypd.engine import trace
from verifypd.errors import ConfigError


def ran(folder: Path) -> list[tuple[str, str]]:
    """Policy and architecture of each plan of a record, without repeats in a row."""
    lines = [json.loads(line) for line in (folder / trace.FILE).read_text().splitlines()]
    found: list[tuple[str, str]] = []
    for line in lines:
        if line["event"] == "plan" and (not found or found[-1] != (line["policy"], line["arch"])):
            found.append((line["policy"], line["arch"]))
    return found


def test_a_switch_is_in_the_settings_and_in_the_record(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with make(pair, "pdv", record=str(tmp_path)) as llm:
        before = texts(llm, 8)
        assert llm.config.arch == "pdv"
        llm.switch_architecture("pd")
        assert llm.config.arch == llm.engine.config.arch == llm.engine.architecture.name == "pd"
        assert texts(llm, 8) == before
        llm.switch_architecture("pdv")
        assert llm.config.verify_batch == 2, "what only pdv reads was kept for the way back"
        assert texts(llm, 8) == before
    seen = ran(tmp_path)
    assert {policy for policy, _ in seen} == {"pdv", "pd"} and ("pd", "pd") in seen
    assert ("pdv", "pdv (pipelined)") in seen[: seen.index(("pd", "pd"))] and seen[-1] == ("pdv", "pdv (atomic)")


@pytest.mark.parametrize(
    ("arch", "verifier", "expected"),
    [("table", 1, {"pd"}), ("table", 8e9, {"pdv (pipelined)", "pd"}), ("auto", 1, {"unified"})],
)
def test_the_record_names_whose_plans_they_were(
    pair: tuple[Path, Path], tmp_path: Path, arch: str, verifier: float, expected: set[str]
) -> None:
    with make(pair, arch, record=str(tmp_path)) as llm:
        llm.engine.verifier_bytes = int(verifier)
        texts(llm, 8)
    assert {policy for policy, _ in ran(tmp_path)} == {arch}
    names = {name for _, name in ran(tmp_path)}
    assert names >= expected and arch not in names
    record = trace.read(tmp_path)
    events: list[dict[str, Any]] = trace.chrome_trace(record)["traceEvents"]
    assert {event["args"]["architecture"] for event in events if event["ph"] == "X"} == names
    assert all(f"{name} in " in trace.explain(record) for name in names)


def test_a_name_that_is_none_changes_nothing(pair: tuple[Path, Path]) -> None:
    with make(pair, "unified") as llm:
        with pytest.raises(ConfigError, match="choose from plain, baseline, pd, pdv, unified, table, auto"):
            llm.switch_architecture("pvd")
        assert llm.config.arch == llm.engine.config.arch == "unified"


def test_an_engine_without_its_drafter_stays_plain(pair: tuple[Path, Path]) -> None:
    with make(pair, "plain") as llm:
        with pytest.raises(ConfigError, match="--arch plain"):
            llm.switch_architecture("pdv")
        assert llm.config.arch == llm.engine.architecture.name == "plain"
        llm.switch_architecture("plain")
