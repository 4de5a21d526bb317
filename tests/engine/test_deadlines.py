"""Deadlines offline: who is past its own ends with what it has, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifypd import LLM, SamplingParams
from verifypd.engine import llm as module

PROMPT, TOKENS = list(range(3, 15)), 40


@pytest.fixture
def llm(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose every step takes 10 ms of its clock."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "32MB", "max_model_len": 128, "measure_costs": False}
    with LLM(str(pair[0]), draft=None, arch="plain", batch_size=2, queue_factor=1.0, **settings) as llm:
        now, step = [100.0], llm.engine.step

        def timed() -> Any:
            now[0] += 0.01
            return step()

        monkeypatch.setattr(llm.engine, "clock", lambda: now[0])
        monkeypatch.setattr(llm.engine, "step", timed)
        yield llm
        assert not llm._jobs
        llm.engine.drain()
        llm.engine.check()


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, **more)


def test_a_request_ends_at_its_deadline_with_what_it_has(llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], greedy())
    short, long = llm.generate([PROMPT, PROMPT], [greedy(deadline_ms=155.0), greedy(deadline_ms=60_000.0)])
    assert long.outputs[0].token_ids == whole.outputs[0].token_ids and long.outputs[0].finish_reason == "length"
    choice = short.outputs[0]
    assert choice.finish_reason == "deadline" and short.finished
    assert 10 <= len(choice.token_ids) <= 16
    assert choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)]
    assert choice.text == llm.get_tokenizer().decode([*PROMPT, *choice.token_ids])[
        len(llm.get_tokenizer().decode(PROMPT)) :
    ]  # fmt: skip


def test_a_stream_ends_at_its_deadline(llm: LLM) -> None:
    seen = list(llm.stream(PROMPT, greedy(deadline_ms=155.0)))
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].outputs[0].finish_reason == "deadline"


def test_a_deadline_counts_the_wait_for_a_place(llm: LLM) -> None:
    """Two fill the engine; the third's deadline passes before it begins. Every choice has the same one."""
    many = [greedy(), greedy(), greedy(deadline_ms=50.0, n=2)]
    *first, late = llm.generate([PROMPT] * 3, many)
    assert [output.outputs[0].finish_reason for output in first] == ["length"] * 2
    assert [(choice.finish_reason, choice.token_ids, choice.text) for choice in late.outputs] == [
        ("deadline", [], ""),
        ("deadline", [], ""),
    ]


def test_deadlines_of_the_past_are_not_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PURGE", 4)
    for _ in range(20):
        llm.generate([PROMPT], SamplingParams(max_tokens=1, deadline_ms=1e9))
    assert len(llm._deadlines) <= 6
