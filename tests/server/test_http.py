"""HTTP as the standards have it: old clients, half-closed connections, missing and wrong headers, bodies too large."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server import faulty
from tests.server.clients import connect, read_all, request_bytes
from tests.server.inprocess import api
from tests.server.serving import START, Server, events, launch
from verifypd.server.gate import BODIES, DISCARDED, Gate, Keys
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

ASK: dict[str, Any] = {"prompt": [5, 9, 200, 31], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**ASK, "max_tokens": 380, "n": 4, "seed": 1}


def old(request: bytes) -> bytes:
    return request.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: x\r\n", b"")


def parts(answer: bytes) -> tuple[bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0(server: Server, stream: bool) -> None:
    """No chunk sizes: the body is all there is until the connection ends."""
    with connect(server) as made:
        made.sendall(old(request_bytes("/v1/completions", {**ASK, "stream": stream})))
        head, body = parts(read_all(made))
    assert b" 200 " in head and b"transfer-encoding" not in head and b"connection: close" in head
    if stream:
        lines = [line for line in body.split(b"\n") if line]
        assert lines[-1] == b"data: [DONE]" and all(line.startswith(b"data: ") for line in lines)
        text = "".join(part["choices"][0]["text"] for part in events(body.decode()))
    else:
        text = json.loads(body)["choices"][0]["text"]
    assert text == server.complete(**ASK)["choices"][0]["text"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_ends_its_side_gets_its_answer(server: Server, stream: bool, version: str) -> None:
    ask = request_bytes("/v1/completions", {**LONG, "stream": stream})
    with connect(server) as made:
        made.sendall(old(ask) if version == "1.0" else ask)
        made.shutdown(socket.SHUT_WR)
        answer = read_all(made)
    answer = re.sub(rb"^(HTTP/1.1 100 Continue\r\n\r\n)+", b"", answer)
    head, body = parts(answer)
    assert b" 200 " in head and (b"[DONE]" in body if stream else b'"length"' in body)


def test_two_requests_and_then_no_more(server: Server) -> None:
    with connect(server) as made:
        made.sendall(2 * request_bytes("/v1/completions", ASK))
        made.shutdown(socket.SHUT_WR)
        assert read_all(made).count(b'"finish_reason":"length"') == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_is_still_seen_to_leave(server: Server, stream: bool) -> None:
    """It looks like one that only ends its side, until something is sent to it."""
    name = 'verifypd:calls_total{outcome="gone"}'
    before = server.idle().get(name, 0.0)
    for _ in range(6):  # one would be whole before it is seen to be gone
        made = connect(server)
        made.sendall(request_bytes("/v1/completions", {**LONG, "n": 8, "stream": stream}))
        time.sleep(0.2)
        made.close()
    assert server.idle(40)[name] > before


def test_half_a_request_and_then_no_more(server: Server) -> None:
    with connect(server) as made:
        made.sendall(request_bytes("/v1/completions", ASK)[:-5])
        made.shutdown(socket.SHUT_WR)
        head, body = parts(read_all(made))
    assert b" 400 " in head and json.loads(body)["error"]["code"] == "incomplete_body"


def test_no_host_or_two(server: Server) -> None:
    for head, status in (
        (b"GET /health HTTP/1.1\r\n", b" 400 "),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n", b" 400 "),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", b" 200 "),
        (b"GET /health HTTP/1.0\r\n", b" 200 "),
    ):
        with connect(server) as made:
            made.sendall(head + b"\r\n")
            answer, body = parts(read_all(made))
        assert status in answer
        if status == b" 400 ":
            assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
def test_bodies_that_are_no_plain_json(server: Server, path: str) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    for data, headers in (
        (body, {"Content-Type": "text/plain"}),
        (body, {"Content-Type": "application/x-www-form-urlencoded"}),
        (body, {"Content-Type": "multipart/form-data; boundary=x"}),
        (gzip.compress(body), {"Content-Encoding": "gzip"}),
    ):
        status, answer, _ = server.post(path, data, **headers)
        assert status == 415 and answer["error"]["code"].startswith("unsupported_")


HELLO = b'{"prompt": "x"}'


@pytest.mark.parametrize(
    ("coding", "status", "code"),
    [
        (b"gzip, chunked", b" 501 ", "unsupported_encoding"),
        (b"gzip\r\nTransfer-Encoding: chunked", b" 501 ", "unsupported_encoding"),
        (b"identity, chunked", b" 501 ", "unsupported_encoding"),
        (b"gzip", b" 400 ", "invalid_http"),
        (b"chunked, gzip", b" 400 ", "invalid_http"),
        (b"chunked, chunked", b" 400 ", "invalid_http"),
        (b"chunked\r\nContent-Length: 5", b" 400 ", "invalid_http"),
        (b"CHUNKED", b" 200 ", ""),
        (b", chunked", b" 200 ", ""),
    ],
)
def test_a_body_coded_on_its_way(server: Server, coding: bytes, status: bytes, code: str) -> None:
    """Only chunks are known: what is packed as well was read as if it were not."""
    data = gzip.compress(HELLO) if b"gzip" in coding else HELLO
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with connect(server, timeout=10) as made:
        made.sendall(head + b"Transfer-Encoding: " + coding + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        answer, body = parts(read_all(made))
    assert status in answer
    assert json.loads(body)["count"] if status == b" 200 " else json.loads(body)["error"]["code"] == code


def test_headers_that_follow_a_body_count_for_nothing(server: Server) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    late = b"Host: y\r\nContent-Encoding: gzip\r\nContent-Type: text/plain\r\nX-Request-Id: late\r\n"
    with connect(server, timeout=10) as made:
        made.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(HELLO), HELLO, late))
        answer, body = parts(read_all(made))
    assert b" 200 " in answer and b"late" not in answer and json.loads(body)["count"]


def test_a_body_without_a_length(server: Server) -> None:
    """It cannot be told from garbage behind the request; who sends it is told what is missing."""
    with connect(server, timeout=10) as made:
        made.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\r\n" + HELLO)
        answer, body = parts(read_all(made))
    assert b" 411 " in answer and "Content-Length" in json.loads(body)["error"]["message"]


def test_json_by_any_of_its_names(server: Server) -> None:
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        assert server.post("/tokenize", {"prompt": "x"}, **{"Content-Type": kind})[0] == 200
    assert server.post("/tokenize", {"prompt": "x"}, **{"Content-Encoding": "identity"})[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_a_client_that_sends_all_of_a_body_too_large_reads_why(server: Server, chunked: bool, more: bytes) -> None:
    """50 MB, and only then does it look for an answer."""
    piece = b"x" * 1_000_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + more
    with connect(server) as made:
        made.sendall(head + (b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 50000000\r\n\r\n"))
        for _ in range(50):
            made.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            made.sendall(b"0\r\n\r\n")
        answer, body = parts(read_all(made))
    assert b" 413 " in answer and json.loads(body)["error"]["code"] == "body_too_large"


def test_a_client_that_asks_first_is_not_asked_to_send(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
    begun = time.monotonic()
    with connect(server) as made:
        made.sendall(head)
        answer = read_all(made)
    assert answer.startswith(b"HTTP/1.1 413 ") and time.monotonic() - begun < 5


def test_the_documentation_needs_no_other_host(tokenizer: Tokenizer) -> None:
    with api(tokenizer) as client:
        answer = client.get("/docs")
        document = client.get("/openapi.json").json()
    assert answer.status_code == 200 and "<script" not in answer.text
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", answer.text) == ["data:,", "openapi.json"]
    assert all(f" {path}<" in answer.text for path in document["paths"])
    assert "continue_final_message" in answer.text and "number ≥ 0 ≤ 100" in answer.text
    assert "<code>StructuredOutputs</code></summary>" in answer.text and "integer ≥ -1 &lt; 2147483648" in answer.text


def test_a_server_that_ends_while_it_loads_leaves_nothing_behind(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is killed then; no semaphore of a progress bar is left for Python to warn of."""
    monkeypatch.setenv(faulty.VARIABLE, str(tmp_path))
    (tmp_path / "load").write_text("")
    with (tmp_path / "log").open("w") as log:
        process = launch(folders[0], "ngram", log, **{"engine-factory": "tests.server.faulty:build"})
        until = time.monotonic() + START
        while not (tmp_path / "loading").exists():
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=30)
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0 and "stopped" in text and "leaked" not in text, text[-2000:]


def test_a_body_that_was_refused_is_not_read_for_ever() -> None:
    async def work() -> None:
        sent: list[Any] = []
        read = 0

        async def receive() -> Any:
            nonlocal read
            read += 5
            return {"type": "http.request", "body": b"x" * 5, "more_body": read < 1000}

        async def send(message: Any) -> None:
            sent.append(message)

        gate = Gate(None, Keys(()), Keys(()), max_body=10, body_timeout=20.0, count=lambda path, status: None)
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "headers": [(b"host", b"x")]}
        await gate(scope, receive, send)
        assert sent[0]["status"] == 413 and not sent[-1].get("more_body") and read == 15 + DISCARDED * 10

    asyncio.run(work())


def test_who_is_cancelled_before_an_answer_is_told_that_the_server_ends() -> None:
    async def work() -> None:
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        gate = Gate(app, Keys(()), Keys(()), max_body=10, body_timeout=20.0, count=lambda path, status: None)
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/", "headers": [(b"host", b"x")]}
        task = asyncio.ensure_future(gate(scope, None, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task
        assert sent[0]["status"] == 503 and json.loads(sent[1]["body"])["error"]["code"] == "draining"

    asyncio.run(work())


def test_bodies_that_arrive_together_take_no_more_than_so_much_memory() -> None:
    """Who would take more is turned away; when others are done there is room again."""

    async def work() -> None:
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": (await receive())["body"]})

        gate = Gate(app, Keys(()), Keys(()), max_body=10, body_timeout=20.0, count=lambda path, status: None)

        async def ask() -> int:
            sent: list[Any] = []
            pieces = [{"type": "http.request", "body": b"x" * 9, "more_body": True}]

            async def receive() -> Any:
                if pieces:
                    return pieces.pop()
                await release.wait()
                return {"type": "http.request", "body": b"x", "more_body": False}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "headers": [(b"host", b"x")]}
            await gate(scope, receive, send)
            return int(sent[0]["status"])

        asked = [asyncio.ensure_future(ask()) for _ in range(BODIES + 20)]
        await asyncio.sleep(0.1)
        release.set()
        codes = [await each for each in asked]
        assert codes.count(200) == BODIES * 10 // 9 and set(codes) == {200, 503}
        assert await ask() == 200

    asyncio.run(work())
