"""Takes what the engines send to an API process, in its event loop. Knows sockets and the bridge; nothing of HTTP."""

from __future__ import annotations

import asyncio

import msgspec
import zmq

from verifypd.server.bridge import Bridge
from verifypd.server.messages import ToWorker

DECODER = msgspec.msgpack.Decoder(ToWorker)
LOOK = 1.0  # s between two looks that nothing has asked for
FLOOD = 64  # messages that are taken before what they brought is passed on and others have their turn


class Mailbox:
    """One inbox, and the bridge that its messages are for."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self._stopped = False
        self._again = False  # a look at the inbox is already waiting for its turn

    def open(self, inbox: zmq.Socket) -> None:
        """In the running loop: take from this socket."""
        self.loop = asyncio.get_running_loop()
        self.inbox = inbox
        self.loop.add_reader(inbox.fileno(), self._readable)
        self._look()

    def shut(self) -> None:
        """Take nothing more."""
        self._stopped = True
        self.loop.remove_reader(self.inbox.fileno())

    def _look(self) -> None:
        """The descriptor fires on edges only: never miss one for long."""
        if not self._stopped:
            self.loop.call_later(LOOK, self._look)
            self._readable()

    def _readable(self) -> None:
        """Take what has arrived, then pass it on. After a flood the rest waits until others have had their turn: an
        engine that is faster than this process must not keep it from its clients."""
        if self._stopped:
            return
        for _ in range(FLOOD):
            try:
                data = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(DECODER.decode(data))
        else:
            if not self._again:
                self._again = True
                self.loop.call_soon(self._go_on)
        self.bridge.flush()

    def _go_on(self) -> None:
        self._again = False
        self._readable()

    def _take(self, message: ToWorker) -> None:
        self.bridge.take(message)
