"""What breaks inside a step ends the requests it touched, raises once, and leaves the engine usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifypd import LLM, SamplingParams
from verifypd.request import Request

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_draft": 3,
    "max_model_len": 128,
    "kv_memory": "64MB",
    "batch_size": 2,
}
PROMPT = [5, 9, 200, 31, 7]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["forward", "verdict", "draft"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_broken_pass(pair: tuple[Path, Path], where: str, error: type[BaseException], late: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(pair[0]), draft=str(pair[1]), late_tickets=late, **OPTIONS) as llm:
        [good] = llm.generate([PROMPT], params)
        target: Any = llm.engine.drafter if where == "draft" else llm.engine.verify
        name = "launch" if where == "draft" else where
        original, calls = getattr(target, name), []

        def broken(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise error("injected")
            return original(*args, **kwargs)

        setattr(target, name, broken)
        with pytest.raises(error):
            llm.generate([PROMPT] * 5, params)
        setattr(target, name, original)
        assert not llm.engine.busy
        llm.engine.check()
        assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == good.outputs[0].token_ids


def test_nothing_is_remembered_of_a_request_aborted_while_it_waits(pair: tuple[Path, Path]) -> None:
    with LLM(str(pair[0]), draft="ngram", queue_factor=1.0, **{**OPTIONS, "batch_size": 1}) as llm:
        engine = llm.engine
        first, second = (
            Request(str(i), PROMPT * 8, SamplingParams(max_tokens=30, temperature=0), seed=0, max_length=80, order=i)
            for i in range(2)
        )
        engine.add(first)
        engine.add(second)
        for _ in range(6):
            engine.step()
        engine.preempt(first)
        engine.finish(second)
        engine.finish(first)
        engine.drain()
        assert not engine.busy
        engine.check()
        assert not engine.drafter._indexes  # type: ignore[union-attr]
