"""One connection of an API worker without a socket: what it reads and answers, given just these bytes at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from verifypd.server.worker import MAX_HEAD, PIPELINED, Protocol

pytestmark = pytest.mark.xdist_group("server")

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = b"X: " + b"a" * (MAX_HEAD * 3 // 4) + b"\r\n"  # once it fits, twice it does not


class Transport(asyncio.Transport):
    """The other side of the connection: keeps what is written, and whether anybody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.reading = True
        self.closed = self.ended = False

    def write(self, data: Any) -> None:
        assert not self.ended and not self.closed, "nothing can be written after the end"
        self.data += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def codes(self) -> list[int]:
        """The status of each answer."""
        return [int(part[:3]) for part in self.data.split(b"HTTP/1.1 ")[1:]]


class Connection:
    """A protocol over a transport, and an app that answers when it is told to."""

    def __init__(self, state: ServerState | None = None, **limits: int) -> None:
        self.seen: list[str] = []  # how the body of each request ended
        self.bodies: list[bytes] = []
        self.early = False  # answers begin before the body is there
        self.go = asyncio.Event()
        config = uvicorn.Config(self.app, interface="asgi3", ws="none", lifespan="off", log_config=None)
        config.load()
        self.state = state or ServerState()
        self.protocol = type("Limited", (Protocol,), limits)(config, self.state, {}, asyncio.get_running_loop())
        self.transport = Transport()
        self.protocol.connection_made(self.transport)

    async def app(self, _scope: Any, receive: Any, send: Any) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        message = {"type": "http.request", "more_body": True}
        if self.early:
            await send(head)
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
        body = b""
        while message["type"] == "http.request" and message["more_body"]:
            message = await receive()
            body += message.get("body", b"")
        self.seen.append(message["type"])
        self.bodies.append(body)
        await self.go.wait()
        if not self.early:
            await send(head)
        await send({"type": "http.response.body", "body": b"k" if self.early else b"ok"})

    async def feed(self, *pieces: bytes) -> None:
        """Give it these pieces, and the app its turns after each."""
        for piece in pieces:
            self.protocol.data_received(piece)
            for _ in range(8):
                await asyncio.sleep(0)

    async def lose(self) -> None:
        """The client is gone."""
        self.protocol.connection_lost(None)
        for _ in range(8):
            await asyncio.sleep(0)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 20)

    asyncio.run(bounded())


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /" + b"a" * (MAX_HEAD + 1) + b" HTTP/1.1\r\n\r\n",),
        (b"GET /" + b"a" * (MAX_HEAD // 2), b"a" * (MAX_HEAD // 2 + 1) + b" HTTP/1.1\r\n\r\n"),
        (GET + LONG + LONG + b"\r\n",),
        (GET + LONG, LONG + b"\r\n"),
        (GET, *(LONG[i : i + 1000] for i in range(0, len(LONG) - 2, 1000)), b"a" * MAX_HEAD),
        (b"\r\n" * MAX_HEAD,),
    ],
    ids=["path", "path in two", "two headers", "in two", "one without end", "empty lines"],
)
def test_a_head_too_long_is_told_so(pieces: tuple[bytes, ...]) -> None:
    async def work() -> None:
        for before in ((), (GET + LONG + b"\r\n",)):
            made = Connection()
            made.go.set()
            await made.feed(*before, *pieces, GET + b"\r\n")
            assert made.transport.codes() == [200] * len(before) + [431] and made.transport.ended
            assert json.loads(made.transport.data.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
            assert made.seen == ["http.request"] * len(before), "what follows is not read"

    run(work)


@pytest.mark.parametrize(
    "start",
    [b"2\r\nhi\r\n0\r\nX: ", b"2\r\nhi\r\n0\r\nX", b"2;", b"2\r\nhi\r\n2;a="],
    ids=["trailer", "name of a trailer", "extension", "extension of the next"],
)
@pytest.mark.parametrize("size", [1000, MAX_HEAD * 3 // 4])
def test_a_line_of_a_body_without_end_is_told_so(start: bytes, size: int) -> None:
    """The parser gathers it: a hundred megabytes behind a body kept everybody waiting for half a minute."""

    async def work() -> None:
        made = Connection()
        pieces = MAX_HEAD // size
        await made.feed(CHUNKED + start, *[b"a" * size] * pieces)
        assert not made.transport.data and not made.transport.ended
        await made.feed(b"a" * size)
        assert made.transport.codes() == [431] and made.transport.ended and made.seen == ["http.disconnect"]
        made.go.set()
        await made.feed(b"a" * size, b"\r\n\r\n" + GET + b"\r\n")
        assert made.transport.codes() == [431] and len(made.seen) == 1

    run(work)


def test_many_chunks_and_what_is_about_them() -> None:
    async def work() -> None:
        made = Connection()
        made.go.set()
        chunk = b"1;" + b"a" * 1000 + b"\r\nx\r\n"
        data = CHUNKED + chunk * 1000 + b"0\r\nX: " + b"a" * 1000 + b"\r\n\r\n" + GET + b"\r\n"
        await made.feed(*(data[at : at + 700] for at in range(0, len(data), 700)))
        assert made.bodies == [b"x" * 1000, b""] and made.transport.codes() == [200, 200]

    run(work)


def test_what_is_no_head_does_not_count_as_one() -> None:
    """Neither bodies, whole or in pieces, nor the heads of requests before it."""

    async def work() -> None:
        body = b"x" * (2 * MAX_HEAD)
        post = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
        for pieces in (
            (GET + LONG + b"\r\n", GET + LONG + b"\r\n", GET + LONG + b"\r\n"),
            (post + b"\r\n" + body, GET + LONG + b"\r\n"),
            (post + b"\r\n", body, GET + LONG + b"\r\n"),
            (post + LONG + b"\r\n", body[:1000], body[1000:] + GET + b"\r\n"),
            (post + b"\r\n", *(body[i : i + 1000] for i in range(0, len(body), 1000)), GET + b"\r\n"),
        ):
            made = Connection()
            made.go.set()
            await made.feed(*pieces)
            assert set(made.transport.codes()) == {200} and len(made.seen) == len(made.transport.codes()) >= 2
            await made.lose()

    run(work)


@pytest.mark.parametrize("junk", [GET + LONG + LONG + b"\r\n", b"\x00\xff\r\n\r\n"], ids=["long", "garbage"])
def test_what_cannot_be_read_does_not_come_into_an_answer(junk: bytes) -> None:
    """Behind a request whose answer is owed or under way it ends the connection, and that request is told."""

    async def work() -> None:
        made = Connection()
        await made.feed(GET + b"\r\n", junk)
        assert made.transport.closed and not made.transport.data
        made.go.set()
        await made.lose()
        assert not made.transport.data and made.seen == ["http.request"]
        after = Connection()
        after.go.set()
        await after.feed(GET + b"\r\n", junk)
        assert after.transport.codes()[0] == 200 and after.transport.codes()[1] in (400, 431)

    run(work)


def test_a_body_that_is_no_http_is_answered_once() -> None:
    async def work() -> None:
        made = Connection()
        await made.feed(CHUNKED, b"no size\r\n")
        assert made.transport.codes() == [400] and b"invalid_http" in made.transport.data
        made.go.set()
        await made.feed(GET + b"\r\n")
        assert made.seen == ["http.disconnect"] and made.transport.codes() == [400]
        begun = Connection()
        begun.early = True
        await begun.feed(CHUNKED, b"no size\r\n")
        assert (
            begun.transport.codes() == [200] and begun.transport.closed and b"invalid_http" not in begun.transport.data
        )

    run(work)


def test_a_client_beyond_the_limit_is_not_read() -> None:
    async def work() -> None:
        state = ServerState()
        first, second = Connection(state, max_connections=1), Connection(state, max_connections=1)
        second.go.set()
        await second.feed(GET + b"\r\n", b"\x00")
        assert second.transport.codes() == [503] and second.transport.ended and not second.seen
        assert not first.transport.data
        await second.lose()
        await first.lose()

    run(work)


def test_requests_behind_another_are_read_up_to_a_number() -> None:
    """While it is read on the client is seen to leave, and then each of them is told; without end it must not be."""

    async def work() -> None:
        made = Connection()
        for _ in range(PIPELINED + 1):
            assert made.transport.reading
            await made.feed(GET + b"\r\n")
        assert made.transport.reading
        await made.feed(GET + b"\r\n")
        assert not made.transport.reading
        made.go.set()
        await made.feed()
        for _ in range(20 * PIPELINED):
            await asyncio.sleep(0)
        assert made.transport.codes() == [200] * (PIPELINED + 2) and made.transport.reading
        await made.lose()

    run(work)


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
ASKED = b"POST /a HTTP/1.1\r\nHost: x\r\n" + OFFER


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "first",
    [
        ASKED + b"Content-Length: 5\r\n\r\nhello",
        ASKED + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nhello",
    ],
    ids=["length", "chunks", "websocket"],
)
def test_an_offer_of_another_protocol_is_passed_over(first: bytes, size: int) -> None:
    """Java's client makes one with every request; its body, and the requests behind it, are read as any other."""

    async def work() -> None:
        made = Connection()
        made.go.set()
        data = first + GET + OFFER + b"\r\n" + first
        await made.feed(*(data[at : at + size] for at in range(0, len(data), size)), b"")
        assert made.transport.codes() == [200] * 3 and made.bodies == [b"hello", b"", b"hello"]
        assert not made.transport.closed and not made.transport.ended

    run(work)


def test_an_offer_changes_nothing_else() -> None:
    async def work() -> None:
        made = Connection()
        made.go.set()
        await made.feed(ASKED.replace(b"Upgrade,", b"close, Upgrade,") + b"Content-Length: 2\r\n\r\nhi")
        assert made.transport.codes() == [200] and made.transport.closed, "it asked for an end too"
        for wrong in (b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi", b"Transfer-Encoding: chunked\r\n\r\nx\r\n"):
            other = Connection()
            await other.feed(ASKED + wrong)
            assert other.transport.codes() == [400]
        long = Connection()
        await long.feed(ASKED + LONG + LONG + b"\r\n")
        assert long.transport.codes() == [431]
        many = Connection()
        many.go.set()
        await many.feed((GET + OFFER + b"\r\n") * 2000)
        assert many.transport.codes()[:3] == [200] * 3

    run(work)
