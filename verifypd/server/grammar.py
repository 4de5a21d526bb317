"""Output formats, seen from the engine: has them compiled and followed by processes of their own, within limits.

A format that takes too long, or too much memory, costs its process and the requests that have it; nobody else. Knows
those processes (grammar_host) and bit masks; nothing of the languages of formats.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from verifypd.errors import RequestError
from verifypd.server.messages import CANNOT, FIELD, GrammarSpec, encode


@dataclass(frozen=True, slots=True)
class FormatLimits:
    """What a format may cost. Seconds are of CPU time: a busy machine refuses no more than an idle one."""

    compile_seconds: float = 1.0
    memory: int = 256 << 20  # bytes, of one format
    cached: int = 64 << 20  # bytes, of all formats that no request has at the moment
    burst: float = 0.2  # s that may be spent on masks beyond what they bring; also how long a step waits for them
    per_mask: float = 0.002  # s that each mask brings
    patience: float = 5.0  # s by the clock until a process that does not answer is given up
    compilers: int = 2  # formats compiled at once


STANDARD = FormatLimits()
REASONS = 256  # refusals remembered
PATIENCE = 60  # s by the clock for each that a format may take to compile
PROCESS = 1 << 20  # bytes a process costs at least
LOADING = 120.0  # s by the clock in which the tokenizer's process must have read it
BIRTH = 10.0  # s by the clock in which it must have started a process
PLAIN = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}  # one thread, one heap: memory can be counted


@dataclass(slots=True)
class Step:
    """The masks that a step of the engine waits for, of all formats."""

    begun: float = 0.0  # when the first was asked for
    awaited: int = 0

    def ask(self) -> None:
        """One more is asked for."""
        if not self.awaited:
            self.begun = time.monotonic()
        self.awaited += 1


class GrammarCompiler:
    """All output formats of an engine. Makes grammars beside the loop; the loop asks them for masks."""

    def __init__(self, folder: str, vocab: int, eos_ids: Sequence[int], limits: FormatLimits = STANDARD) -> None:
        """Raises ValueError for a tokenizer that llguidance cannot read, OSError where that cannot be tried."""
        self.limits = limits
        self._setting = (folder, vocab, list(eos_ids), limits.memory)
        self._nursery = Nursery(*self._setting)
        self._births = threading.Lock()
        self._step = Step()
        self._threads = ThreadPoolExecutor(limits.compilers, thread_name_prefix="grammar")
        self._lock = threading.Lock()  # of what follows; the engine takes it, so nothing is waited for within
        self._hosts: OrderedDict[GrammarSpec, Host] = OrderedDict()  # the one used last comes last
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()

    def start(self, spec: GrammarSpec, count: int) -> Future[Sequence[HostedGrammar]]:
        """As many grammars, once the format is compiled; RequestError when it cannot be."""
        return self._threads.submit(self._grammars, spec, count)

    def close(self) -> None:
        """End every process."""
        self._nursery.close()  # who compiles is not waited for
        self._threads.shutdown(cancel_futures=True)

    @property
    def processes(self) -> list[int]:
        """Those of formats that are compiled, in use or not."""
        with self._lock:
            return [host.pid for host in self._hosts.values() if host.alive]

    def release(self, host: Host) -> None:
        """A request that had this format has ended."""
        with self._lock:
            host.users -= 1
            if not host.users:
                host.idle_size = host.size()
                self._trim()

    def bear(self) -> tuple[Nursery, Connection, int]:
        """A new process, and who can kill it. OSError where there can be none."""
        with self._births:
            if not self._nursery.alive:
                self._nursery.close()
                try:
                    self._nursery = Nursery(*self._setting)
                except ValueError as error:  # no fault of the format's: the tokenizer could be read before
                    raise OSError(f"the process that compiles output formats cannot be started: {error}") from None
            return self._nursery, *self._nursery.bear()

    def _grammars(self, spec: GrammarSpec, count: int) -> Sequence[HostedGrammar]:
        with self._lock:
            if spec in self._refused:
                raise _refusal(self._refused[spec])
            host = self._hosts.get(spec)
            if host is None or not host.alive:
                host = self._hosts[spec] = Host(spec, self.limits, self._step)
            self._hosts.move_to_end(spec)
            host.users += count  # it stays while it is compiled
        try:
            host.compile(self.bear)
        except ValueError as error:
            self._forget(host, str(error) if host.certain else None)
            raise _refusal(str(error)) from None
        except OSError:
            self._forget(host)
            raise
        return [HostedGrammar(host, self) for _ in range(count)]

    def _forget(self, host: Host, reason: str | None = None) -> None:
        """Nothing is left of its process. The reason is remembered, so that asking again costs nothing."""
        with self._lock:
            host.kill()
            if self._hosts.get(host.spec) is host:
                del self._hosts[host.spec]
            if reason is not None:
                self._refused[host.spec] = reason
            while len(self._refused) > REASONS:
                self._refused.popitem(last=False)

    def _trim(self) -> None:
        """End processes nobody needs: the dead, and of the idle the ones used longest ago, down to the limit."""
        idle = [host for host in self._hosts.values() if not host.users]
        excess = sum(host.idle_size for host in idle) - self.limits.cached
        for host in idle:
            if not host.alive or excess > 0:
                excess -= host.idle_size
                host.kill()
                del self._hosts[host.spec]


def _refusal(reason: str) -> RequestError:
    return RequestError(f"{CANNOT}: {reason}", param=FIELD)


class Nursery:
    """The process that knows the tokenizer, and gives birth to one process a format."""

    def __init__(self, folder: str, vocab: int, eos_ids: list[int], memory: int) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verifypd.server.grammar_host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **PLAIN, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._line.settimeout(LOADING)
        try:
            self._line.sendall(encode([folder, vocab, eos_ids, memory, os.getpid()]))
            answer = self._line.recv(1 << 12).decode()
        except OSError:
            self.close()
            raise
        self._line.settimeout(BIRTH)
        if answer != "ready":
            self.close()
            raise ValueError(answer.removeprefix("no: ") or "its process ended")

    @property
    def alive(self) -> bool:
        """Whether it can still give birth."""
        return self._process.poll() is None

    @property
    def size(self) -> int:
        """Bytes of memory, which its children share as long as they do not write to it."""
        return _resident(self._process.pid)

    def bear(self) -> tuple[Connection, int]:
        """A new process: a line to it and its number. OSError where there can be none; who is silent is ended."""
        ours, theirs = Pipe()
        try:
            with theirs:
                socket.send_fds(self._line, [b"bear"], [theirs.fileno()])
                child = int.from_bytes(self._line.recv(8), "little")
        except OSError:  # its answer, should it still come, would be taken for that of the next birth
            ours.close()
            self.close()
            raise
        if not child:
            ours.close()
            raise OSError("no process can be started for an output format")
        return ours, child

    def kill(self, child: int) -> None:
        """End a child, whatever it does. Waits for nothing: where no more orders can be left, all are ended."""
        try:
            os.write(self._line.fileno(), child.to_bytes(8, "little"))  # a socket with a timeout does not block here
        except BlockingIOError:
            self._process.kill()
        except OSError:  # it has ended, and its children with it
            pass

    def close(self) -> None:
        """End it; its children end with it."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class Host:
    """The process of one format. One thread at a time may use it: the one that compiles, then the engine's.

    It has an account of CPU time, which every mask it is asked for fills and computing spends. Who overdraws it is
    ended. Where a step waits too long for many, those are ended that live on their savings.
    """

    def __init__(self, spec: GrammarSpec, limits: FormatLimits, step: Step) -> None:
        self.spec = spec
        self._limits = limits
        self._step = step
        self._lock = threading.Lock()  # of compiling
        self._compiled = False
        self._failure: str | None = None
        self.certain = True  # whether the failure was reported or measured, not only guessed
        self._nursery: Nursery | None = None  # there is none before it is compiled, and no line
        self._line: Connection | None = None
        self.pid = 0
        self._numbers = itertools.count()
        self._account = limits.compile_seconds
        self._savings = 0.0  # what was on it when the step began
        self._spent = 0.0  # CPU time at its last answer
        self._overdrawn = False  # it was ended because it took too much time
        self._awaited = 0  # answers
        self.users = 0
        self.idle_size = 0  # bytes, when its last user left
        self.alive = True

    def compile(self, bear: Callable[[], tuple[Nursery, Connection, int]]) -> None:
        """Start the process and compile the format, once. ValueError says why it cannot be, OSError why not now."""
        with self._lock:
            if not self._compiled:
                if not self.alive:  # whoever was here first had no process
                    raise OSError("no process could be started for this output format")
                try:
                    self._nursery, self._line, self.pid = bear()
                    self._failure = self._compile(self._nursery)
                except OSError:
                    self.kill()
                    raise
                self._compiled = True
                self._account = self._limits.burst
        if self._failure is not None:
            raise ValueError(self._failure)

    def _compile(self, nursery: Nursery) -> str | None:
        """Why it cannot be done, if so."""
        seconds = self._limits.compile_seconds
        self._send(self.spec)
        answer = self._answer(PATIENCE * seconds)
        if answer is None and not nursery.alive:
            raise OSError("the process that compiles output formats has ended")
        if answer is None:
            self.certain = self._overdrawn
            return f"it takes more than {seconds:g} s or {self._limits.memory >> 20} MB to compile; make it simpler"
        (error,) = msgspec.msgpack.decode(answer, type=tuple[str | None])
        return error

    def number(self) -> int:
        """Names another request."""
        return next(self._numbers)

    def ask(self, request: int, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Have masks made: one before each draft and one after the last."""
        if not self._awaited:
            self._account = self._savings = min(self._account, self._limits.burst)
        self._awaited += 1
        self._step.ask()
        masks = max(1 + len(drafts), len(output))  # a request that is taken up again has its whole output to read
        self._account += self._limits.per_mask * masks
        self._send(("ask", request, list(output), list(drafts)))

    def masks(self, request: int) -> tuple[list[bytes], str | None] | None:
        """Masks and llguidance's complaint, in the order they were asked for; None where the process is gone."""
        answer = self._answer(self._limits.patience, self._step.begun + self._limits.burst)
        self._awaited -= 1
        self._step.awaited -= 1
        if answer is None:
            return None
        whose, rows, error = msgspec.msgpack.decode(answer, type=tuple[int, list[bytes], str | None])
        if whose != request:  # a step was broken off between asking and taking
            self.kill()
            return None
        return rows, error

    def drop(self, request: int) -> None:
        """A request has ended."""
        self._send(("drop", request))

    def kill(self) -> None:
        """End the process; its memory is free again."""
        if self.alive:
            self.alive = False
            if self._nursery is not None and self._line is not None:
                self._nursery.kill(self.pid)
                self._line.close()

    def size(self) -> int:
        """Bytes of memory it has taken for itself."""
        if not self.alive or self._nursery is None:
            return 0
        return max(PROCESS, _resident(self.pid) - self._nursery.size)

    def _send(self, message: Any) -> None:
        try:
            if self.alive and self._line is not None:
                self._line.send_bytes(encode(message))
        except OSError:
            self.kill()

    def _answer(self, patience: float, late: float = math.inf) -> bytes | None:
        """The next answer; None, and the process is ended, when it takes too much. A step is late from `late` on."""
        end = time.monotonic() + patience
        try:
            while self.alive and self._line is not None:
                ready = self._line.poll(max(0.005, min(self._account, late - time.monotonic())))
                answer = self._line.recv_bytes() if ready else None  # also of one that has ended since
                self._pay()
                now, drawn = time.monotonic(), self._savings - self._account
                if self._account < 0 or (not ready and now > end) or (now > late and drawn > self._limits.burst / 4):
                    self._overdrawn = True
                    self.kill()
                elif answer is not None:
                    return answer
        except (EOFError, OSError):
            self.kill()
        return None

    def _pay(self) -> None:
        """Take what it has computed since from its account. Linux reads the clock of any process of the same user."""
        try:
            spent = time.clock_gettime((~self.pid << 3) | 2)
        except OSError:  # it has ended: there is nothing more to charge
            return
        self._account -= spent - self._spent
        self._spent = spent


class HostedGrammar:
    """A sampling.grammar.Grammar: one request, followed by the process of its format."""

    def __init__(self, host: Host, compiler: GrammarCompiler) -> None:
        self._host = host
        self._compiler = compiler
        self._request: int | None = None  # its number, once the process knows it
        self._open = True
        self.error: str | None = None

    def ask(self, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Have the masks of a span made: `output` was confirmed since the last one, `drafts` may follow it."""
        if self._request is None:
            self._request = self._host.number()
        self._host.ask(self._request, output, drafts)

    def fill(self, rows: np.ndarray[Any, Any]) -> None:
        """Write the masks that were asked for, int32 [rows, words]; rows that have none allow nothing."""
        rows[:] = 0
        assert self._request is not None, "nothing was asked for"
        found = self._host.masks(self._request)
        if found is None:
            limits = self._compiler.limits
            allowed = f"{1e3 * limits.per_mask:g} ms a token, {limits.memory >> 20} MB"
            self.error = f"more than this server allows ({allowed})"
            return
        masks, error = found
        self.error = error or self.error
        for row, mask in zip(rows, masks, strict=False):
            words = np.frombuffer(mask, dtype=np.int32)[: len(row)]
            row[: len(words)] = words

    def close(self) -> None:
        """Its request has ended; any thread may say so before the first `ask`, later only the one that asks."""
        if self._open:
            self._open = False
            if self._request is not None:
                self._host.drop(self._request)
            self._compiler.release(self._host)


def _resident(process: int) -> int:
    """Bytes in memory of a process, without files."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except OSError:  # it is gone
        return 0
    return (resident - shared) * resource.getpagesize()
