"""Verdicts are collected before requests are added: nothing is lost or told twice, and who has come is planned for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import make, prompts
from verifypd.bench.drive import Drive
from verifypd.bench.workload import Arrival
from verifypd.request import Request, SamplingParams

TOKENS = 12


def request(order: int, ids: list[int], **changes: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, **changes)
    return Request(
        str(order), ids, params, seed=order, max_length=len(ids) + TOKENS, arrival=time.monotonic(), order=order
    )


def test_collecting_loses_nothing_and_tells_nothing_twice(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a pass is still running when its step returns."""
    asked = prompts(6)
    with make(pair, "unified") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        expected = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        engine: Any = llm.engine
        monkeypatch.setattr(engine.inflight, "arrived", list)
        seen = dict.fromkeys(range(6), 0)
        by = {"collect": 0, "step": 0}
        requests = [request(order, ids) for order, ids in enumerate(asked)]
        todo = list(requests)
        while todo or engine.busy:
            for name, news in (("collect", engine.collect()), ("step", None)):
                if name == "step":
                    if todo:
                        engine.add(todo.pop(0))
                    news = engine.step()
                for each in news or []:
                    by[name] += each.output_len - seen[each.order]
                    seen[each.order] = each.output_len
        assert [each.tokens[each.prompt_len :] for each in requests] == expected
        assert list(seen.values()) == [TOKENS] * 6
        assert by["collect"] > by["step"], "tokens leave before the next step is planned"


def test_who_came_meanwhile_is_in_the_next_plan(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with make(pair, "unified") as llm:
        engine: Any = llm.engine
        monkeypatch.setattr(engine.inflight, "arrived", list)
        engine.add(request(0, [5, 6, 7]))
        for _ in range(3):
            engine.collect()
            engine.step()
        engine.collect()
        late = request(1, [8, 9])
        engine.add(late)
        engine.step()
        assert late.computed == 2, "its prompt is read by the very next step"
        engine.drain()


@pytest.mark.parametrize("left", [False, True])
def test_waiting_for_work_is_part_of_no_step(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """Whether the last request ended as its verdict was collected, or was aborted behind that."""
    with make(pair, "unified") as llm:
        engine: Any = llm.engine
        monkeypatch.setattr(engine.inflight, "arrived", list)
        waited = 0.0
        monkeypatch.setattr(engine, "clock", lambda: time.monotonic() + waited)
        first = request(0, [5, 6, 7])
        engine.add(first)
        while engine.busy:
            engine.collect()
            if left:
                engine.finish(first, "abort")
            if engine.busy:
                engine.step()
        waited = 1000.0
        engine.add(request(1, [5, 6, 7]))
        engine.step()
        assert engine.stats.step_seconds < 500
        engine.drain()


def test_a_drive_ends_with_what_it_collects(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with make(pair, "unified") as llm:
        engine: Any = llm.engine
        monkeypatch.setattr(engine.inflight, "arrived", list)
        found = Drive(engine).arriving([Arrival(0.0, 6, 5), Arrival(0.01, 3, 4)])
        assert found["requests"] == 2 and found["unfinished"] == 0


def test_short_prompts_are_admitted_before_long_ones_that_came_first(pair: tuple[Path, Path]) -> None:
    """Slots are given in the order in which prompts are read, whoever holds one unread."""
    with make(pair, "unified", batch_size=16, queue_factor=1.0) as llm:
        engine = llm.engine
        for order in range(12):
            engine.add(request(order, list(range(3, 63))))
        engine.step()
        assert len(engine.waiting) == 4, "no more hold a slot unread than the next passes take"
        short = request(20, [5, 6])
        urgent = request(21, list(range(3, 90)), priority=-1)
        engine.add(short)
        engine.add(urgent)
        engine.step()
        assert short.slot is not None and urgent.slot is not None and len(engine.waiting) == 4
        while engine.busy:
            engine.step()
