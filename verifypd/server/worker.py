"""An API worker: one event loop with uvicorn and the bridge in it. Knows sockets; nothing of routes or tensors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
import zmq
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from verifypd.config import EngineConfig
from verifypd.errors import TokenizerError
from verifypd.metrics.pauses import freeze_heap
from verifypd.server.bridge import Bridge
from verifypd.server.calls import NOT_WHOLE, CallError, unavailable
from verifypd.server.config import ServerConfig
from verifypd.server.lifeline import die_with, give_up, obey_parent
from verifypd.server.logs import set_up_logs
from verifypd.server.mailbox import Mailbox
from verifypd.server.messages import (
    Addresses,
    Drain,
    Drained,
    Quit,
    Serving,
    ToEngine,
    ToWorker,
    Up,
    encode,
    inbox,
    outbox,
)
from verifypd.server.upgrades import Parser
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PARENT_CHECK = 1.0  # s
LAST_WORDS = 2.0  # s open connections get when the server ends
MAX_HEAD = 1 << 16  # bytes of a request's line and headers
PIPELINED = 16  # requests of one connection that may wait behind another while it is read on
LOOK = 0.25  # s between two looks whether a client that will say no more is still there
SPARE_FILES = 256  # descriptors for anything but connections


def refusal(error: CallError) -> bytes:
    """The answer to a client whose request goes no further than its connection."""
    body = json.dumps(error.body()).encode()
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "content-type: application/json"]
    lines += [f"retry-after: {error.retry_after}"] if error.retry_after else []
    return "\r\n".join([*lines, f"content-length: {len(body)}", "connection: close", "", ""]).encode() + body


FULL = refusal(
    unavailable("this server has as many connections open as it may have; try again later", "too_many_connections")
)
LONG_HEAD = refusal(
    CallError(
        431,
        f"the request line and headers, or a chunk's line or trailers, are longer than {MAX_HEAD} bytes",
        code="headers_too_large",
    )
)
INCOMPLETE = refusal(CallError(400, NOT_WHOLE, code="incomplete_body"))
NO_HTTP = refusal(CallError(400, "that is not a valid HTTP request", code="invalid_http"))
NO_LENGTH = refusal(
    CallError(411, "the body has no length: send Content-Length or Transfer-Encoding: chunked", code="invalid_http")
)


class LongHeadError(Exception):
    """Stops the parser: the head of a request is too long."""


class Wire:
    """A streams.Wire over uvicorn: what its `send` does with a piece of a chunked body, without the way there."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the answer is under way and its client reads."""
        cycle = self._cycle
        under_way = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        return bool(under_way and not cycle.disconnected and not cycle.flow.write_paused)

    def write(self, data: bytes) -> None:
        """Send one chunk."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def unframed(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """The `send` of a cycle for a client of HTTP/1.0, which knows no chunks: the connection ends with the body."""
    send, endless = cycle.send, False

    async def sending(message: Any) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if endless:
                cycle.chunked_encoding = False
        elif endless:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sending


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on what a connection may hold: a time and a size for every request's head, a
    number of them.

    A client that ends its side of the connection after its requests still gets the answers. It may as well have left;
    that shows when something is sent to it, so where no answer has begun it is sent a `100 Continue`, which clients
    pass over.

    A client that never finishes its headers, on a new connection or on one it has used before, or that vanishes, does
    not keep its socket for ever. Beyond `max_connections` an idle connection makes room; where there is none, a client
    is told to come back later.
    """

    header_timeout = 30.0
    send_timeout = 60.0
    max_connections = 4096
    refused: Callable[[], None] = staticmethod(lambda: None)
    parser: Parser

    _head: asyncio.TimerHandle | None = None  # runs while the head of a request is awaited
    _cycles: tuple[RequestResponseCycle, ...] = ()  # requests without a whole answer, oldest first
    _full = False
    _deaf = False  # it was turned away: nothing more is read
    _ended = False  # the client will send no more
    _asked = False  # and was sent something to see whether it is there
    _in_head = True  # what comes next belongs to the head of a request
    _moved = False  # the data at hand brought the begin, the end or a part of the body of a request
    _head_read = 0  # bytes that were read since anything did: of a head, a chunk's size, headers behind the body
    _head_size = 0  # bytes of its lines that are whole
    _rest = memoryview(b"")  # comes after a head that was read again

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.parser = Parser(self)

    def connection_made(self, transport: Any) -> None:
        """Set the clocks of a new connection."""
        if len(self.connections) >= self.max_connections and not self._make_room():
            self._refuse(transport)
            return
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.send_timeout * 1e3))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that come before a request's head is whole do not set its clock back."""
        if self._deaf:
            return
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        self._moved = False
        super().data_received(data)
        while len(self._rest) and not self._deaf:
            rest, self._rest = self._rest, memoryview(b"")
            super().data_received(rest)  # type: ignore[arg-type]  # a parser takes any buffer
        if not self._moved and not self._deaf:
            self._head_read += len(data)
            if self._head_read > MAX_HEAD:
                self._give_up(LONG_HEAD)

    def on_message_begin(self) -> None:
        """A request begins: count its head anew."""
        self._moved, self._head_read, self._head_size = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one that follows the body is passed over, or it would count as part of the head."""
        self._count_head(len(name) + len(value))
        if self._in_head:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        """The request is whole; another may follow."""
        if self.parser.offered:
            return
        self._in_head, self._moved, self._head_read = True, True, 0
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._moved, self._head_read = True, 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; one whose head is too long is told so."""
        self._give_up(LONG_HEAD if self._head_size > MAX_HEAD else NO_HTTP)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self.parser.offered:
            return  # it comes again
        self._stop_clock()
        super().on_headers_complete()
        self._in_head, self._moved, self._head_read = False, True, 0
        if self.cycle is not None:
            self.cycle.scope["state"]["wire"] = Wire(self.cycle)
            if self.scope["http_version"] == "1.0":
                self.cycle.send = unframed(self.cycle)  # type: ignore[method-assign,assignment]
            self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)
        if 0 < len(self.pipeline) <= PIPELINED:
            self.flow.resume_reading()  # who does not read does not see the client leave

    def on_response_complete(self) -> None:
        """Answered: from here uvicorn's own clock for idle connections runs, until the next byte."""
        self._stop_clock()
        super().on_response_complete()
        if self._ended:
            self._await_departure()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks for it
        """The client has ended its side; whether the connection stays open for answers it is owed."""
        if self._full or self._deaf or self.cycle is None or is_ssl(self.transport):
            return False
        if self.cycle.more_body:
            self._give_up(INCOMPLETE)
            return not self.transport.is_closing()
        if not self._ended:
            self._ended = True
            self._stop_clock()
            self._await_departure()
        return not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell every request that is not answered; uvicorn tells the newest alone."""
        self._stop_clock()
        if self._full:
            return
        super().connection_lost(exc)
        self._leave()

    def pass_over(self, rest: memoryview) -> None:
        """Read the head at hand again, without its offer of another protocol; `rest` follows it."""
        head = self.parser.plain_head(self.url, self.headers)
        self.parser, self._rest = Parser(self), rest
        self.parser.feed_data(head)

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.header_timeout, self.transport.close)

    def _await_departure(self) -> None:
        """Until the last answer is out, look now and then whether there is anybody to read it."""
        if not self._owed():
            self.transport.close()
        else:
            self._head = self.loop.call_later(LOOK, self._look)

    def _look(self) -> None:
        raw = self.transport.get_extra_info("socket")
        if raw is not None and raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        first = self._owed()[0]
        if not first.response_started and not self._asked and first.scope["http_version"] == "1.1":
            self._asked = True
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._await_departure()

    def _owed(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _stop_clock(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise LongHeadError

    def _give_up(self, answer: bytes) -> None:
        """What came cannot be read. That is said where no other answer is under way, or owed before this one."""
        wrong = None if self._in_head else self.cycle
        owed = [cycle for cycle in self._owed() if cycle is not wrong]
        self._leave()
        if len(owed) == 1 and self._in_head and _lengthless(owed[0]):
            self._turn_away(NO_LENGTH)  # what came is its body
        elif owed or (wrong is not None and wrong.response_started):
            self._deaf = True
            self.transport.close()
        else:
            self._turn_away(answer)

    def _leave(self) -> None:
        """Tell every request that is not answered that its client is gone."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    @property
    def idle(self) -> bool:
        """Whether all it asked for is answered, and nothing more has come."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self._head is None and not self.transport.is_closing()

    def _make_room(self) -> bool:
        """End an idle connection; whether there was one."""
        other = next((each for each in self.connections if isinstance(each, Protocol) and each.idle), None)
        if other is not None:
            other.transport.close()
        return other is not None

    def _refuse(self, transport: Any) -> None:
        """Answer before anything is asked."""
        self._full, self.transport = True, transport
        self._turn_away(FULL)
        self.refused()

    def _turn_away(self, answer: bytes) -> None:
        """Say why, and end. Closing at once would take the answer from a client that still sends."""
        self._deaf = True
        self._stop_clock()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head = self.loop.call_later(LAST_WORDS, self.transport.close)


def _lengthless(cycle: RequestResponseCycle) -> bool:
    """Whether a request that should have a body says nothing of its length, and is not answered yet."""
    framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in cycle.scope["headers"])
    return cycle.scope["method"] in ("POST", "PUT", "PATCH") and not framed and not cycle.response_started


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor says when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Worker(Mailbox):
    """The sockets of one worker, in its event loop."""

    def __init__(self, index: int, config: ServerConfig, addresses: Addresses, bridge: Bridge, parent: int) -> None:
        super().__init__(bridge)
        self.index = index
        self.config = config
        self.addresses = addresses
        self.context = zmq.Context()
        self.server: Server | None = None
        self._engine: zmq.Socket | None = None
        self._parent = parent

    def start(self) -> None:
        """In the running loop: listen to the inbox and say that this worker serves. A later look for garbage among all
        that was imported would stop every stream for some 50 ms."""
        self.supervisor = outbox(self.context, self.addresses.supervisor())
        self.bridge.connect = self._connect
        self.bridge.on_idle = lambda: self.supervisor.send(encode(Drained(self.index)))
        self.open(inbox(self.context, self.addresses.worker(self.index)))
        freeze_heap()
        self.supervisor.send(encode(Serving(self.index)))
        self._watch_parent()

    def stop(self) -> None:
        """Close the sockets."""
        self.shut()
        self.context.destroy(linger=200)

    def _watch_parent(self) -> None:
        if os.getppid() != self._parent:  # the supervisor was killed
            os._exit(1)
        if not self._stopped:
            self.loop.call_later(PARENT_CHECK, self._watch_parent)

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Quit):
            self.bridge.fail_all(unavailable("the server is shutting down", "draining"))
            if self.server is not None:
                self.server.should_exit = True
        elif isinstance(message, Drain):
            self.bridge.drain()
        else:
            self.bridge.take(message)
            if isinstance(message, Up):
                self.supervisor.send(encode(Serving(self.index, message.epoch)))

    def _connect(self, address: str) -> Callable[[ToEngine], None]:
        """To a new engine; what was meant for the old one is dropped."""
        if self._engine is not None:
            self._engine.close(linger=0)
        self._engine = engine = outbox(self.context, address)
        return lambda message: engine.send(encode(message))


def allow_files(count: int) -> None:
    """Raise this process's limit of open files as far as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < count:
            log.warning("only %d files may be open here; --max-connections may not be reached", most)


def run_worker(
    index: int,
    engine_config: EngineConfig,
    config: ServerConfig,
    addresses: Addresses,
    listener: socket.socket,
    folder: str | None,
    parent: int,
) -> None:
    """Entry of the process."""
    die_with(parent)
    obey_parent(f"verifypd-api-{index}")
    set_up_logs(config.log_format, f"api-{index}")
    from verifypd.server.app import make_app

    try:
        tokenizer = Tokenizer.from_folder(Path(folder)) if folder is not None else None
        bridge = Bridge(index, tokenizer, config.retries)
        worker = Worker(index, config, addresses, bridge, parent)
        app = make_app(engine_config, config, bridge, tokenizer, worker.start, worker.stop)
    except TokenizerError as error:
        give_up(error)
    allow_files(config.max_connections + SPARE_FILES)
    limits = {name: getattr(config, name) for name in ("header_timeout", "send_timeout", "max_connections")}
    protocol = type("Protocol", (Protocol,), {**limits, "refused": staticmethod(app.state.connection_refused)})
    server = Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # a timer of any number
            timeout_graceful_shutdown=int(LAST_WORDS),
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
    )
    worker.server = server
    server.run(sockets=[listener])
