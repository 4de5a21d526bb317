"""The toy of the schedule: its times on cases that can be told by hand, and beside a planner's run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load
from verifypd.bench.workload import Arrival
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import StepTiming

COSTS = Coefficients(base=10e-3, row=0.0, steep=0.1e-3, knee=0.0, context=0.0, chunk_context=0.0, draft_step=1e-3,
                     draft_context=0.0, draft_row=0.0)  # fmt: skip


@pytest.fixture(scope="module")
def toy() -> Any:
    return load("toy_schedule")


def test_one_request_takes_its_prompt_and_then_a_step_a_token(toy: Any) -> None:
    outcome = toy.play([Arrival(0.5, 100, 4)], CostModel(COSTS), 0.03, 0, seed=0)
    [record] = outcome.records
    prompt, token = 10e-3 + 100 * 0.1e-3, 10e-3 + 0.1e-3
    assert record.outputs == pytest.approx([0.5 + prompt + i * token for i in range(4)])
    assert record.tokens == 4


def test_a_prompt_beside_others_keeps_to_the_gap_and_the_shortest_goes_first(toy: Any) -> None:
    early, long, short = Arrival(0.0, 10, 200), Arrival(0.1, 1000, 2), Arrival(0.1, 50, 2)
    outcome = toy.play([early, long, short], CostModel(COSTS), 0.03, 0, seed=0)
    running, later, sooner = outcome.records
    gaps = [two - one for one, two in zip(running.outputs, running.outputs[1:], strict=False)]
    assert max(gaps) <= 0.03 + 1e-9
    assert sooner.outputs[0] < later.outputs[0]


def test_a_draft_that_reads_prompts_drafts_only_once_it_has(toy: Any) -> None:
    costs = replace(COSTS, draft_row=0.01e-3)
    free, reading = (
        toy.play([Arrival(0.0, 250, 200)], CostModel(costs), 0.03, 4, seed=0, draft_chunk=chunk).records[0]
        for chunk in (0, 100)
    )
    assert free.outputs[0] == reading.outputs[0]
    gaps = [two - one for one, two in zip(reading.outputs, reading.outputs[1:], strict=False)]
    waits, reads = 10e-3 + 0.1e-3, 1e-3 + 100 * 0.01e-3
    assert gaps[:2] == pytest.approx([waits + reads] * 2), "a token a step while its prompt is read"
    assert gaps[2] == pytest.approx(10e-3 + 5 * 0.1e-3 + 4e-3 + (50 + 5) * 0.01e-3), "its end, and the first draft"


def test_the_planner_simulated_stands_beside_the_toy(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "UNSEEN", [1])
    monkeypatch.setattr(toy, "UNSEEN_SECONDS", 1.0)
    costs = replace(Coefficients(), draft_row=10e-6)
    run = {"commit": "x", "costs": asdict(costs), "cells": [{"rate": 16}, {"rate": 16}]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    report = toy.main([str(tmp_path / "run.json"), "--simulate", "--draft-row", "9e-6"])
    assert report["of"][0]["costs"]["draft_row"] == 9e-6
    found = {cell["arm"]: cell["tpot_ms_p95"] for cell in report["cells"]}
    assert len(found) == len(report["cells"]) == 6
    assert found["toy"] < found["toy whose draft reads prompts"] < found["toy, plain"]
    assert found["planner whose draft reads no prompts"] < found["planner"] < found["planner, plain"]


def test_it_stands_beside_the_arms_of_a_planner_that_have_a_gap(toy: Any, tmp_path: Path) -> None:
    cell = {"rate": 16, "figures": dict.fromkeys(toy.SHOWN, 100.0)}
    arms = ["ttft=500", "gap=45,ttft=200", "plain,gap=45"]
    run = {"commit": "x", "seconds": 1.0, "costs": asdict(COSTS), "cells": [{**cell, "arm": arm} for arm in arms]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    report = toy.main([str(tmp_path / "run.json"), "--json", str(tmp_path / "toy.json")])
    assert [each["arm"] for each in report["cells"]] == arms[1:]
    drafting, plain = report["cells"]
    assert drafting["toy"]["tpot_ms_p95"] < plain["toy"]["tpot_ms_p95"]
    assert plain["over"]["ttft_ms_p95"] == pytest.approx(100.0 / plain["toy"]["ttft_ms_p95"])
    assert json.loads((tmp_path / "toy.json").read_text())["of"][0]["file"] == "run.json"


def test_costs_may_be_those_of_recorded_steps(toy: Any, tmp_path: Path) -> None:
    """Passes that take twice as long as they did at the start: the toy is as slow, and the engine nearer to it."""
    traffic = CostModel(replace(COSTS, base=20e-3, steep=0.2e-3))
    works = [(1, 0), (2, 0), (4, 0), (8, 0), (1, 100), (2, 200), (1, 500), (0, 300)]
    steps = [StepTiming(verify_rows=n + chunk, verify_context=0.0, chunk_rows=chunk) for n, chunk in works]
    timed = [replace(each, verify_seconds=traffic.step_seconds(each)) for each in steps]
    drift = {"commit": "y", "steps": load("h200").packed(timed)}
    engine = {"ttft_ms_p95": 40.0, "tpot_ms_p95": 20.0, "gap_ms_p99": 20.0, "gap_ms_max": 20.0}
    run = {"commit": "x", "costs": asdict(COSTS), "seeds": [1], "seconds": 2.0,
           "cells": [{"rate": 8, "arm": "plain,gap=60", "figures": engine}]}  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "drift.json").write_text(json.dumps(drift))
    [before] = toy.main([str(tmp_path / "run.json")])["cells"]
    report = toy.main([str(tmp_path / "run.json")] * 2 + ["--steps", str(tmp_path / "drift.json")])
    after, again = report["cells"]
    assert after == again and after["of"] == "run.json"
    assert report["steps"] == {"file": "drift.json", "commit": "y"}
    assert report["of"][0]["costs"]["base"] == pytest.approx(20e-3, rel=0.05)
    assert after["toy"]["tpot_ms_p95"] > 1.8 * before["toy"]["tpot_ms_p95"]
