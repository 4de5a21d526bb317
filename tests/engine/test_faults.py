"""What breaks inside a step ends the requests it touched, raises once, and leaves the engine usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifypd import LLM, SamplingParams
from verifypd.request import Request
from verifypd.runtime.streams import Ticket

OPTIONS: dict[str, Any] = {
    "controller": "fixed",
    "measure_costs": False,
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
        engine.residents.preempt(first)
        engine.finish(second)
        engine.finish(first)
        engine.drain()
        assert not engine.busy
        engine.check()
        assert not engine.drafter._indexes  # type: ignore[union-attr]


@pytest.mark.parametrize("forgiving", [False, True])
def test_a_head_that_breaks_while_it_reads_a_prompt(pair: tuple[Path, Path], forgiving: bool) -> None:
    """Requests end, or are computed again; none is left behind with a pass that nobody absorbs."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    head = str(pair[0].parent / "head")
    with LLM(str(pair[0]), draft=head, **{**OPTIONS, "batch_size": 4}) as llm:
        good = [output.outputs[0].token_ids for output in llm.generate([PROMPT, [*PROMPT, 9]], params)]
        engine: Any = llm.engine
        engine.forgiving = forgiving
        follow, calls = engine.drafter.follow, []

        def broken(spans: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise MemoryError("injected")
            follow(spans)

        engine.drafter.follow = broken
        llm._submit([[*PROMPT, 4], [*PROMPT, 9]], [params] * 2)
        requests = list(engine.waiting)
        for _ in range(100):
            if engine.busy:
                try:
                    engine.step()
                except MemoryError:
                    assert len(calls) == 1
        assert not engine.busy and len(calls) > 0
        engine.check()
        assert [r.finish_reason for r in requests] == ["length" if forgiving else "error"] * 2
        engine.drafter.follow = follow
        assert [o.outputs[0].token_ids for o in llm.generate([PROMPT, [*PROMPT, 9]], params)] == good


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["forward", "draft"])
def test_a_forgiving_engine_computes_again_what_ran_out_of_memory(
    pair: tuple[Path, Path], where: str, late: bool
) -> None:
    """Half as many at once, the same texts; a request that does not fit alone ends, and only that one."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[5 + i, 9, 200, 31, 7] for i in range(5)]
    options = {**OPTIONS, "batch_size": 4}
    with LLM(str(pair[0]), draft=str(pair[1]), late_tickets=late, **options) as llm:
        good = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        engine = llm.engine
        engine.forgiving = True
        target: Any = engine.drafter if where == "draft" else engine.verify
        name = "launch" if where == "draft" else "forward"
        original, failing = getattr(target, name), [3, 4]  # which calls run out of memory

        def broken(*args: Any, **kwargs: Any) -> Any:
            failing[:] = [call - 1 for call in failing]
            if 0 in failing:
                raise MemoryError("injected")
            return original(*args, **kwargs)

        setattr(target, name, broken)
        jobs = llm._submit(prompts, [params] * 5)
        seen = 0
        while not all(job.finished for job in jobs):
            try:
                llm._step()
            except MemoryError:
                seen += 1
                engine.check()
        assert seen == 2 and engine.stats.preemptions and engine.residents.limit < engine.config.slots
        assert [job.texts[0].request.output_ids for job in jobs] == good
        failing[:] = [2]
        [job] = llm._submit(prompts[:1], [params])

        def to_the_end() -> None:
            while not job.finished:
                llm._step()

        with pytest.raises(MemoryError):
            to_the_end()
        assert job.texts[0].request.finish_reason == "error"
        engine.drain()
        assert not engine.busy
        engine.check()


def steps_that_failed(llm: LLM) -> int:
    """How many of more steps than the requests need ran out of memory: ten of them with nobody left, of 500 at most."""
    failed = idle = 0
    for _ in range(500):
        idle = 0 if llm.engine.busy else idle + 1
        if idle > 10:
            break
        try:
            llm._step()
        except MemoryError:
            failed += 1
        llm.engine.check()
    return failed


@pytest.mark.parametrize("forgiving", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_launched_pass_that_comes_to_nothing(
    pair: tuple[Path, Path], nth: int, late: bool, forgiving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end, or are computed again; those behind it are absorbed, and nobody is left in the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[5 + i, 9, 200, 31, 7] for i in range(5)]
    settings = {**OPTIONS, "batch_size": 4, "late_tickets": late, "arch": "pd"}
    with LLM(str(pair[0]), draft=str(pair[1]), **settings) as llm:
        good = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        engine, result, calls = llm.engine, Ticket.result, []
        engine.forgiving = forgiving

        def broken(ticket: Ticket) -> Any:
            calls.append(len(ticket.slots))
            if len(calls) == nth:
                raise MemoryError("injected")
            return result(ticket)

        monkeypatch.setattr(Ticket, "result", broken)
        requests = [job.texts[0].request for job in llm._submit(prompts, [params] * 5)]
        assert steps_that_failed(llm) == 1 and not engine.busy
        ends = {request.finish_reason for request in requests}
        assert "length" in ends and ends <= {"length", "error"}
        for request, expected in zip(requests, good, strict=True):
            assert request.output_ids == expected[: request.output_len]
            assert request.finish_reason == "error" or request.output_len == 20
        if forgiving and not late and calls[nth - 1] > 1:
            assert ends == {"length"} and engine.stats.preemptions


@pytest.mark.parametrize("forgiving", [False, True])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_request_that_cannot_be_brought_to_the_device(
    pair: tuple[Path, Path], nth: int, drafter: str, forgiving: bool
) -> None:
    """Those admitted with it end, or are admitted again, fewer at once; nobody runs with another's settings."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={7: 2.0})
    prompts = [[5 + i, 9, 200, 31, 7] for i in range(6)]
    draft = str(pair[1]) if drafter == "model" else drafter
    with LLM(str(pair[0]), draft=draft, **{**OPTIONS, "batch_size": 4}) as llm:
        good = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        engine: Any = llm.engine
        engine.forgiving = forgiving
        assign, calls = engine.sampling.assign, []

        def broken(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == nth:
                raise MemoryError("injected")
            assign(*args, **kwargs)

        engine.sampling.assign = broken
        requests = [job.texts[0].request for job in llm._submit(prompts, [params] * 6)]
        assert steps_that_failed(llm) == 1 and not engine.busy
        for request, expected in zip(requests, good, strict=True):
            assert request.finish_reason in ("length", "error")
            assert request.output_ids == (expected if request.finish_reason == "length" else [])
        ended = sum(request.finish_reason == "error" for request in requests)
        assert ended == (int(nth == 1) if forgiving else nth)


@pytest.mark.parametrize("new", [1, 2])
def test_who_comes_to_a_busy_engine_without_memory_waits_and_nobody_else_does(
    pair: tuple[Path, Path], new: int
) -> None:
    """Memory runs out once as they are brought to the device: those who run go on, and so do as many as before."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[5 + i, 9, 200, 31, 7] for i in range(6)]
    with LLM(str(pair[0]), draft=str(pair[1]), **{**OPTIONS, "batch_size": 8}) as llm:
        good = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        engine: Any = llm.engine
        engine.forgiving = True
        requests = [job.texts[0].request for job in llm._submit(prompts[:4], [params] * 4)]
        for _ in range(3):
            llm._step()
        assign, calls = engine.sampling.assign, []

        def broken(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == new:
                raise MemoryError("injected")
            assign(*args, **kwargs)

        engine.sampling.assign = broken
        requests += [job.texts[0].request for job in llm._submit(prompts[4 : 4 + new], [params] * new)]
        with pytest.raises(MemoryError):
            llm._step()
        assert len(engine.running) == 4 and engine.residents.limit == 4 + new // 2
        assert steps_that_failed(llm) == 0 and not engine.busy
        assert [request.finish_reason for request in requests] == ["length"] * (4 + new)
        assert [request.output_ids for request in requests] == good[: 4 + new]
        assert not any(request.metrics.preemptions for request in requests[:4])
