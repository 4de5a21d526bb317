"""Clients that misbehave on the wire: they leave, do not read, fall silent, or send half, too much, or garbage."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import socket
import struct
import sys
import time
from pathlib import Path

import pytest

from tests.server.clients import Stream, connect, read_all, request_bytes, vanish
from tests.server.frail import CONNECTIONS, all_at_once, body
from tests.server.serving import Server

pytestmark = pytest.mark.xdist_group("server-wire")


def test_a_client_that_leaves_frees_its_memory(frail: Server) -> None:
    """Streaming or not, with another request behind it or not: what it asked for is aborted, and does not run on."""
    before = frail.idle()
    for stream, another in ((True, False), (False, False), (True, True), (False, True)):
        ask = request_bytes("/v1/completions", {**body(0), "stream": stream, "n": 4, "seed": 1, "max_tokens": 380})
        made = connect(frail)
        made.sendall(ask)
        until = time.monotonic() + 10
        while frail.metrics()["vllm:num_requests_running"] < 4 and time.monotonic() < until:
            time.sleep(0.01)
        if another:
            made.sendall(ask)
            time.sleep(0.1)
        vanish(made)
        now = frail.idle()
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    assert now[aborted] == before.get(aborted, 0) + 16
    assert now['verifypd:calls_total{outcome="gone"}'] >= 4


def dropped(server: Server) -> float:
    """Calls that ended because their client did not read: seen by us, or by the kernel."""
    now = server.metrics()
    return sum(now.get(f'verifypd:calls_total{{outcome="{name}"}}', 0.0) for name in ("unread", "gone"))


def test_a_client_that_does_not_read(frail: Server, texts: list[str]) -> None:
    """Nobody else waits for it, its request does not stay in the engine, and it is dropped in the end."""
    before = dropped(frail)
    made = connect(frail, receive_buffer=4096)
    wide = {**body(0), "n": 8, "seed": 1, "temperature": 1, "logprobs": 20, "stream": True, "max_tokens": 380}
    made.sendall(request_bytes("/v1/completions", wide))
    made.recv(100)
    other = Stream(frail, body(1)).start().join()
    assert other.text == texts[1]
    frail.idle(40)
    until = time.monotonic() + 20
    while dropped(frail) == before:
        assert time.monotonic() < until, f"it was never dropped: {frail.metrics()}"
        time.sleep(0.1)
    data = read_all(made)
    assert b"[DONE]" not in data
    made.close()


def fall_silent(made: socket.socket) -> None:
    """From here on the kernel drops what arrives, unacknowledged, and sends no reset: a cable that was pulled."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of every packet
    made.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(code)))  # SO_ATTACH_FILTER


def established(server: Server, port: int) -> bool:
    """Whether the server's kernel still has the connection from this port of loopback."""
    ends = f"0100007F:{server.port:04X} 0100007F:{port:04X} 01 "
    return ends in Path("/proc/net/tcp").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="drops packets with a filter of Linux")
def test_a_client_that_falls_silent(frail: Server) -> None:
    """No end and no reset ever come of it: its call ends, its memory is free, and its connection does not stay."""
    before = dropped(frail)
    made = connect(frail)
    wide = {**body(0), "n": 8, "seed": 1, "temperature": 1, "logprobs": 20, "stream": True, "max_tokens": 380}
    made.sendall(request_bytes("/v1/completions", wide))
    made.recv(100)
    port = made.getsockname()[1]
    assert established(frail, port)
    fall_silent(made)
    frail.idle(40)
    until = time.monotonic() + 20
    while dropped(frail) == before or established(frail, port):
        assert time.monotonic() < until, "its connection is still there"
        time.sleep(0.1)
    made.close()


def test_half_a_request(frail: Server) -> None:
    """Half a head is closed, half a body is answered, both after the time a client has for it."""
    head, part = connect(frail), connect(frail)
    head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    part.sendall(request_bytes("/v1/completions", body(0))[:-20])
    assert read_all(head) == b""
    assert b" 408 " in read_all(part).split(b"\r\n")[0]
    head.close()
    part.close()


def use(made: socket.socket, request: bytes = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") -> None:
    """Ask for something, and take the whole answer."""
    made.sendall(request)
    answer = b""
    while not answer.endswith(b"}"):
        part = made.recv(4096)
        assert part, "it was closed"
        answer += part
    assert b" 200 " in answer


def test_half_a_request_on_a_connection_that_was_used_before(frail: Server) -> None:
    """The head of every request has its time, not only that of the first; drops of it do not set the clock back."""
    drops = {connect(frail): drop for drop in (b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 100, b"\r\n" * 60)}
    for made in drops:
        use(made)
        made.settimeout(0.1)
    still = set(drops)
    for pair in itertools.zip_longest(*drops.values(), fillvalue=10):
        still = {made for made, drop in zip(drops, pair, strict=True) if made in still and drips(made, drop)}
    assert not still, "it is still open"
    for made in drops:
        made.close()


def test_an_idle_connection_is_kept_for_its_time(frail: Server) -> None:
    """Longer than uvicorn's five seconds, after which a load balancer's next call on it would fail; not for ever."""
    made = connect(frail)
    use(made)
    time.sleep(5.5)
    use(made)
    assert read_all(made) == b""
    made.close()


def drips(made: socket.socket, drop: int) -> bool:
    """Send one byte; whether the connection is still open a moment later."""
    try:
        made.sendall(bytes([drop]))
        return made.recv(100) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_more_connections_than_allowed(frail: Server) -> None:
    """Those beyond are told so at once, whether they ask or not; when others leave there is room again."""
    idle = [connect(frail) for _ in range(CONNECTIONS)]
    for ask in (b"", request_bytes("/v1/completions", body(0))):
        made = connect(frail)
        made.sendall(ask)
        head, _, text = read_all(made).partition(b"\r\n\r\n")
        assert b" 503 " in head and b"retry-after" in head and b"too_many_connections" in text
        made.close()
    for made in idle:
        made.close()
    frail.wait_ready()
    assert frail.metrics()['verifypd:refused_total{code="too_many_connections"}'] >= 2


def test_idle_connections_make_room_for_others(frail: Server) -> None:
    """One whose calls are answered gives way to one that calls; one that still waits for its answer does not."""
    opened = [connect(frail)]
    opened[0].sendall(request_bytes("/v1/completions", body(0)))
    for _ in range(CONNECTIONS + 5):
        opened.append(connect(frail))
        use(opened[-1])
    assert b" 200 " in opened[0].recv(100)
    for made in opened:
        made.close()


def test_a_body_too_large(frail: Server) -> None:
    status, answer, _ = frail.post("/v1/completions", {"prompt": "x" * 200_000})
    assert status == 413 and answer["error"]["code"] == "body_too_large"
    made = connect(frail)
    made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    made.sendall(chunk * 2)
    assert b" 413 " in made.recv(1000)
    made.close()


@pytest.mark.parametrize("used", [False, True])
def test_a_head_too_long(frail: Server, used: bool) -> None:
    """One header without end, very many of them, a path without end: each is told so, on a used connection too."""
    begin = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    for head in (
        begin + b"X: " + b"a" * 300_000,
        begin + b"X: a\r\n" * 30_000,
        begin + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 300_000,
    ):
        made = connect(frail)
        if used:
            use(made, begin + b"X: " + b"a" * 50_000 + b"\r\n\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for at in range(0, len(head), 10_000):
                made.sendall(head[at : at + 10_000])
        answer = read_all(made)
        assert b" 431 " in answer.split(b"\r\n")[0] and b"headers_too_large" in answer
        made.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00\xff\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
)
def test_garbage_on_the_wire(frail: Server, junk: bytes) -> None:
    """One answer, in the shape of all errors, on a used connection too; what follows the garbage is not read."""
    for used in (False, True):
        made = connect(frail)
        if used:
            use(made)
        made.sendall(junk + b"GET /health HTTP/1.1\r\n\r\n")
        head, _, text = read_all(made).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
        assert json.loads(text)["error"]["code"] == "invalid_http"
        made.close()


def test_garbage_behind_a_request_does_not_come_into_its_answer(frail: Server) -> None:
    for stream in (True, False):
        made = connect(frail)
        made.sendall(request_bytes("/v1/completions", {**body(0), "stream": stream}) + b"\x00\xff\r\n\r\n")
        assert b" 400 " not in read_all(made)
        made.close()
    frail.idle()


def test_calls_do_not_cross_after_all_that(frail: Server, texts: list[str]) -> None:
    assert all_at_once(frail) == texts
    frail.idle()
