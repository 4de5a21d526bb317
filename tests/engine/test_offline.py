"""Whether somebody reads along: `generate` returns when all is written, a stream is read as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verifypd import LLM, SamplingParams
from verifypd.control.snapshot import Plan, Snapshot
from verifypd.errors import ConfigError, RequestError

PROMPT = list(range(3, 15))
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def heard(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, list[bool]]]:
    """An engine, and what its plans were told."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "32MB", "max_model_len": 128, "measure_costs": False}
    with LLM(str(pair[0]), draft=None, arch="plain", **settings) as llm:
        told: list[bool] = []
        plan = llm.engine.architecture.plan

        def listen(snapshot: Snapshot) -> Plan:
            told.append(snapshot.offline)
            return plan(snapshot)

        monkeypatch.setattr(llm.engine.architecture, "plan", listen)
        yield llm, told


def test_only_generate_is_offline(heard: tuple[LLM, list[bool]]) -> None:
    llm, told = heard
    llm.generate([PROMPT], PARAMS)
    assert told and all(told)
    told.clear()
    list(llm.stream(PROMPT, PARAMS))
    assert told and not any(told)


def test_a_call_that_was_broken_off_leaves_nothing_behind(heard: tuple[LLM, list[bool]]) -> None:
    llm, told = heard

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], PARAMS, tick=stop)
    told.clear()
    list(llm.stream(PROMPT, PARAMS))
    assert told and not any(told)


def test_threads_share_an_engine(heard: tuple[LLM, list[bool]]) -> None:
    llm, _ = heard
    prompts = [[3 + number, *PROMPT] for number in range(12)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            found = threads.map(lambda prompt: llm.generate([prompt], PARAMS)[0].outputs[0].token_ids, prompts)
            assert list(found) == expected
    assert not llm.engine.busy


def test_a_forked_process_is_told(heard: tuple[LLM, list[bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the kernels are not there any more: it would wait for ever."""
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(ConfigError, match="before the process was forked"):
        heard[0].generate([PROMPT], PARAMS)


def test_prompts_that_are_none(heard: tuple[LLM, list[bool]]) -> None:
    llm, _ = heard
    with pytest.raises(RequestError, match="prompts are"):
        llm.generate(b"abc")
    for messages in (None, 5):
        with pytest.raises(RequestError, match="messages are"):
            llm.chat(messages)
