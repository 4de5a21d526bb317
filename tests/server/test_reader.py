"""The process that reads large bodies: what it gives is what this process would, and it is replaced when it fails."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from verifypd.server import reader as reading
from verifypd.server.ask import Limits
from verifypd.server.calls import CallError
from verifypd.server.reader import Reader
from verifypd.server.tools import ToolFormat
from verifypd.server.works import Desk, read_and_do
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

LIMITS = Limits(max_model_len=30_000, vocab=384, max_output_tokens=None, max_choices=4, max_scores=1 << 20)
TEXT = "hello wörld 日 </s> " * 1000
SAID = {"role": "user", "content": TEXT}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def run(tokenizer: Tokenizer, work: Callable[[Reader], Awaitable[None]]) -> None:
    async def whole() -> None:
        reader = Reader(tokenizer.folder, "text", "reader-0")
        try:
            await asyncio.wait_for(work(reader), 100)
        finally:
            await reader.close()

    asyncio.run(whole())


async def outcome(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except CallError as error:
        return error.status, error.body()


def test_it_gives_what_this_process_would(tokenizer: Tokenizer) -> None:
    """Results and refusals alike, of every work."""
    bodies: list[tuple[str, Any]] = [
        ("completion", {"prompt": TEXT, "seed": 1, "request_id": "r", "model": "m"}),
        ("completion", {"prompt": [TEXT, "x"], "seed": 1, "echo": True, "logprobs": 2, "bad_words": ["a"]}),
        ("completion", {"prompt": "ab " * 80_000}),
        ("completion", {"prompt": ["x"] * 5}),
        ("completion", {"prompt": "x", "temperature": "hot"}),
        ("completion", {"prompt": "x", "nonsense": TEXT}),
        ("chat", {"messages": [SAID, SAID], "seed": 1, "tools": [TOOL], "tool_choice": "required"}),
        ("chat", {"messages": [{**SAID, "role": "assistant"}], "seed": 1, "continue_final_message": True}),
        ("chat", {"messages": [{"role": "user", "content": ""}] * 30_001}),
        ("chat", {"messages": []}),
        ("tokenize", {"prompt": TEXT, "return_token_strs": True}),
        ("tokenize", {"messages": [SAID]}),
        ("tokenize", {}),
        ("detokenize", {"tokens": [70, 71] * 9000}),
        ("detokenize", {"tokens": [70] * 30_000}),
    ]
    desk = Desk(LIMITS, tokenizer, ToolFormat.of(tokenizer), 3)

    async def here(name: str, data: bytes) -> Any:
        return read_and_do(name, data, desk)

    async def work(reader: Reader) -> None:
        for name, body in bodies:
            data = json.dumps(body).encode()
            theirs = await outcome(reader.read(name, data, LIMITS, 3))
            assert theirs == await outcome(here(name, data)), name
        assert (await outcome(reader.read("chat", b"{", LIMITS, 3)))[1]["error"]["code"] == "invalid_json"

    run(tokenizer, work)


def test_a_text_of_any_length_has_the_same_ids_and_its_memory_returns(tokenizer: Tokenizer) -> None:
    text = "a é" * 250_000

    async def work(reader: Reader) -> None:
        done = await reader.read("tokenize", json.dumps({"prompt": text}).encode(), LIMITS, 0)
        assert json.loads(done.value)["tokens"] == tokenizer.encode(text)
        assert reader._process is None, "it had grown and was ended"
        await reader.read("tokenize", b'{"prompt": "x"}', LIMITS, 0)
        assert reader._process is not None, "what is small does not make it grow"

    run(tokenizer, work)


def test_one_that_is_started_ahead_is_there_before_a_body_and_again_once_it_has_grown(tokenizer: Tokenizer) -> None:
    async def started(reader: Reader) -> int:
        while reader._process is None:
            await asyncio.sleep(0.01)
        return reader._process.pid

    async def work(reader: Reader) -> None:
        reader._ahead = True
        reader.start()
        pid = await started(reader)
        await reader.read("tokenize", b'{"prompt": "x"}', LIMITS, 0)
        assert await started(reader) == pid, "the body found it"
        await reader.read("tokenize", json.dumps({"prompt": "a é" * 250_000}).encode(), LIMITS, 0)
        assert await started(reader) != pid

    run(tokenizer, work)


def test_one_that_dies_or_takes_too_long_is_replaced(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = json.dumps({"prompt": "x"}).encode()
    slow = json.dumps({"prompt": TEXT * 60}).encode()

    async def work(reader: Reader) -> None:
        await reader.read("tokenize", ask, LIMITS, 0)
        assert reader._process is not None
        pid = reader._process.pid
        first, second = (asyncio.ensure_future(outcome(reader.read("tokenize", slow, LIMITS, 0))) for _ in range(2))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        status, body = await first
        assert status == 503 and body["error"]["code"] == "reader_lost"
        second.cancel()
        assert (await reader.read("tokenize", ask, LIMITS, 0)).value
        assert reader._process is not None and reader._process.pid != pid
        monkeypatch.setattr(reading, "SECONDS", 0.05)
        status, body = await outcome(reader.read("tokenize", slow, LIMITS, 0))
        assert status == 400 and body["error"]["code"] == "body_too_costly"
        monkeypatch.setattr(reading, "SECONDS", 120.0)
        assert (await reader.read("tokenize", ask, LIMITS, 0)).value

    run(tokenizer, work)


def test_the_smallest_goes_first_and_no_more_than_a_number_wait(tokenizer: Tokenizer) -> None:
    bodies = [json.dumps({"prompt": "x" * size}).encode() for size in (40_000, 30_000, 20_000, 10)]
    order: list[int] = []

    async def note(reader: Reader, data: bytes) -> None:
        await reader.read("tokenize", data, LIMITS, 0)
        order.append(len(data))

    async def work(reader: Reader) -> None:
        first = asyncio.ensure_future(note(reader, bodies[1]))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, *(note(reader, data) for data in bodies))
        assert order == [len(bodies[1]), *(len(data) for data in reversed(bodies))]
        many = [outcome(reader.read("tokenize", bodies[3], LIMITS, 0)) for _ in range(reading.MOST_WAITING + 9)]
        refused = [each for each in await asyncio.gather(*many) if isinstance(each, tuple)]
        assert len(refused) in (8, 9) and {status for status, _ in refused} == {429}

    run(tokenizer, work)


def test_a_full_queue_refuses_the_largest_and_does_not_count_who_has_left(tokenizer: Tokenizer) -> None:
    large, small = (json.dumps({"prompt": "x" * size}).encode() for size in (40_000, 20_000))

    async def work(reader: Reader) -> None:
        many = [asyncio.ensure_future(outcome(reader.read("tokenize", large, LIMITS, 0))) for _ in range(32)]
        await asyncio.sleep(0)
        assert (await outcome(reader.read("tokenize", small, LIMITS, 0))).value, "it is smaller than those that wait"
        assert many.pop().result()[1]["error"]["code"] == "too_many_large_bodies"
        for each in many[1:]:
            each.cancel()
        await asyncio.sleep(0)
        again = [outcome(reader.read("tokenize", large, LIMITS, 0)) for _ in range(reading.MOST_WAITING - 1)]
        assert all(not isinstance(each, tuple) for each in await asyncio.gather(*again))

    run(tokenizer, work)


def test_a_fault_answers_its_client_and_replaces_the_reader(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask = json.dumps({"prompt": "x"}).encode()

    async def work(reader: Reader) -> None:
        await reader.read("tokenize", ask, LIMITS, 0)
        assert reader._process is not None
        pid = reader._process.pid
        with monkeypatch.context() as faulty:
            faulty.setattr(pickle, "loads", lambda data: data.nonsense)
            status, body = await outcome(reader.read("tokenize", ask, LIMITS, 0))
        assert status == 500 and body["error"]["code"] == "internal_error"
        assert (await reader.read("tokenize", ask, LIMITS, 0)).value
        assert reader._process is not None and reader._process.pid != pid
        assert "a body could not be read" in caplog.text

    run(tokenizer, work)


@pytest.mark.parametrize("waits", ["before it leaves", "after it left"])
def test_nobody_waits_for_what_somebody_left(tokenizer: Tokenizer, waits: str) -> None:
    """The body that nobody wants takes long; the next one has an answer before it could be done."""
    ask, slow = (json.dumps({"prompt": text}).encode() for text in ("x", TEXT * 800))

    async def work(reader: Reader) -> None:
        await reader.read("tokenize", ask, LIMITS, 0)
        begun = time.monotonic()
        leaving = asyncio.ensure_future(reader.read("tokenize", slow, LIMITS, 0))
        await asyncio.sleep(0.1)
        other = asyncio.ensure_future(reader.read("tokenize", ask, LIMITS, 0)) if waits.startswith("before") else None
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        assert (await (other or reader.read("tokenize", ask, LIMITS, 0))).value
        assert time.monotonic() - begun < 10, "what nobody wants takes longer"

    run(tokenizer, work)


def test_without_a_tokenizer() -> None:
    async def work() -> None:
        reader = Reader(None, "json", "reader-0")
        done = await reader.read("completion", json.dumps({"prompt": [5] * 9000}).encode(), LIMITS, 0)
        assert done.value.ask.prompts == [[5] * 9000]
        status, _ = await outcome(reader.read("tokenize", b'{"prompt": "x"}', LIMITS, 0))
        assert status == 404
        await reader.close()

    asyncio.run(work())
