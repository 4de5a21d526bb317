"""The API worker's side without HTTP: calls tried again, streams, workers started again, the inbox."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.server.inprocess import INFO, answering, api, connected
from verifypd.request import SamplingParams
from verifypd.server.ask import Prepared
from verifypd.server.bridge import Bridge
from verifypd.server.calls import Ask, Call, CallError, broken
from verifypd.server.chat_render import ChatRenderer
from verifypd.server.completion_render import CompletionRenderer
from verifypd.server.config import ServerConfig
from verifypd.server.mailbox import FLOOD
from verifypd.server.messages import (
    Abort,
    Addresses,
    Answer,
    Begun,
    Down,
    Output,
    Outputs,
    Stats,
    Submit,
    Up,
    encode,
    inbox,
    outbox,
)
from verifypd.server.streams import EventStream, Sweeper
from verifypd.server.tools import ToolFormat
from verifypd.server.worker import Worker
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

ASK = Ask([[5, 6]], SamplingParams(max_tokens=20), [0])
HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
TEXT = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def opened(bridge: Bridge, heard: list[Any], ask: Ask) -> Call:
    opening = asyncio.create_task(bridge.open("r", ask, 0.0))
    await asyncio.sleep(0)
    bridge.take(Answer(bridge.up.epoch if bridge.up else 0, heard[-1].call))
    return await opening


def output(call: Call, tokens: list[int], finish: str | None = None) -> Output:
    return Output(call.number, 0, tokens, finish, None, [])


def test_what_is_being_read_when_a_drain_begins_is_let_in() -> None:
    """And the worker is idle only after it; what arrives later is refused."""

    async def work() -> None:
        bridge, heard = connected(None)
        idle: list[bool] = []
        bridge.on_idle = lambda: idle.append(True)
        arrival = time.monotonic()
        with bridge.reading(arrival) as ended:
            bridge.drain()
            assert not idle and not ended.done()
            for late in (bridge.open("late", ASK, time.monotonic()), _read(bridge, time.monotonic())):
                with pytest.raises(CallError, match="shutting down"):
                    await late
            opening = asyncio.create_task(bridge.open("r", ASK, arrival))
            await asyncio.sleep(0)
            bridge.take(Answer(1, heard[-1].call))
            call = await opening
        assert not idle
        bridge.close(call)
        assert idle
        with bridge.reading(arrival) as ended:
            bridge.fail_all(broken())
            assert ended.result().code == "internal_error"

    asyncio.run(work())


def test_an_answer_that_is_being_written_is_waited_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is over by then; a worker that counted as idle had two seconds for it, and answered 503."""
    bridge, _ = answering(tokenizer, [70, 71], "length")
    idle: list[bool] = []
    bridge.on_idle = lambda: idle.append(True)
    write = CompletionRenderer.whole

    async def writing(renderer: CompletionRenderer) -> bytes:
        bridge.drain()
        assert not bridge.calls and not idle
        return await write(renderer)

    monkeypatch.setattr(CompletionRenderer, "whole", writing)
    with api(tokenizer, bridge) as made:
        assert made.post("/v1/completions", json={"prompt": [5, 6]}).status_code == 200
    assert idle


async def _read(bridge: Bridge, arrival: float) -> None:
    with bridge.reading(arrival):
        raise AssertionError


def content(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    return [orjson.loads(line)["choices"][0]["delta"] for line in lines]


@pytest.mark.parametrize("cut", [3, 14, 20, 30])
def test_a_stream_with_tools_that_is_taken_up_again_says_everything_once(tokenizer: Tokenizer, cut: int) -> None:
    """What was held back when the engine died, because it might begin a call, is neither lost nor said twice."""

    async def run() -> bytes:
        bridge, heard = connected(tokenizer)
        ask = Ask([[5, 6]], SamplingParams(max_tokens=200), [0])
        call = await opened(bridge, heard, ask)
        prepared = Prepared(ask, True, False, False, None, tools=HERMES, tool_names=("f",))
        renderer = ChatRenderer(call, prepared, "m", tokenizer, 0)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        bridge.take(Outputs(1, [output(call, ids[:cut])]))
        assert renderer.news() == b"", "held back: it may be a call"
        bridge.take(Down(1, "killed"))
        bridge.take(Up(2, "there", INFO))
        assert isinstance(heard[-1], Submit) and heard[-1].call == call.number
        assert heard[-1].open == [Begun(0, ids[:cut])]
        data = renderer.news()
        bridge.take(Outputs(2, [output(call, ids[cut:], "length")]))
        return data + renderer.news()

    deltas = content(asyncio.run(run()))
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == ""
    [found] = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert json.loads(found["function"]["arguments"]) == {"a": 1}


def test_a_worker_that_is_started_again_takes_nothing_meant_for_the_one_before(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        before, heard_before = connected(tokenizer)
        after, heard_after = connected(tokenizer)
        ask = Ask([[5, 6]], SamplingParams(max_tokens=20), [0])
        old = [await opened(before, heard_before, ask) for _ in range(50)]
        new = [await opened(after, heard_after, ask) for _ in range(50)]
        assert not {call.number for call in old} & {call.number for call in new}
        after.take(Outputs(1, [output(call, [70, 71]) for call in old]))
        after.take(Answer(1, old[0].number, 400, "no"))
        assert all(call.choices[0].tokens == 0 and call.error is None for call in new)
        after.take(Outputs(1, [output(new[7], [70])]))
        assert [call.choices[0].tokens for call in new] == [0] * 7 + [1] + [0] * 42

    asyncio.run(run())


def test_a_call_that_waits_for_the_next_engine_does_not_outlive_the_last(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        bridge, heard = connected(tokenizer)
        call = await opened(bridge, heard, Ask([[5, 6]], SamplingParams(max_tokens=20), [0]))
        bridge.take(Down(1, "killed"))
        assert not call.done, "it is tried again"
        bridge.take(Down(1, "shutting down", final=True))
        assert call.error is not None and call.error.code == "engine_lost"

    asyncio.run(run())


def test_an_output_that_cannot_be_taken_fails_its_own_call_alone(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        bridge, heard = connected(tokenizer)
        ask = Ask([[5, 6]], SamplingParams(max_tokens=20), [0])
        calls = [await opened(bridge, heard, ask) for _ in range(3)]
        calls[1].choices[0].take = lambda output: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        bridge.take(Outputs(1, [output(call, [70, 71]) for call in calls]))
        bridge.flush()
        assert [call.choices[0].tokens for call in calls] == [2, 0, 2]
        assert [call.error.code if call.error else None for call in calls] == [None, "internal_error", None]
        bridge.close(calls[1])
        assert isinstance(heard[-1], Abort) and heard[-1].call == calls[1].number

    asyncio.run(run())


class FakeWire:
    """A connection that is full now and then."""

    def __init__(self, readiness: Iterator[bool]) -> None:
        self.readiness = readiness
        self.sent: list[bytes] = []

    @property
    def ready(self) -> bool:
        return next(self.readiness)

    def write(self, data: bytes) -> None:
        self.sent.append(data)


async def streamed(tokenizer: Tokenizer, wire: FakeWire | None, breaks: bool = False) -> tuple[bytes, int]:
    """What a client gets of a stream, and how much of it went straight to the wire."""
    bridge, heard = connected(tokenizer)
    ask = Ask([[5, 6]], SamplingParams(max_tokens=200, n=2), [0])
    call = await opened(bridge, heard, ask)
    renderer = CompletionRenderer(call, Prepared(ask, True, True, False, None), "m", tokenizer, 0)
    renderer._open = b"data: {"  # without the id, which is another each time
    got: list[bytes] = wire.sent if wire is not None else []

    async def send(message: Any) -> None:
        got.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = EventStream(call, renderer, bridge, Sweeper(60), lambda call, outcome: None)
    running = asyncio.create_task(response({"state": {"wire": wire}}, receive, send))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    direct = 0
    for index in range(40):
        if breaks and index == 20:
            renderer.news = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        finish = "length" if index == 39 else None
        bridge.take(Outputs(1, [Output(call.number, choice, [70 + index], finish, None, []) for choice in (0, 1)]))
        before = len(got)
        bridge.flush()
        direct += len(got) - before
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await running
    return b"".join(got), direct


@pytest.mark.parametrize("pattern", [(True,), (False,), (True, False), (True, True, False)])
def test_the_short_way_to_the_client_says_the_same(tokenizer: Tokenizer, pattern: tuple[bool, ...]) -> None:
    plain, none = asyncio.run(streamed(tokenizer, None))
    short, direct = asyncio.run(streamed(tokenizer, FakeWire(itertools.cycle(pattern))))
    assert short == plain and plain.count(b"data: {") > 40 and plain.endswith(b"[DONE]\n\n")
    assert not none and (direct > 10) == any(pattern)


def test_a_stream_that_cannot_be_written_down_fails_alone(tokenizer: Tokenizer) -> None:
    """Whatever goes wrong with one call's events stays with that call: the worker goes on reading messages."""
    data, direct = asyncio.run(streamed(tokenizer, FakeWire(itertools.repeat(True)), breaks=True))
    assert direct > 10 and b'"engine_error"' in data and data.endswith(b"[DONE]\n\n")


@pytest.mark.parametrize("echo", [None, ["xy"]])
def test_offsets_of_a_stream_are_those_of_the_whole_and_cost_no_more(
    tokenizer: Tokenizer, spelt: list[int], echo: list[str] | None
) -> None:
    async def run(events: int) -> list[dict[str, Any]]:
        bridge, heard = connected(tokenizer)
        ask = Ask([[5, 6]], SamplingParams(max_tokens=200, logprobs=0), [0])
        call = await opened(bridge, heard, ask)
        renderer = CompletionRenderer(call, Prepared(ask, True, False, False, 0, echo=echo), "m", tokenizer, 0)
        ids, found = list(range(70, 190)), []
        size = len(ids) // events
        for at in range(0, len(ids), size):
            rows = [[(token, -1.0, 1)] for token in ids[at : at + size]]
            prompt = [[(6, -1.0, 1)]] if at == 0 else None
            bridge.take(Outputs(1, [Output(call.number, 0, ids[at : at + size], None, None, [], rows, prompt)]))
            [choice] = orjson.loads(renderer.news().removeprefix(b"data: "))["choices"]
            found.append(choice["logprobs"])
        return found

    [whole] = asyncio.run(run(1))
    cost, parts = len(spelt), asyncio.run(run(120))
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [value for part in parts for value in part[name]] == whole[name]
    assert len(set(whole["text_offset"])) > 100 and len(spelt) == 2 * cost


# -- the inbox ---------------------------------------------------------------------------------------------------------


def test_who_serves_collects_nothing_that_lived_before() -> None:
    """Among all that was imported, a look for garbage would stop every stream."""

    async def run(folder: str) -> int:
        bridge, _ = connected(None)
        worker = Worker(0, ServerConfig(), Addresses(folder), bridge, os.getppid())
        supervisor = inbox(worker.context, worker.addresses.supervisor())
        worker.start()
        assert supervisor.poll(10_000)  # it says that it serves
        frozen = gc.get_freeze_count()
        supervisor.close()
        worker.stop()
        return frozen

    try:
        with tempfile.TemporaryDirectory() as folder:
            assert asyncio.run(asyncio.wait_for(run(folder), 30)) > 10_000
    finally:
        gc.unfreeze()


def test_an_engine_that_is_faster_than_its_worker_leaves_the_loop_its_turns() -> None:
    """Messages wait in the inbox by the thousand; clients have their turn after every flood of them."""

    async def run(folder: str) -> Counter[int]:
        loop, addresses, turn, taken = asyncio.get_running_loop(), Addresses(folder), 0, Counter[int]()

        def tick() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(tick)

        bridge, _ = connected(None)
        bridge.take = lambda message: taken.update([turn])  # type: ignore[method-assign]
        worker = Worker(0, ServerConfig(), addresses, bridge, os.getppid())
        supervisor = inbox(worker.context, addresses.supervisor())
        worker.start()
        engine = outbox(worker.context, addresses.worker(0))
        for _ in range(50 * FLOOD):
            engine.send(encode(Stats(1, {})))
        time.sleep(0.2)  # they travel in threads of ZeroMQ
        for _ in range(8):
            worker._readable()  # the descriptor and the clock may both call while there is more to come
        tick()
        while taken.total() < 50 * FLOOD:
            await asyncio.sleep(0)
        supervisor.close()
        worker.stop()
        worker._readable()  # a turn that was still to come finds nothing to do
        del taken[0]  # before the loop had a turn
        return taken

    with tempfile.TemporaryDirectory() as folder:
        taken = asyncio.run(asyncio.wait_for(run(folder), 30))
    gc.unfreeze()
    assert max(taken.values()) <= 3 * FLOOD
