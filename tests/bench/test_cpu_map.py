"""The arithmetic of the CPU map; its closed loop, over a tiny model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import FOLDER, load
from tests.models.checkpoints import tiny
from verifypd import LLM
from verifypd.control.auto import Auto
from verifypd.control.cost import CostModel


@pytest.fixture(scope="module")
def cpu_map() -> Any:
    return load("cpu_map")


def run(arm: str, level: int, index: int, rate: float) -> dict[str, Any]:
    return {"arm": arm, "concurrency": level, "round": index, "tokens_per_second": rate, "tpot_p95": 1e3 / rate}


def test_ratios_are_taken_within_a_round(cpu_map: Any) -> None:
    """The second round ran on a machine half as fast; that must not show."""
    runs = [
        run(arm, 4, i, rate / (i + 1)) for i in range(2) for arm, rate in (("plain", 10), ("pd:4", 20), ("auto", 18))
    ]
    runs.append(run("table", 4, 0, 30.0))
    [row] = cpu_map.points(runs, "auto")
    assert row["best"] == "pd:4", "the original's rule is shown beside the rest, and is no fixed choice"
    assert row["over_best"] == pytest.approx([0.9, 0.9]) and row["over_plain"] == pytest.approx([1.8, 1.8])
    text = cpu_map.table([row], "auto")
    assert "0.900 (0.900–0.900)" in text and "**15.0**" in text
    with pytest.raises(SystemExit, match="auto and plain"):
        cpu_map.points(runs[:1], "auto")


def test_the_picture_has_the_same_ratios_in_order() -> None:
    pytest.importorskip("matplotlib")
    drawn = load("draw_cpu", FOLDER.parent / "docs" / "images")
    runs = [
        run(arm, 4, i, rate / (i + 1)) for i in range(2) for arm, rate in (("auto", 18), ("pd:4", 20), ("plain", 10))
    ]
    found = drawn.over_plain(runs)
    assert list(found) == ["plain", "pd:4", "auto"]
    assert found["auto"] == pytest.approx([1.8, 1.8]) and found["plain"] == [1.0, 1.0]


def test_rounds_end_in_time(cpu_map: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(cpu_map.time, "perf_counter", lambda: next(clock))
    assert list(cpu_map.timely(argparse.Namespace(rounds=9, minutes=7.0))) == [0, 1, 2, 3]


def test_every_arm_runs_the_same_work(cpu_map: Any, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "kv_memory": "32MB", "batch_size": 4}
    work = [[3 + (i * 7 + j) % 20 for j in range(12)] * 2 for i in range(5)]
    cost = CostModel()
    with LLM(str(folder), draft="ngram", arch="auto", controller="throughput", measure_costs=False, **options) as llm:
        loop = cpu_map.Loop(llm.engine)
        for arm in (*cpu_map.ARMS, *cpu_map.DRIFT_ARMS):
            chosen = llm.engine.architecture = cpu_map.policy(arm, cost)
            found = loop.run(work, 6, 3, math.inf)
            assert (found["tokens"], found["ended"], found["unfinished"]) == (30, 5, 0), arm
            assert found["tpot_p95"] >= found["tpot_p50"] > 0 and found["ttft_p95"] > 0
            assert (found["drafted"] > 0) <= (arm not in ("plain", "unified:0"))
            assert ("settled" in cpu_map._mind(chosen)) == isinstance(chosen, Auto)
        llm.engine.architecture = cpu_map.policy("plain", cost)
        cut = loop.run(work, 6, 2, 0.0)
        assert cut["tokens"] == 0 and cut["unfinished"] == 5 and not llm.engine.busy
