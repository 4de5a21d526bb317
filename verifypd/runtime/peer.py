"""Another process and the messages to and from it: a head in JSON, and tensors by torch.distributed (gloo).

A process group of its own, two ranks, on the loopback address: the default group stays free, and a process that died
is replaced with a new group. Whatever waits for the other side waits in a thread; `Peer` itself never does. Knows
nothing of what the messages mean.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verifypd.errors import ModelError

log = logging.getLogger(__name__)

MEETING = 60.0  # s that two processes which are both up may take to find each other
FOREVER = timedelta(days=365)  # who is silent is judged by who waits for it, not by the transport
LONGEST_PAUSE = 60.0  # s between two starts of a process that keeps failing
DTYPES = {
    "int64": torch.int64, "uint8": torch.uint8, "float32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # fmt: skip


class Message(NamedTuple):
    """One message; tensors lie on the host."""

    kind: str
    body: Any = None  # what JSON can say
    tensors: Sequence[Tensor] = ()


READY = "ready"  # kind of the first message of a process that has loaded what it needs
LOST = "lost"  # kind of the message that says, with the reason as its body, that no other will come


class Link:
    """Sends and receives messages; both wait. One thread may send while another receives."""

    def __init__(self, store: Path, rank: int) -> None:
        import torch.distributed

        parts: Any = torch.distributed  # of which the annotations know less than there is
        options = parts.ProcessGroupGloo._Options()
        options._devices = [parts.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=MEETING)
        self._group = parts.ProcessGroupGloo(parts.FileStore(str(store), 2), rank, 2, options)
        self._group.set_timeout(FOREVER)
        self._other = 1 - rank

    def send(self, message: Message) -> None:
        """Returns when it is on its way. ConnectionError: the other side is gone."""
        shapes = [[str(t.dtype).removeprefix("torch."), *t.shape] for t in message.tensors]
        head = json.dumps([message.kind, message.body, shapes]).encode()
        self._send(torch.tensor([len(head)]))
        self._send(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for tensor in message.tensors:
            self._send(tensor.contiguous())

    def receive(self) -> Message:
        """The next message. ConnectionError: the other side is gone."""
        size = self._receive(torch.empty(1, dtype=torch.int64))
        head = self._receive(torch.empty(int(size), dtype=torch.uint8))
        kind, body, shapes = json.loads(head.numpy().tobytes())
        return Message(kind, body, [self._receive(torch.empty(shape, dtype=DTYPES[name])) for name, *shape in shapes])

    def _send(self, tensor: Tensor) -> None:
        try:
            if tensor.numel():
                self._group.send([tensor], self._other, 0).wait()
        except RuntimeError as error:
            raise ConnectionError("its process ended") from error

    def _receive(self, tensor: Tensor) -> Tensor:
        try:
            if tensor.numel():
                self._group.recv([tensor], self._other, 0).wait()
        except RuntimeError as error:
            raise ConnectionError("its process ended") from error
        return tensor


class Inbox:
    """Messages that have arrived, put there by a thread; the last one says that the other side is gone."""

    def __init__(self, open_link: Callable[[], Link]) -> None:
        self._arrived: SimpleQueue[Message] = SimpleQueue()
        self.thread = threading.Thread(target=self._receive, args=(open_link,), daemon=True)
        self.thread.start()

    def _receive(self, open_link: Callable[[], Link]) -> None:
        try:
            link = open_link()
            while True:
                self._arrived.put(link.receive())
        except (OSError, RuntimeError) as error:  # the latter: they did not meet
            self._arrived.put(Message(LOST, str(error)))

    def get(self, seconds: float | None = None) -> Message | None:
        """The next message; None: none came within so many seconds, 0 being at once. Without a number it waits."""
        try:
            return self._arrived.get(block=seconds is None or seconds > 0, timeout=seconds)
        except Empty:
            return None


class Peer:
    """A process that this one has started. It ends with this one."""

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        """module: run with `settings`, which it reads with `hello`."""
        self._folder = tempfile.TemporaryDirectory(prefix="verifypd-", ignore_cleanup_errors=True)
        self._store = Path(self._folder.name) / "store"
        self._birth, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs), str(self._store)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        os.close(theirs)
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._link: Link | None = None
        with suppress(OSError):  # it has ended, as the inbox will say
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(settings).encode() + b"\n")
            self.process.stdin.flush()  # and it stays open: the process ends when it is closed
        self.inbox = Inbox(self._meet)

    def _meet(self) -> Link:
        with os.fdopen(self._birth) as birth:
            word = birth.readline().strip()
        if word != "ready":
            raise OSError(word or "its process ended before it was ready")
        self._link = Link(self._store, 0)
        self._sender.start()
        return self._link

    def _send(self) -> None:
        assert self._link is not None
        with suppress(ConnectionError):  # whoever receives is told
            while (message := self._outbox.get()) is not None:
                self._link.send(message)

    def send(self, message: Message) -> None:
        """Hand a message over to be sent; never waits."""
        self._outbox.put(message)

    def tidy(self) -> None:
        """Both sides have met: what they found each other by can go. Nothing is left, should this one be killed."""
        self._folder.cleanup()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._outbox.put(None)
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(OSError):  # it never read what it was told
                self.process.stdin.close()
        self.inbox.thread.join(timeout=1.0)
        self._folder.cleanup()


class Keeper:
    """Keeps a process: one that is lost is started again, at once or, where that does not help, after a pause."""

    def __init__(self, name: str, start: Callable[[], Peer], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.ready = False
        self.restarts = 0
        self._start, self._clock = start, clock
        self._failures = 0  # since it last was of use
        self._next_start = 0.0  # s
        self._closed = False
        self.peer: Peer | None = start()

    def wait_ready(self) -> None:
        """At start: until the process has loaded its model. Raises what it could not."""
        assert self.peer is not None
        message = self.peer.inbox.get()
        if message is None or message.kind == LOST:
            self.close()
            raise ModelError(f"the {self.name} process did not start: {message.body if message else 'no word of it'}")
        self._up()

    def send(self, message: Message) -> None:
        """To a process that is ready; else it is not sent."""
        if self.ready and self.peer is not None:
            self.peer.send(message)

    def get(self, seconds: float = 0.0) -> Message | None:
        """The next message, within so many seconds. `ready` and `lost` are messages, too."""
        message = self.peer.inbox.get(max(0.0, seconds)) if self.peer is not None else None
        if message is not None and message.kind == LOST:
            self.lose(str(message.body))
        elif message is not None and message.kind == READY:
            self._up()
        return message

    def _up(self) -> None:
        self.ready = True
        if self.peer is not None:
            self.peer.tidy()

    def useful(self) -> None:
        """It has answered: should it be lost, it is started again at once."""
        self._failures = 0

    def lose(self, why: str) -> None:
        """The process is of no use any more; `revive` starts another when it is due."""
        assert self.peer is not None
        self._failures += 1
        pause = 0.0 if self._failures == 1 else min(LONGEST_PAUSE, 2.0**self._failures)
        log.warning(
            "the %s process was lost (%s): the engine goes on without it, and it is started again in %g s",
            self.name, why, pause,
        )  # fmt: skip
        self.peer.close()
        self.peer, self.ready = None, False
        self._next_start = self._clock() + pause

    def revive(self) -> None:
        """Start a process where there is none and one is due."""
        if self.peer is None and not self._closed and self._clock() >= self._next_start:
            self.restarts += 1
            self.peer = self._start()

    def close(self) -> None:
        """End the process for good."""
        self._closed, self.ready = True, False
        if self.peer is not None:
            self.peer.close()
            self.peer = None


def hello() -> tuple[dict[str, Any], Callable[[str | None], Link]]:
    """In the started process: its settings, and what it calls when it is ready, or with what is wrong."""
    birth, store = int(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def answer(wrong: str | None = None) -> Link:
        with os.fdopen(birth, "w") as line:
            line.write("ready" if wrong is None else " ".join(wrong.split()) or "it is not known what is wrong")
        if wrong is not None:
            sys.exit(1)
        return Link(store, 1)

    return settings, answer


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)
