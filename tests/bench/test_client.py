"""The streaming client and what becomes of requests whose server misbehaves: nothing is lost, nothing hangs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from verifypd.bench import endpoint
from verifypd.bench.client import Address, Client, HTTPError
from verifypd.bench.endpoint import Endpoint
from verifypd.bench.figures import Outcome, figures
from verifypd.bench.play import Call, Drafts, Limits, play, warm_up
from verifypd.bench.workload import Arrival, Workload
from verifypd.errors import ConfigError, VerifyPDError

Reply = Callable[[str, dict[str, Any]], AsyncIterator[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = {"data": [{"id": "canned"}]}


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


def whole(content: Any, status: str = "200 OK") -> bytes:
    data = json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def steady(path: str, body: dict[str, Any], step: float = 0.02) -> AsyncIterator[bytes]:
    """Three outputs, one of them of two events; then usage."""
    yield HEAD
    yield chunk(event({"choices": [{"text": "a"}]}))
    await asyncio.sleep(step)
    yield chunk(event({"choices": [{"text": "b"}]}) + event({"choices": [{"text": "c"}]}))
    await asyncio.sleep(step)
    yield chunk('data: {"choices": [{"te')  # an event in two pieces
    yield chunk('xt": "d", "finish_reason": "length"}]}\n\n')
    yield chunk(event({"choices": [], "usage": {"completion_tokens": body["max_tokens"], "prompt_tokens": 9}}))
    yield chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


@asynccontextmanager
async def server(reply: Reply) -> AsyncIterator[str]:
    """A server that answers as told."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(h.partition(":")[2]) for h in head.split("\r\n") if h.lower().startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        path = head.split()[1]
        try:
            if path == "/v1/models":
                writer.write(whole(MODELS))
            elif not path.startswith("/v1"):
                writer.write(whole({}, "404 Not Found"))
            else:
                async for part in reply(path, body):
                    writer.write(part)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def played(reply: Reply, workload: Workload, limits: Limits | None = None) -> Outcome:
    async def run() -> Outcome:
        async with server(reply) as url:
            arm = Endpoint(url)
            await arm.start()
            return await play(arm, workload, limits or Limits(20.0, 10.0))

    return asyncio.run(run())


def some(count: int, clients: int | None = None, output: int = 4) -> Workload:
    return Workload("w", 0.0, tuple(Arrival(0.0, 5, output) for _ in range(count)), clients)


def test_a_stream_is_timed_output_by_output() -> None:
    outcome = played(steady, some(3))
    for record in outcome.records:
        assert record.finished and record.tokens == 4 and record.prompt_tokens == 9 and not record.error
        assert len(record.outputs) == 3  # two events that came together are one
        assert all(later - earlier > 0.01 for earlier, later in zip(record.outputs, record.outputs[1:], strict=False))


METRICS = b"""\
# TYPE verifypd:pauses counter
verifypd:pauses_total{kind="compiled",model_name="m"} 2.0
verifypd:pauses_total{kind="collected",model_name="m"} 5.0
verifypd:pause_seconds_total{kind="compiled",model_name="m"} 0.25
verifypd:memory_calls_total{model_name="m",kind="pinned"} 3.0
vllm:spec_decode_num_drafts_total{model_name="m"} 7.0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (METRICS, {"compiled": 2, "collected": 5, "compiled_ms": 250.0, "pinned": 3}),
        (b'vllm:spec_decode_num_drafts_total{model_name="m"} 7.0\n', None),  # another server's
        (None, None),
    ],
)
def test_pauses_are_read_from_metrics(
    text: bytes | None, expected: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(path: str, seconds: float) -> bytes:
        if text is None:
            raise HTTPError("HTTP 404")
        return text

    arm = Endpoint("h:1")
    monkeypatch.setattr(arm._client, "get", get)
    assert asyncio.run(arm.pauses()) == expected


def test_a_closed_loop_has_as_many_at_once_as_it_has_clients() -> None:
    under_way = most = 0

    async def counting(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        async for part in steady(path, body):
            yield part
        under_way -= 1

    outcome = played(counting, some(9, clients=3))
    assert most == 3 and len(outcome.records) == 9 and all(record.finished for record in outcome.records)
    starts = sorted(record.due for record in outcome.records)
    assert starts[2] < 0.03 < starts[3]
    most = 0
    played(counting, some(6), Limits(20.0, 10.0, at_once=2))
    assert most == 2


def test_an_open_loop_keeps_its_times() -> None:
    arrivals = tuple(Arrival(at, 5, 4) for at in (0.0, 0.1, 0.15))
    outcome = played(steady, Workload("w", 1.0, arrivals))
    assert [record.due for record in outcome.records] == [0.0, 0.1, 0.15]
    assert all(0 <= record.sent - record.due < 0.1 for record in outcome.records)


async def refused(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield whole({"error": {"message": "queue is\nfull"}}, "503 Service Unavailable")


async def broken(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk(event({"choices": [{"text": "a"}]}))


async def cut_short(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk(event({"choices": [{"text": "a"}]})) + b"0\r\n\r\n"


async def error_within(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk(event({"choices": [{"text": "a"}]}) + event({"error": {"message": "out of memory"}}))
    yield b"0\r\n\r\n"


async def no_json(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk("data: {oh\n\n")


async def no_choice(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk(event({"choices": [None]}))


async def no_usage(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk(event({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": "none"}))
    yield chunk("data: [DONE]\n\n")


async def no_http(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield b"hello\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refused, "HTTP 503: queue is full"),
        (broken, "the connection broke"),
        (cut_short, "the answer broke off"),
        (error_within, "out of memory"),
        (no_json, "no JSON"),
        (no_choice, "an event is not of OpenAI's form"),
        (no_usage, "an event is not of OpenAI's form"),
        (no_http, "no HTTP answer"),
    ],
)
def test_a_failure_is_in_the_outcome(reply: Reply, words: str) -> None:
    outcome = played(reply, some(3, clients=2))
    assert len(outcome.records) == 3 and all(words in record.error for record in outcome.records)
    found = figures([outcome])
    assert (found["failed"], found["unfinished"], found["e2e_ms_p95"]) == (3, 0, 0.0)


def test_some_failures_do_not_end_the_run() -> None:
    async def every_other(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for part in (refused if body["max_tokens"] == 1 else steady)(path, body):
            yield part

    mixed = Workload("w", 0.0, tuple(Arrival(0.0, 5, 1 + 3 * (i % 2)) for i in range(6)), 2)
    found = figures([played(every_other, mixed)])
    assert (found["failed"], found["unfinished"], found["requests"]) == (3, 0, 6)


async def hanging(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD
    yield chunk(event({"choices": [{"text": "a"}]}))
    await asyncio.sleep(30)


def test_a_request_that_takes_too_long_is_stopped_and_counted_until_then() -> None:
    outcome = played(hanging, some(2), Limits(20.0, 1.0))
    assert all(not record.finished and not record.error and len(record.outputs) == 1 for record in outcome.records)
    assert figures([outcome])["e2e_ms_p50"] == pytest.approx(1000, rel=0.5)


def test_a_cut_off_leaves_requests_unfinished() -> None:
    outcome = played(hanging, some(5, clients=2), Limits(1.0, 10.0))
    found = figures([outcome])
    assert (found["requests"], found["unfinished"], found["failed"]) == (5, 5, 0)
    assert len(outcome.records) == 2  # the others were never sent
    assert found["tok_s"] == pytest.approx(2, rel=0.3) and found["tok_s_original"] == 0
    assert found["e2e_ms_p50"] == pytest.approx(1000, rel=0.3)


@pytest.mark.parametrize(("ids", "tokens"), [(False, 7), (True, 9)])
def test_an_answer_that_is_cut_off_has_as_many_tokens_an_output_as_whole_ones(ids: bool, tokens: int) -> None:
    """Outputs after the first bring three tokens each in whole answers, and four, by their ids, in the one cut off."""

    async def drafting(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield HEAD
        whole = body["max_tokens"] == 10
        for i in range(4 if whole else 3):
            own = {"token_ids": [7] * (1 if i == 0 else 3 if whole else 4)} if ids else {}
            yield chunk(event({"choices": [{"text": "a", **own}]}))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0 if whole else 30)
        yield chunk(event({"choices": [], "usage": {"completion_tokens": 10}})) + b"0\r\n\r\n"

    arrivals = tuple(Arrival(0.0, 5, output) for output in (10, 10, 200))
    *others, cut = played(drafting, Workload("w", 0.0, arrivals), Limits(1.0, 10.0)).records
    assert [each.tokens for each in others] == [10, 10] and not cut.finished
    assert (cut.tokens, len(cut.outputs)) == (tokens, 3)


def test_an_arm_that_answers_nothing_is_refused_at_the_warm_up() -> None:
    async def run() -> None:
        async with server(refused) as url:
            await warm_up(Endpoint(url, name="bad"), some(4), Limits(5.0, 5.0))

    with pytest.raises(VerifyPDError, match="bad answers no request: HTTP 503"):
        asyncio.run(run())


def test_an_arm_that_shows_nothing_before_the_end_is_refused_at_the_warm_up() -> None:
    async def whole_answer(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield HEAD
        for part in [part async for part in steady(path, body)][-2:]:  # usage and end alone
            yield part

    async def run() -> None:
        async with server(whole_answer) as url:
            await warm_up(Endpoint(url, name="mute"), some(4), Limits(5.0, 5.0))

    with pytest.raises(VerifyPDError, match=r"mute sends tokens without text; .* return_token_ids=true"):
        asyncio.run(run())


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL"):
        Address.parse(url)


@pytest.mark.parametrize("url", ["http://h:1", "h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses_with_and_without_v1(url: str) -> None:
    assert str(Address.parse(url)) == "http://h:1"


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        asyncio.run(Endpoint("http://127.0.0.1:9", patience=0.0).start())


@pytest.mark.parametrize("path", ["/v1/models", "/ready"])
def test_a_server_that_loads_is_waited_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LOOK", 0.0)
    asked: list[str] = []

    async def get(page: str, seconds: float = 30.0) -> bytes:
        asked.append(page)
        if page == path and asked.count(page) < 3:
            raise HTTPError("HTTP 503: the engine is not up", 503)
        if page == "/ready" != path:
            raise HTTPError("HTTP 404", 404)  # as of other servers
        return json.dumps(MODELS).encode()

    arm = Endpoint("h:1")
    monkeypatch.setattr(arm._client, "get", get)
    asyncio.run(arm.start())
    assert asked.count(path) == 3 and arm.model == "canned"


@pytest.mark.parametrize("error", [HTTPError("HTTP 401", 401), ssl.SSLCertVerificationError("self-signed")])
def test_what_waiting_does_not_mend_is_told_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(page: str, seconds: float = 30.0) -> bytes:
        raise error

    arm = Endpoint("h:1", patience=60.0)
    monkeypatch.setattr(arm._client, "get", get)
    with pytest.raises(ConfigError, match=r"does not answer /v1/models: .*(401|self-signed)"):
        asyncio.run(asyncio.wait_for(arm.start(), 5.0))


def test_a_server_that_never_gets_ready_is_left_to_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(page: str, seconds: float = 30.0) -> bytes:
        if page == "/ready":
            raise HTTPError("HTTP 503", 503)
        return json.dumps(MODELS).encode()

    arm = Endpoint("h:1", patience=0.0)
    monkeypatch.setattr(arm._client, "get", get)
    assert asyncio.run(arm.start())["model"] == "canned"


def test_prompts_as_words_ids_and_messages() -> None:
    words = Endpoint("h:1", model="m")
    path, body = words.request(Arrival(0.0, 7, 3), 5)
    assert path == "/v1/completions" and len(body["prompt"].split()) == 7 and body["max_tokens"] == 3
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"]
    ids = Endpoint("h:1", model="m", vocab=100, fields={}).request(Arrival(0.0, 7, 3), 5)[1]
    assert len(ids["prompt"]) == 7 and all(3 <= each < 100 for each in ids["prompt"]) and "ignore_eos" not in ids
    assert (
        words.request(Arrival(0.0, 7, 3), 5)
        == words.request(Arrival(0.0, 7, 3), 5)
        != words.request(Arrival(0.0, 7, 3), 6)
    )
    path, body = words.request(Arrival(0.0, 0, 3, messages=({"role": "user", "content": "x"},)), 5)
    assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": "x"}]


def test_a_large_answer_and_a_body_without_length() -> None:
    async def run() -> None:
        async def reply(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
            yield b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000

        async with server(reply) as url:
            client = Client(Address.parse(url))
            assert len(await client.get("/v1/x")) == 300_000
            with pytest.raises(HTTPError, match="404"):
                await client.get("/nothing")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answers", "software", "server"),
    [
        ({"/version": {"version": "0.22.1"}}, "uvicorn", "0.22.1"),
        ({"/props": {"build_info": "b6102-abc"}}, "llama.cpp", "b6102-abc"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}}, "llama.cpp", "llamacpp, llama.cpp"),
        ({}, "", None),
    ],
)
def test_a_server_is_what_it_says_of_itself(
    answers: dict[str, Any], software: str, server: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing has no such entry."""
    arm = Endpoint("h:1")

    async def get(path: str, timeout: float = 30.0) -> bytes:
        arm._client.software = software
        if path not in answers | {"/v1/models": 0}:
            raise HTTPError("HTTP 404", 404)
        return json.dumps(answers.get(path, {"data": [{"id": "m"}]})).encode()

    monkeypatch.setattr(arm._client, "get", get)
    assert asyncio.run(arm.start()) == {"model": "m"} | ({} if server is None else {"server": server})


def test_a_servers_software_is_in_its_header() -> None:
    async def reply(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Length: 2\r\n\r\n{}"

    async def run() -> None:
        async with server(reply) as url:
            client = Client(Address.parse(url))
            await client.get("/v1/x")
            assert client.software == "llama.cpp"
            await client.get("/v1/models")
            assert client.software == ""

    asyncio.run(run())


def test_drafts_are_counted_between_two_looks() -> None:
    before, after = Drafts(10, 30, (8, 4)), Drafts(15, 48, (12, 6, 1))
    assert after.since(before) == Drafts(5, 18, (4, 2, 1))
    longer = Drafts(15, 48, (12, 6, 1), drafted=(15, 15, 3)).since(Drafts(10, 30, (8, 4), drafted=(10, 10)))
    assert longer == Drafts(5, 18, (4, 2, 1), drafted=(5, 5, 3))
    assert Drafts.unpacked(longer.packed()) == longer and Drafts.unpacked(None) is None
    assert Drafts.unpacked({"spans": 5, "tokens": 18, "accepted": [4, 2, 1]}) == after.since(before), "of older runs"


def test_our_server_says_how_many_drafts_had_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's says what stood by place, and no more."""
    others = (
        b'vllm:spec_decode_num_drafts_total{m="m"} 7.0\nvllm:spec_decode_num_draft_tokens_total{m="m"} 9.0\n'
        b'vllm:spec_decode_num_accepted_tokens_per_pos_total{m="m",position="0"} 6.0\n'
    )
    own = b"".join(b'verifypd:draft_tokens_per_pos_total{position="%d"} %d\n' % each for each in ((0, 7), (1, 2)))
    arm = Endpoint("h:1")
    for text, drafted in ((others, ()), (others + own, (7, 2))):

        async def get(path: str, seconds: float, text: bytes = text) -> bytes:
            return text

        monkeypatch.setattr(arm._client, "get", get)
        assert asyncio.run(arm.drafts()) == Drafts(7, 9, (6,), None, drafted)


@pytest.mark.parametrize("after", [Drafts(), Drafts(9, 40, (8, 5)), Drafts(11, 29, (8, 4)), Drafts(11, 40, (9, 3))])
def test_drafts_of_a_count_that_began_anew_are_not_known(after: Drafts) -> None:
    assert after.since(Drafts(10, 30, (8, 4))) is None


def test_a_call_whose_tokens_had_no_text_still_has_an_output() -> None:
    call = Call(Arrival(0.0, 1, 4), 0, lambda: 1.5, 0.0)
    call.ended(4, 2)
    assert call.record().outputs == (1.5,) and call.record().tokens == 4
