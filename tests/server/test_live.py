"""The live view of an engine: steps with their times, who is where, prices, and changes with their reasons."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.samples import IDS
from verifypd import LLM, SamplingParams
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import StepTiming
from verifypd.engine.timing import RECENT
from verifypd.request import Request
from verifypd.server.live import CHANGES, PRICED, Lookout, _price

pytestmark = pytest.mark.xdist_group("server")


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Iterator[Any]:
    """The throughput controller with a cost model, under `auto`."""
    settings = {"dtype": "float32", "kv_memory": "32MB", "batch_size": 2, "max_model_len": 400, "block_size": 8}
    with LLM(str(folders[0]), draft=str(folders[1]), arch="auto", max_draft=3, **settings) as llm:
        yield llm.engine


def request(order: int, tokens: int = 60) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    longest = len(IDS) + tokens
    return Request(f"r{order}", list(IDS), params, seed=0, max_length=longest, order=order, arrival=time.monotonic())


def test_steps_and_requests_are_told(engine: Any) -> None:
    lookout = Lookout()
    for order in range(5):
        engine.add(request(order))
    for _ in range(12):
        engine.step()
    view = lookout.look(engine, engine.clock())
    running = sorted(r.order for r in engine.running.values())
    assert sorted(row[0] for row in view["requests"]) == running and len(running) + len(view["waiting"]) == 5
    carried = set().union(*engine.recent[-1].slots().values())
    assert {row[0] for row in view["requests"] if row[2]} == {
        r.order for r in engine.running.values() if r.slot in carried
    }
    assert [row[0] for row in view["steps"]] == [past.timed.step for past in engine.recent]
    for past, (_, architecture, *micros, _, _, _, _) in zip(engine.recent, view["steps"], strict=True):
        begun, ended = past.timed.begun, past.timed.ended
        assert architecture == past.timed.architecture and min(micros) >= 0
        assert sum(micros) == pytest.approx(1e6 * (ended - begun), abs=5), "its parts make up the step"
    assert 0 < view["price"]["steps"] <= PRICED
    assert view["price"]["predicted"] >= view["price"]["undrafted"] > 0 and view["price"]["measured"] > 0
    assert {"gain", "margin", "draft_length", "mode"} <= set(view["policy"])
    assert len(view["survival"]) in (0, 3) and all(0 <= value <= 1 for value in view["survival"])
    assert lookout.look(engine, engine.clock())["price"] is None, "no step is priced twice"
    while engine.busy:
        engine.step()
    rest = lookout.look(engine, engine.clock())
    assert rest["requests"] == rest["waiting"] == [] and len(rest["steps"]) <= RECENT


def test_changes_come_once_with_their_reasons(engine: Any) -> None:
    lookout = Lookout()
    decisions = [SimpleNamespace(time=float(i), previous="a", architecture="b", reason=f"r{i}") for i in range(3)]
    policy = SimpleNamespace(decisions=decisions, state=dict)
    watched = SimpleNamespace(recent=(), running={}, waiting=[], cost=None, architecture=policy)
    lookout.look(watched, 0.0)
    decisions.append(SimpleNamespace(time=3.0, previous="b", architecture="a", reason="r3"))
    lookout.changed(4.0, "auto", "pd", "set by the operator")
    lookout.changed(5.0, "pd", "pd", "nothing changed")
    reasons = [change[3] for change in lookout.look(watched, 5.0)["changes"]]
    assert reasons == ["r0", "r1", "r2", "set by the operator", "r3"]
    decisions += [SimpleNamespace(time=9.0, previous="a", architecture="b", reason="many")] * (2 * CHANGES)
    assert len(lookout.look(watched, 9.0)["changes"]) == CHANGES


def test_a_view_is_cheap(engine: Any) -> None:
    lookout, spent = Lookout(), []
    for order in range(10, 12):
        engine.add(request(order))
    while engine.busy:
        engine.step()
        begun = time.perf_counter()
        lookout.look(engine, engine.clock())
        spent.append(time.perf_counter() - begun)
    assert sorted(spent)[len(spent) // 2] < 1e-3


def test_a_step_is_priced_as_if_nothing_had_been_drafted() -> None:
    """The loop goes, and with it the rows of the drafts; who only drafted would have done nothing."""
    cost = CostModel(Coefficients())
    drafted = StepTiming(draft_requests=4, draft_steps=3, draft_rows=8, draft_context=400.0, draft_seconds=4e-3)
    verified = replace(drafted, verify_requests=4, verify_rows=16, verify_context=450.0, verify_seconds=5e-3)
    found = _price(cost, [drafted, verified])
    assert found is not None and found["measured"] == pytest.approx(13e-3)
    assert (
        found["undrafted"]
        == cost.step_seconds(StepTiming(verify_requests=4, verify_rows=4, verify_context=450.0))
        < cost.step_seconds(verified)
    )
