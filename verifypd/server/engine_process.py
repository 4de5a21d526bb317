"""The engine's own process: loads the models, receives requests, steps. Knows nothing of HTTP or text."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from tqdm import tqdm

from verifypd.config import EngineConfig
from verifypd.errors import EngineError, VerifyPDError
from verifypd.metrics.pauses import freeze_heap
from verifypd.server.admission import Admission
from verifypd.server.config import ServerConfig
from verifypd.server.lifeline import die_with, give_up, obey_parent
from verifypd.server.logs import set_up_logs
from verifypd.server.messages import Addresses, ToEngine, ToWorker, Up, encode, inbox, outbox

if TYPE_CHECKING:
    from verifypd.server.engine_loop import EngineLoop
    from verifypd.server.grammar import GrammarCompiler

log = logging.getLogger(__name__)

DECODER = msgspec.msgpack.Decoder(ToEngine)


def run_engine(
    engine_config: EngineConfig,
    config: ServerConfig,
    epoch: int,
    addresses: Addresses,
    folder: str | None,
    pulse: Any,
    parent: int,
) -> None:
    """Entry of the process. `pulse[0]` is when the loop's turn began, s of the monotonic clock; 0 while it waits."""
    die_with(parent)
    obey_parent("verifypd-engine")
    set_up_logs(config.log_format, f"engine-{epoch}")
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which stays when this process is killed
    from verifypd.server.engine_loop import EngineLoop  # torch is imported in this process only

    engine = make_engine(engine_config, config)
    engine.forgiving = True
    context = zmq.Context()
    receiver = inbox(context, addresses.engine(epoch))
    workers = [outbox(context, addresses.worker(index)) for index in range(config.api_workers)]

    def send(worker: int, message: ToWorker) -> None:
        workers[worker].send(encode(message))

    bell = Bell()
    compiler = grammar_compiler(folder, engine)
    loop = EngineLoop(
        engine,
        epoch=epoch,
        admission=Admission(config.max_queue, config.max_streams_per_key, engine.config.slots),
        send=send,
        workers=range(config.api_workers),
        compile_grammar=compiler.start if compiler is not None else None,
        ring=bell.ring,
        interval=config.metrics_interval,
    )
    loop.gpu = gpu_reader(engine)
    supervisor = outbox(context, addresses.supervisor())
    supervisor.send(encode(Up(epoch, addresses.engine(epoch), describe(engine))))
    freeze_heap()
    try:
        serve(loop, receiver, bell, pulse, parent)
    finally:
        if compiler is not None:
            compiler.close()
        engine.shutdown()
        context.destroy(linger=200)


def make_engine(engine_config: EngineConfig, config: ServerConfig) -> Any:
    """The engine of the factory; settings that will never do end the process with a status that says so."""
    try:
        return load_factory(config.engine_factory)(engine_config).engine
    except EngineError:  # it lost a process while it was made: the next may not
        raise
    except VerifyPDError as error:
        give_up(error)


class Bell:
    """Wakes the loop out of its wait, from any thread."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)

    def fileno(self) -> int:
        """Readable when it has been rung."""
        return self._out

    def ring(self) -> None:
        """Wake it."""
        with contextlib.suppress(BlockingIOError):  # full: it has been rung often enough
            os.write(self._in, b"!")

    def hush(self) -> None:
        """Forget that it was rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)


def serve(loop: EngineLoop, receiver: zmq.Socket, bell: Bell, pulse: Any, parent: int) -> None:
    """Take messages and step until told to quit, or until the supervisor is gone. Waiting for work has no pulse."""
    engine = loop.engine
    poller = zmq.Poller()
    poller.register(receiver, zmq.POLLIN)
    poller.register(bell.fileno(), zmq.POLLIN)
    while not loop.stopping and os.getppid() == parent:
        if not engine.busy:
            pulse[0] = 0.0
            poller.poll(int(loop.interval * 1e3))
        pulse[0] = time.monotonic()
        if engine.busy:
            loop.collect()
        bell.hush()
        receive(loop, receiver)
        loop.join()
        if engine.busy:
            loop.turn()
        else:
            engine.check()
            loop.flush()
    pulse[0] = 0.0


def receive(loop: EngineLoop, receiver: zmq.Socket) -> None:
    """Take everything that has arrived; waits for nothing."""
    while True:
        try:
            message = receiver.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        loop.take(DECODER.decode(message))


def load_factory(name: str) -> Callable[[EngineConfig], Any]:
    """What `--engine-factory` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def describe(engine: Any) -> dict[str, Any]:
    """What API workers must know of the engine."""
    return {
        "max_model_len": engine.max_model_len,
        "vocab": engine.sampling.vocab,
        "eos_ids": list(engine.eos_ids),
        "slots": engine.config.slots,
        "max_draft": engine.config.max_draft if engine.drafter is not None else 0,
        "drafter": engine.drafter.name if engine.drafter is not None else None,
        "architecture": engine.config.arch,
        "slo_ttft": engine.config.slo_ttft,
        "slo_tpot": engine.config.slo_tpot,
        "pid": os.getpid(),
    }


def grammar_compiler(folder: str | None, engine: Any) -> GrammarCompiler | None:
    """Makes matchers for constrained output beside the loop; None without a tokenizer that llguidance can read."""
    if folder is None:
        return None
    from verifypd.server.grammar import GrammarCompiler

    try:
        return GrammarCompiler(folder, engine.sampling.vocab, engine.eos_ids)
    except (ValueError, OSError) as error:  # the server runs without
        log.warning("output cannot be constrained here: %s", error)
        return None


def gpu_reader(engine: Any) -> Callable[[], dict[str, float]]:
    """Reads the state of the engine's GPU; empty on a CPU."""
    device = engine.slots.device
    if device.type != "cuda":
        return dict
    from verifypd.metrics.gpu import GpuSampler

    sampler = GpuSampler(device.index or 0)
    return partial(sampler.read, time.monotonic)
