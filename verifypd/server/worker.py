"""An API worker: one event loop with uvicorn and the bridge in it. Knows sockets; nothing of routes or tensors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import zmq
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verifypd.config import EngineConfig
from verifypd.server.bridge import Bridge
from verifypd.server.calls import unavailable
from verifypd.server.config import ServerConfig
from verifypd.server.lifeline import die_with
from verifypd.server.logs import set_up_logs
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
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DECODER = msgspec.msgpack.Decoder(ToWorker)
PARENT_CHECK = 1.0  # s
LAST_WORDS = 2.0  # s open connections get when the server ends


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol; a client that never finishes its headers, or vanishes, does not keep its socket for ever."""

    header_timeout = 30.0
    send_timeout = 60.0

    def connection_made(self, transport: Any) -> None:
        """Set the clocks of a new connection."""
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.send_timeout * 1e3))
        self._headers = self.loop.call_later(self.header_timeout, self._too_slow)

    def _too_slow(self) -> None:
        if self.cycle is None and self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._headers.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor says when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Worker:
    """The sockets of one worker, in its event loop."""

    def __init__(self, index: int, config: ServerConfig, addresses: Addresses, bridge: Bridge, parent: int) -> None:
        self.index = index
        self.config = config
        self.addresses = addresses
        self.bridge = bridge
        self.context = zmq.Context()
        self.server: Server | None = None
        self._engine: zmq.Socket | None = None
        self._parent = parent

    def start(self) -> None:
        """In the running loop: listen to the inbox and say that this worker serves."""
        self.loop = asyncio.get_running_loop()
        self.inbox = inbox(self.context, self.addresses.worker(self.index))
        self.supervisor = outbox(self.context, self.addresses.supervisor())
        self.bridge.connect = self._connect
        self.bridge.on_idle = lambda: self.supervisor.send(encode(Drained(self.index)))
        self.loop.add_reader(self.inbox.fileno(), self._readable)
        self.supervisor.send(encode(Serving(self.index)))
        self._watch_parent()
        self._readable()

    def stop(self) -> None:
        """Close the sockets."""
        self.loop.remove_reader(self.inbox.fileno())
        self.context.destroy(linger=200)

    def _watch_parent(self) -> None:
        if os.getppid() != self._parent:  # the supervisor was killed
            os._exit(1)
        self.loop.call_later(PARENT_CHECK, self._watch_parent)
        self._readable()  # the descriptor fires on edges only: never miss one for long

    def _readable(self) -> None:
        while True:
            try:
                data = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = DECODER.decode(data)
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
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the supervisor decides when this process ends
    set_up_logs(config.log_format, f"api-{index}")
    from verifypd.server.app import make_app

    tokenizer = Tokenizer.from_folder(Path(folder)) if folder is not None else None
    bridge = Bridge(index, tokenizer, config.retries)
    worker = Worker(index, config, addresses, bridge, parent)
    app = make_app(engine_config, config, bridge, tokenizer, worker.start, worker.stop)
    protocol = type(
        "Protocol", (Protocol,), {"header_timeout": config.header_timeout, "send_timeout": config.send_timeout}
    )
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
            timeout_graceful_shutdown=int(LAST_WORDS),
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
    )
    worker.server = server
    server.run(sockets=[listener])
