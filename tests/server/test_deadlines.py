"""Deadlines of calls, by the worker's own clock: without an engine, with one that hangs, before and after the end."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest

from tests.server.inprocess import INFO, connected
from verifypd.request import SamplingParams
from verifypd.server.bridge import Bridge
from verifypd.server.calls import Ask, Call, CallError
from verifypd.server.messages import Abort, Answer, Down, Output, Outputs, Up
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")


async def begun(bridge: Bridge, heard: list[Any], admitted: bool, deadline_ms: float) -> asyncio.Task[Call]:
    """A call of two choices that the engine has heard of; one of them may have ended."""
    params = SamplingParams(max_tokens=20, n=2, deadline_ms=deadline_ms)
    opening = asyncio.create_task(bridge.open("r", Ask([[5, 6]], params, [0]), time.monotonic()))
    await asyncio.sleep(0)
    if admitted:
        bridge.take(Answer(1, heard[-1].call))
        await asyncio.sleep(0)
    return opening


async def ended(opening: asyncio.Task[Call]) -> list[str | None]:
    """How its choices end; raises where it is refused."""
    call = await asyncio.wait_for(opening, 10)
    while not call.done:
        await asyncio.wait_for(call.news(), 10)
    return [choice.finish for choice in call.choices]


@pytest.mark.parametrize("admitted", [True, False])
def test_a_deadline_passes_while_there_is_no_engine(tokenizer: Tokenizer, admitted: bool) -> None:
    """A call that was let in ends with what it has; one that was not is refused."""

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        opening = await begun(bridge, heard, admitted, 200.0)
        bridge.take(Down(1, "killed"))
        told = len(heard)
        if admitted:
            assert await ended(opening) == ["deadline"] * 2
        else:
            with pytest.raises(CallError) as refused:
                await ended(opening)
            assert (refused.value.status, refused.value.code) == (429, "deadline_unreachable")
        bridge.take(Up(2, "there", INFO))
        if admitted:
            bridge.close(opening.result())
        assert len(heard) == told and not bridge.calls, "the next engine hears nothing of it"

    asyncio.run(run())


@pytest.mark.parametrize("admitted", [True, False])
def test_a_deadline_passes_while_the_engine_hangs(tokenizer: Tokenizer, admitted: bool) -> None:
    """The clock is the worker's own. What has ended keeps its reason; an engine that wakes up is told to stop."""

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        opening = await begun(bridge, heard, admitted, 200.0)
        number = heard[-1].call
        if admitted:
            half = tokenizer.encode("\u00e9", add_special_tokens=False)[:1]
            outputs = [Output(number, 0, [70, 71], "stop", None, []), Output(number, 1, half, None, None, [])]
            bridge.take(Outputs(1, outputs))
            assert await ended(opening) == ["stop", "deadline"]
            call = opening.result()
            assert call.choices[1].text.text == "\ufffd", "half a character is not left out"
            bridge.take(Outputs(1, [Output(number, 1, [73], None, None, [])]))
            assert [choice.tokens for choice in call.choices] == [2, 1], "what comes after it is late"
            bridge.close(call)
        else:
            with pytest.raises(CallError) as refused:
                await ended(opening)
            assert (refused.value.status, refused.value.param) == (429, "deadline_ms")
        assert heard[1:] == [Abort(0, number, -1, "deadline")] and not bridge.calls

    asyncio.run(run())


def test_a_deadline_that_has_passed_already_never_reaches_the_engine(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        bridge, heard = connected(tokenizer)
        ask = Ask([[5, 6]], SamplingParams(deadline_ms=50.0), [0])
        with pytest.raises(CallError, match="deadline_ms"):
            await bridge.open("r", ask, time.monotonic() - 1.0)
        assert not heard and not bridge.calls

    asyncio.run(run())


def test_a_deadline_passes_after_the_end(tokenizer: Tokenizer) -> None:
    """A client that is slow to take its answer gets it as it is, and the engine hears no more of it."""

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        call = await asyncio.wait_for(await begun(bridge, heard, True, 500.0), 10)
        bridge.take(Outputs(1, [Output(call.number, choice, [70], "length", None, []) for choice in (0, 1)]))
        told = len(heard)
        await asyncio.sleep(0.6)
        assert [choice.finish for choice in call.choices] == ["length"] * 2 and len(heard) == told

    asyncio.run(run())


def test_the_clock_of_a_call_stops_with_it(tokenizer: Tokenizer) -> None:
    """A day is the longest deadline: calls that have ended must not stay in memory for it."""

    async def run() -> bool:
        bridge, heard = connected(tokenizer)
        call = await asyncio.wait_for(await begun(bridge, heard, True, 86_400_000.0), 10)
        bridge.take(Outputs(1, [Output(call.number, choice, [70], "length", None, []) for choice in (0, 1)]))
        bridge.flush()
        bridge.close(call)
        found = weakref.ref(call)
        del call
        gc.collect()
        return found() is None

    assert asyncio.run(run())
