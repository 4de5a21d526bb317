"""One engine in a process of a cluster: it steps in a thread of its own, takes calls, and sends tokens over lines.

Tokens of a step travel in one message to each process that waits for any. Knows engines and messages; nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from verifypd.cluster.config import tokens_of
from verifypd.cluster.lines import Presence, connect, listen
from verifypd.cluster.scaling import ReplicaLoad
from verifypd.config import EngineConfig
from verifypd.errors import EngineError
from verifypd.server.admission import Admission
from verifypd.server.config import ServerConfig
from verifypd.server.engine_process import Bell, describe, gpu_reader, grammar_compiler, load_factory, serve
from verifypd.server.messages import Abort, Answer, Gone, Outputs, Quit, Stats, Submit, ToWorker, Up, encode
from verifypd.server.totals import Targets

log = logging.getLogger(__name__)

DECODER = msgspec.msgpack.Decoder(Submit)
GATHER = 1e-3  # s: steps that take less share a message; those of a real model take more
GONE = 10.0  # s without a line to a process, after which its calls end here
LATELY = 60.0  # s, of requests that count for the goodput
ENDED_WELL = ("stop", "length")
Key = tuple[int, int]  # worker, call


@dataclass(slots=True)
class Open:
    """A call under way."""

    left: set[int]  # choices
    ended: asyncio.Future[None]
    arrival: float
    params: dict[str, Any]
    begun: int = 0  # output tokens it came with; its targets were met or missed elsewhere
    first: float = 0.0
    tokens: dict[int, int] = field(default_factory=dict)  # by choice


class EngineHost:
    """Loads an engine and runs it. `run` and `close` belong to one event loop, everything else to the thread."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        folder: str | None,
        host: str,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` holds the tokenizer; `host` is where other machines reach this one.

        `on_failure` is called, in some thread, once the engine will not step again: it should end this process, for
        whoever chooses replicas would go on to choose this one, which has so little to do.
        """
        from verifypd.server.engine_loop import EngineLoop

        self.config = config
        self.name = secrets.randbits(48)
        engine = load_factory(config.engine_factory)(engine_config).engine
        engine.forgiving = True
        self.info = describe(engine) | {"metrics_interval": config.metrics_interval}
        self.figures: dict[str, Any] = {}
        self._targets = Targets(engine.config.slo_ttft, engine.config.slo_tpot)
        self._verdicts: deque[tuple[float, bool]] = deque(maxlen=1000)  # when a request ended, and whether in time
        self._context = zmq.Context()
        self._receiver, self.address = listen(self._context, host)
        self._receiver.bind("inproc://calls")
        self._calls = self._context.socket(zmq.PUSH)
        self._calls.set_hwm(0)
        self._calls.connect("inproc://calls")
        self._addresses: dict[int, str] = {}  # worker -> its line
        self._lines: dict[int, zmq.Socket] = {}  # the thread's
        self._presence: dict[int, Presence] = {}  # of those they lead to
        self._open: dict[Key, Open] = {}
        self._pulse = [0.0]
        self._failure: str | None = None
        self._bell = Bell()
        self._compiler = grammar_compiler(folder, engine)
        self._loop = EngineLoop(
            engine,
            epoch=self.name,
            admission=Admission(config.max_queue, config.max_streams_per_key, engine.config.slots),
            send=self._send,
            workers=(),
            compile_grammar=self._compiler.start if self._compiler is not None else None,
            ring=self._bell.ring,
            interval=config.metrics_interval,
            gather=GATHER,
            model=tokens_of(engine_config),
        )
        self._loop.gpu = gpu_reader(engine)
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._on_failure = on_failure
        self._closed = threading.Event()
        self._thread.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # -- the event loop's side ----------------------------------------------------------------------------------------

    async def run(self, address: str, data: bytes) -> None:
        """Take a call and wait until it has ended. What it gives goes to `address`, from where it came.

        `data` is a Submit whose arrival is how long ago it came, s: machines do not share a clock.
        """
        self.check()
        message: Submit = DECODER.decode(data)
        message = msgspec.structs.replace(message, arrival=time.monotonic() - message.arrival)
        key = (message.worker, message.call)
        begun = sum(len(choice.tokens) for choice in message.open)
        ended = asyncio.get_running_loop().create_future()
        self._addresses[message.worker] = address
        self._open[key] = Open(
            {choice.choice for choice in message.open}, ended, message.arrival, message.params, begun
        )
        self._calls.send(encode(message))
        try:
            await ended
        except asyncio.CancelledError:  # nobody waits for it any more
            self._calls.send(encode(Abort(*key, -1)))
            raise
        finally:
            self._open.pop(key, None)

    def close(self) -> None:
        """End the thread and what it has."""
        self._closed.set()
        if self._thread.is_alive():
            self._calls.send(encode(Quit()))
            self._thread.join(10.0)
        self._calls.close(linger=0)
        if not self._thread.is_alive():
            self._context.destroy(linger=200)

    def check(self) -> None:
        """Raise EngineError when it does not step any more."""
        if self._failure is not None or not self._thread.is_alive():
            raise EngineError(f"the engine has stopped ({self._failure}); the replica must be started again")
        if self._hangs():
            raise EngineError(f"a step takes longer than {self.config.step_timeout:g} s")

    def _hangs(self) -> bool:
        begun = self._pulse[0]
        return bool(begun) and time.monotonic() - begun > self.config.step_timeout

    def load(self) -> ReplicaLoad:
        """What there is to do, and how well it is done."""
        since = time.monotonic() - LATELY
        recent = [good for at, good in list(self._verdicts) if at > since]
        return ReplicaLoad(
            running=self.figures.get("running", 0),
            waiting=self.figures.get("waiting", 0),
            slots=self.info["slots"],
            good=sum(recent) / len(recent) if recent else 1.0,
        )

    # -- the thread's side --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        broken = False
        try:
            serve(self._loop, self._receiver, self._bell, self._pulse, os.getppid())
            self._loop.engine.shutdown()
        except BaseException as error:  # whatever it is, no call goes on here
            log.exception("the engine failed")
            self._failure = repr(error)
            broken = True
        finally:
            self._failure = self._failure or "it was told to"
            if self._compiler is not None:
                self._compiler.close()
            for worker in list(self._lines):
                self._close_line(worker)
            self._receiver.close()
            self._give_up(broken)

    def _watch(self) -> None:
        """A thread of its own: notice a step that never ends."""
        while not self._closed.wait(min(1.0, self.config.step_timeout / 4)) and self._thread.is_alive():
            if self._hangs():
                self._failure = f"a step takes longer than {self.config.step_timeout:g} s"
                log.error("the engine hangs: %s", self._failure)
                self._give_up(True)
                return

    def _give_up(self, broken: bool) -> None:
        """No call goes on here."""
        try:
            for key in list(self._open):
                self._settle(key, EngineError(f"the engine has stopped ({self._failure})"))
        finally:
            if broken:
                self._on_failure()

    def _send(self, worker: int, message: ToWorker) -> None:
        """The loop's way out. A process that takes nothing for long is taken for dead."""
        self._note(worker, message)
        address = self._addresses.get(worker)
        if address is None:
            return
        line = self._lines.get(worker)
        if line is None:
            line = self._lines[worker] = connect(self._context, address)
            self._presence[worker] = Presence(line)
            line.send(encode(Up(self.name, self.address, self.info)), zmq.NOBLOCK)
            self._loop.workers = tuple(self._lines)
        if isinstance(message, Stats) and self._presence[worker].gone() > GONE:  # these come at intervals
            self._drop(worker)
            return
        try:
            line.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._drop(worker)

    def _close_line(self, worker: int, linger: int | None = None) -> None:
        self._presence.pop(worker).close()
        self._lines.pop(worker).close(linger)

    def _drop(self, worker: int) -> None:
        """Nobody takes a worker's tokens: forget it, and have the loop end its calls when it next looks."""
        log.warning("a process that waited for tokens is gone, or takes none: its calls end")
        self._close_line(worker, linger=0)
        self._loop.workers = tuple(self._lines)
        del self._addresses[worker]
        note = self._context.socket(zmq.PUSH)
        note.connect("inproc://calls")
        note.send(encode(Gone(worker)))
        note.close(linger=1000)

    def _note(self, worker: int, message: ToWorker) -> None:
        """Keep the books of open calls."""
        if isinstance(message, Stats):
            self.figures = message.figures
        elif isinstance(message, Answer) and message.status:
            self._settle((worker, message.call))
        elif isinstance(message, Outputs):
            now = time.monotonic()
            for output in message.outputs:
                key = (worker, output.call)
                call = self._open.get(key)
                if call is None:
                    continue
                if output.tokens:
                    call.first = call.first or now
                    call.tokens[output.choice] = call.tokens.get(output.choice, 0) + len(output.tokens)
                if output.finish is not None:
                    call.left.discard(output.choice)
                    if not call.left:
                        self._judge(call, output.finish, now)
                        self._settle(key)

    def _judge(self, call: Open, finish: str, now: float) -> None:
        """Whether a call that began here met its targets."""
        if call.begun or finish not in ENDED_WELL or not call.tokens:
            return
        longest = max(call.tokens.values())
        per_token = (now - call.first) / (longest - 1) if longest > 1 else 0.0
        own = call.params.get("slo_ttft"), call.params.get("slo_tpot")
        self._verdicts.append((now, self._targets.met(call.first - call.arrival, per_token, *own)))

    def _settle(self, key: Key, error: Exception | None = None) -> None:
        """Whoever waits for a call need not wait any longer."""
        call = self._open.get(key)
        if call is None:
            return

        def set_result() -> None:
            if not call.ended.done():
                if error is None:
                    call.ended.set_result(None)
                else:
                    call.ended.set_exception(error)

        call.ended.get_loop().call_soon_threadsafe(set_result)
