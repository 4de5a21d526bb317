"""Starts the engine and the API workers, watches them, restarts what dies, drains on a signal. Knows processes only."""

from __future__ import annotations

import errno
import ipaddress
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq

from verifypd.config import EngineConfig
from verifypd.errors import ConfigError
from verifypd.server.config import ServerConfig
from verifypd.server.engine_process import run_engine
from verifypd.server.lifeline import BAD_SETTINGS, STOPS, stops_blocked
from verifypd.server.logs import event, set_up_logs
from verifypd.server.messages import (
    Addresses,
    Down,
    Drain,
    Drained,
    Gone,
    Quit,
    Serving,
    ToSupervisor,
    Up,
    encode,
    inbox,
    outbox,
)
from verifypd.server.worker import run_worker

log = logging.getLogger(__name__)

POLL_MS = 100  # a process that dies wakes the supervisor at once; this is for clocks
QUIT_WAIT = 5.0  # s a process gets to end by itself
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # s before a crashed engine is started again, doubling
STEADY = 30.0  # s an engine must have been up for its crashes to be forgotten
SHARED_COUNTERS = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client takes the folder from the environment
DECODER = msgspec.msgpack.Decoder(ToSupervisor)


def back_off(crashes: int) -> float:
    """Seconds to wait before the start that follows the `crashes`-th crash in a row."""
    return min(LONGEST_DELAY, FIRST_DELAY * 2 ** max(0, crashes - 1))


def listen(config: ServerConfig) -> socket.socket:
    """The socket that all workers accept from."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        other = "--port" if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}; choose another {other}") from None
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def warn_if_open(config: ServerConfig, listener: socket.socket) -> None:
    """Say so where other machines reach a server that asks for no key."""
    host = listener.getsockname()[0]
    if not config.api_key and not ipaddress.ip_address(host).is_loopback:
        event(log, "other machines reach this server, and it has no --api-key", logging.WARNING, host=host)


def check_tls(config: ServerConfig) -> None:
    """Refuse certificates that cannot be used, before anything is started."""
    if config.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: {reason}; give a PEM certificate and its key"
        ) from None


def runtime_folder() -> str:
    """A new folder for sockets that only this user can enter; in /tmp where another has no room for their names."""
    room = zmq.IPC_PATH_MAX_LEN - len("/verifypd-12345678/engine-1234567")
    root = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="verifypd-", dir=root if len(os.fsencode(root)) <= room else "/tmp")


class Supervisor:
    """The first process of the server."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        folder: str | None,
        on_ready: Callable[[str], None] = lambda address: None,
    ) -> None:
        """`folder` holds the verifier's tokenizer; `on_ready` is told the address when requests are welcome."""
        self.engine_config = engine_config
        self.config = config
        self.folder = folder
        self.on_ready = on_ready
        self.spawn = multiprocessing.get_context("spawn")
        self.epoch = 0
        self.crashes = 0
        self.engine: BaseProcess | None = None
        self.engine_began = 0.0
        self.engine_up: Up | None = None
        self.up_since = 0.0
        self.restart_at: float | None = None
        self.kill_reason = ""
        self.pulse: Any = None
        self.workers: dict[int, BaseProcess] = {}
        self.serving: set[int] = set()  # workers that have known an engine
        self.announced = False
        self.worker_deaths = 0  # in a row, without one that came up between them
        self.worker_crashes = 0  # in a row, without STEADY s between them; they set the pause before the next start
        self.worker_died_at = 0.0
        self.worker_restarts: dict[int, float] = {}  # workers to be started again, and when
        self.drained: set[int] = set()
        self.draining_until: float | None = None
        self.signals: list[str] = []  # that asked it to end, by name
        self.status = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; returns the exit status."""
        set_up_logs(self.config.log_format, "supervisor")
        check_tls(self.config)
        self.listener = listen(self.config)
        warn_if_open(self.config, self.listener)
        self.address = f"{self.config.scheme}://{_shown(self.listener)}"
        self.runtime = runtime_folder()
        self.addresses = Addresses(self.runtime)
        for name in (SHARED_COUNTERS, SHARED_COUNTERS.lower()):  # another program's, or an earlier server's
            os.environ.pop(name, None)
        if self.config.api_workers > 1:  # their counters are shared through files, so that any of them shows the sum
            os.environ[SHARED_COUNTERS] = self.runtime
        self.context = zmq.Context()
        self.inbox = inbox(self.context, self.addresses.supervisor())
        self.to_workers = [
            outbox(self.context, self.addresses.worker(index)) for index in range(self.config.api_workers)
        ]
        for stop in STOPS:
            if stop is not signal.SIGHUP or signal.getsignal(stop) is not signal.SIG_IGN:  # `nohup` ignores it
                signal.signal(stop, self._signalled)
        try:
            self._start_engine()
            for index in range(self.config.api_workers):
                self._start_worker(index)
            while not self._finished():
                self._watch()
        finally:
            self._end()
        return self.status

    def _signalled(self, number: int, _frame: object) -> None:
        self.signals.append(signal.Signals(number).name)

    def _finished(self) -> bool:
        if self.status:
            return True
        if self.draining_until is None:
            return False
        everyone = set(self.workers) <= self.drained
        asked = sum(name != signal.SIGHUP.name for name in self.signals)  # systemd sends it behind SIGTERM
        return everyone or asked > 1 or time.monotonic() > self.draining_until

    def _watch(self) -> None:
        """Wait for something to happen, and deal with it."""
        poller = zmq.Poller()
        poller.register(self.inbox, zmq.POLLIN)
        for process in (self.engine, *self.workers.values()):
            if process is not None:
                poller.register(process.sentinel, zmq.POLLIN)
        poller.poll(POLL_MS)
        while True:
            try:
                self._take(DECODER.decode(self.inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        if self.signals and self.draining_until is None:
            self._drain()
        self._watch_engine()
        self._watch_workers()

    def _take(self, message: ToSupervisor) -> None:
        if isinstance(message, Up) and message.epoch == self.epoch:
            self.engine_up, self.up_since = message, time.monotonic()
            pid = self.engine.pid if self.engine is not None else None
            event(log, "engine ready", epoch=self.epoch, pid=pid, seconds=round(self.up_since - self.engine_began, 2))
            self._broadcast(message)
        elif isinstance(message, Serving):
            self._worker_serves(message)
        elif isinstance(message, Drained):
            self.drained.add(message.worker)

    def _worker_serves(self, message: Serving) -> None:
        """A worker came up, or has heard of an engine; the first time all have, requests are welcome."""
        self.worker_deaths = 0
        if message.epoch:
            self.serving.add(message.worker)
            if not self.announced and len(self.serving) == self.config.api_workers:
                self.announced = True
                self.on_ready(self.address)
            return
        if self.engine_up is not None:
            self.to_workers[message.worker].send(encode(self.engine_up))
        if self.draining_until is not None:
            self.to_workers[message.worker].send(encode(Drain()))

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        self.epoch += 1
        self.restart_at = None
        self.kill_reason = ""
        self.engine_up = None
        self.engine_began = time.monotonic()
        self.pulse = self.spawn.RawArray("d", 1)
        self.engine = self.spawn.Process(
            target=run_engine,
            args=(self.engine_config, self.config, self.epoch, self.addresses, self.folder, self.pulse, os.getpid()),
            name=f"verifypd-engine-{self.epoch}",
            daemon=True,
        )
        with stops_blocked():
            self.engine.start()

    def _watch_engine(self) -> None:
        now = time.monotonic()
        if self.engine is None:
            if self.restart_at is not None and now >= self.restart_at and self.draining_until is None:
                self._start_engine()
            return
        if not self.engine.is_alive():
            self._engine_died(self.engine)
            return
        begun = self.pulse[0]
        if begun and now - begun > self.config.step_timeout:
            self._kill_engine(f"a step took longer than {self.config.step_timeout:g} s")
        elif self.engine_up is None and now - self.engine_began > self.config.start_timeout:
            self._kill_engine(f"loading took longer than {self.config.start_timeout:g} s")
        elif self.crashes and self.engine_up is not None and now - self.up_since > STEADY:
            self.crashes = 0

    def _kill_engine(self, reason: str) -> None:
        if self.engine is not None and not self.kill_reason:
            self.kill_reason = reason
            event(log, "engine killed", logging.ERROR, reason=reason)
            self.engine.kill()

    def _engine_died(self, process: BaseProcess) -> None:
        process.join()
        code = process.exitcode or 0
        reason = self.kill_reason or _how_it_ended(code)
        self.engine, self.engine_up = None, None
        self.crashes += 1
        never_up = self.epoch == 1 and not self.up_since
        final = code == BAD_SETTINGS or self.crashes > self.config.max_restarts or never_up
        event(log, "engine died", logging.ERROR, reason=reason, epoch=self.epoch, crashes=self.crashes)
        self._broadcast(Down(self.epoch, reason, final or self.draining_until is not None))
        if final:
            self.status = BAD_SETTINGS if code == BAD_SETTINGS else 1
            if code == BAD_SETTINGS:
                why = "these settings will never do"
            else:
                why = "its first start failed" if never_up else f"--max-restarts {self.config.max_restarts} are used up"
            event(log, "the engine is not started again", logging.ERROR, because=why)
            return
        delay = back_off(self.crashes)
        event(log, "engine restarts", seconds=delay)
        self.restart_at = time.monotonic() + delay

    # -- the workers --------------------------------------------------------------------------------------------------

    def _start_worker(self, index: int) -> None:
        process = self.spawn.Process(
            target=run_worker,
            args=(index, self.engine_config, self.config, self.addresses, self.listener, self.folder, os.getpid()),
            name=f"verifypd-api-{index}",
            daemon=True,
        )
        with stops_blocked():
            process.start()
        self.workers[index] = process

    def _watch_workers(self) -> None:
        for index, process in list(self.workers.items()):
            if not process.is_alive():
                self._worker_died(index, process)
        if self.draining_until is None:
            now = time.monotonic()
            for index in [index for index, at in self.worker_restarts.items() if now >= at]:
                del self.worker_restarts[index]
                self._start_worker(index)

    def _worker_died(self, index: int, process: BaseProcess) -> None:
        process.join()
        del self.workers[index]
        now = time.monotonic()
        if now - self.worker_died_at > STEADY:
            self.worker_crashes = 0
        self.worker_crashes += 1
        self.worker_died_at = now
        event(log, "API worker died", logging.ERROR, worker=index, reason=_how_it_ended(process.exitcode or 0))
        if self.engine_up is not None:
            to_engine = outbox(self.context, self.engine_up.address)
            to_engine.send(encode(Gone(index)))
            to_engine.close(linger=1000)
        self.worker_deaths += 1
        if process.exitcode == BAD_SETTINGS and not self.announced:
            self.status = BAD_SETTINGS
        elif self.worker_deaths > self.config.max_restarts:
            event(log, "API workers do not come up", logging.ERROR, deaths=self.worker_deaths)
            self.status = 1
        elif self.draining_until is None:
            delay = back_off(self.worker_crashes)
            event(log, "API worker restarts", worker=index, seconds=delay)
            self.worker_restarts[index] = now + delay

    def _broadcast(self, message: Any) -> None:
        data = encode(message)
        for socket_ in self.to_workers:
            socket_.send(data)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        event(log, "draining", signal=self.signals[0], seconds=self.config.drain_timeout)
        self.draining_until = time.monotonic() + self.config.drain_timeout
        self._broadcast(Drain())
        if self.engine is None:  # it died and will not be started again: nobody waits for it
            self._broadcast(Down(self.epoch, "the server is shutting down", final=True))

    def _end(self) -> None:
        """Tell everybody to end; whoever does not is killed."""
        self._broadcast(Quit())
        _join(list(self.workers.values()))
        if self.engine is not None:
            to_engine = outbox(self.context, self.addresses.engine(self.epoch))
            to_engine.send(encode(Quit()))
            _join([self.engine], QUIT_WAIT if self.engine_up is not None else 0.0)
        self.listener.close()
        self.context.destroy(linger=0)
        shutil.rmtree(self.runtime, ignore_errors=True)
        event(log, "stopped", status=self.status)


def _join(processes: list[BaseProcess], seconds: float = QUIT_WAIT) -> None:
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _how_it_ended(code: int) -> str:
    """The exit code of a process in words."""
    if code >= 0:
        return f"exit status {code}"
    return f"killed by {next((each.name for each in signal.Signals if each == -code), f'signal {-code}')}"


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tokenizer_folder(engine_config: EngineConfig) -> str | None:
    """Where the verifier's tokenizer is, fetching the model where needed; None: it has shapes only."""
    from verifypd.models.hub import resolve

    source = resolve(
        engine_config.model,
        load_format=engine_config.load_format,
        hf_token=engine_config.hf_token,
        revision=engine_config.revision,
    )
    if source.folder is None or not (Path(source.folder) / "tokenizer.json").is_file():
        return None
    return str(source.folder)
