"""Reads large bodies in a process of its own: JSON, validation, templates and tokens of megabytes hold an interpreter
for seconds, and here it is not the one that serves everybody. Knows works and pipes; nothing of HTTP.

An API worker has two: one for large bodies, there from the start, because the first of them would wait half a second
for it; and one for huge bodies, which take longer, started with the first. A reader reads one body at a time, the
smallest first; where too many wait, the largest is refused. One that is too slow is killed, as is one that works for a
client who has left while others wait; one that died or has grown is replaced, so its memory returns to the system.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import logging
import os
import pickle
import resource
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import verifypd
from verifypd.server.ask import Limits
from verifypd.server.calls import CallError, bad, broken, unavailable
from verifypd.server.lifeline import die_with, obey_parent
from verifypd.server.logs import event, set_up_logs
from verifypd.server.tools import ToolFormat
from verifypd.server.works import Desk, Done, read_and_do
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LARGE = 1 << 14  # bytes from which a body is read there
HUGE = 1 << 20  # bytes from which it is read apart from those that take moments
MOST_WAITING = 32  # bodies
SECONDS = 120.0  # that reading one may take
GROWTH = 128 << 20  # bytes more than at its start with which a reader ends
NICE = 5  # steps of priority below the worker and the engine, whose clients are being served
_SIZE = 8  # bytes of the length before each message


@dataclass(frozen=True, slots=True)
class Job:
    """A body to be read, for the reader."""

    work: str
    data: bytes
    limits: Limits
    key: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of it: a result, or the fields of a CallError, or neither where the reader itself failed."""

    done: Done | None = None
    error: dict[str, Any] | None = None
    last: bool = False  # the reader has ended


@dataclass(order=True, slots=True)
class _Waiting:
    size: int
    place: int
    job: Job = field(compare=False)
    answer: asyncio.Future[Done] = field(compare=False)


class Reader:
    """The worker's side. All of it runs in the event loop."""

    def __init__(self, folder: Path | None, log_format: str, name: str, ahead: bool = False) -> None:
        """`folder`: of the tokenizer; None: there is none. `name`: of this process in the logs. `ahead`: whether one
        that has ended is replaced before the next body comes."""
        self._setup = (str(folder) if folder else None, log_format, name, os.getpid())
        self._ahead = ahead
        self._process: asyncio.subprocess.Process | None = None
        self._starts = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._waiting: list[_Waiting] = []
        self._places = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[Done] | None = None
        self._asked_for: asyncio.Future[Done] | None = None  # whose body is being read

    def start(self) -> None:
        """Have the process there before the first body is."""
        self._starting = asyncio.get_running_loop().create_task(self._start_ahead())

    async def read(self, work: str, data: bytes, limits: Limits, key: int) -> Done:
        """The result of a work on a large body."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(len(data), next(self._places), Job(work, data, limits, key), loop.create_future())
        self._queue(waiting)
        self._give_way()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return await waiting.answer

    async def close(self) -> None:
        """End the process."""
        under_way = [task for task in (self._task, self._asking, self._starting) if task is not None]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._kill()

    def _queue(self, new: _Waiting) -> None:
        """Let a body wait. Where too many do, the largest is refused, and the last of those as large."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.answer.done()]
        self._waiting.append(new)
        if len(self._waiting) > MOST_WAITING:
            largest = max(self._waiting)
            self._waiting.remove(largest)
            largest.answer.set_exception(_too_many())
        heapq.heapify(self._waiting)

    def _give_way(self, _answer: object = None) -> None:
        """Stop reading for a client that has left, where another waits."""
        left = self._asked_for is not None and self._asked_for.done()
        if left and self._asking is not None and any(not waiting.answer.done() for waiting in self._waiting):
            self._asking.cancel()

    async def _run(self) -> None:
        """Have one body after the other read, until none waits."""
        while self._waiting:
            waiting = heapq.heappop(self._waiting)
            if waiting.answer.done():  # nobody waits for it
                continue
            self._asked_for, self._asking = waiting.answer, asyncio.ensure_future(self._ask(waiting.job))
            waiting.answer.add_done_callback(self._give_way)
            await asyncio.wait((self._asking,))
            error = asyncio.CancelledError() if self._asking.cancelled() else self._asking.exception()
            if error is not None and not isinstance(error, CallError):
                await self._kill()  # it may be in the midst of anything
                if not isinstance(error, asyncio.CancelledError):
                    log.error("a body could not be read", exc_info=error)
                error = broken()
            if waiting.answer.done():
                continue
            if error is not None:
                waiting.answer.set_exception(error)
            else:
                waiting.answer.set_result(self._asking.result())
        if self._ahead and self._process is None:
            self.start()

    async def _ask(self, job: Job) -> Done:
        try:
            async with asyncio.timeout(SECONDS):
                reply: Reply = await self._exchange(job)
        except TimeoutError:
            await self._kill()
            raise bad(f"reading this body took longer than {SECONDS:g} s: send less", code="body_too_costly") from None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            event(log, "reader died", logging.ERROR, reason=repr(error))
            await self._kill()
            raise unavailable("the process that reads large bodies stopped; try again", "reader_lost") from None
        if reply.last:
            await self._kill()
        if reply.done is not None:
            return reply.done
        raise CallError(**reply.error) if reply.error is not None else broken()

    async def _exchange(self, job: Job) -> Reply:
        process = await self._running()
        to, back = process.stdin, process.stdout
        assert to is not None and back is not None
        to.write(_framed(job))
        await to.drain()
        size = int.from_bytes(await back.readexactly(_SIZE), "little")
        made = pickle.loads(await back.readexactly(size))
        assert isinstance(made, Reply)
        return made

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starts:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
            return self._process

    async def _start_ahead(self) -> None:
        try:
            await self._running()
        except OSError as error:  # the next body tries again, and its client is told
            event(log, "reader not started", logging.WARNING, reason=repr(error))

    async def _start(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, [str(Path(verifypd.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from verifypd.server.reader import main; main()"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdin is not None
        process.stdin.write(_framed(self._setup))
        event(log, "reader started", pid=process.pid)
        return process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()  # reads what it had written, without which it would not count as ended


class Readers:
    """Both readers of a worker: nobody's long prompt waits for somebody's eight megabytes."""

    def __init__(self, folder: Path | None, log_format: str, worker: int) -> None:
        self.large = Reader(folder, log_format, f"reader-{worker}", ahead=True)
        self.huge = Reader(folder, log_format, f"huge-reader-{worker}")

    def start(self) -> None:
        """Have the one for large bodies there before the first of them is."""
        self.large.start()

    async def read(self, work: str, data: bytes, limits: Limits, key: int) -> Done:
        """The result of a work on a body."""
        return await (self.huge if len(data) > HUGE else self.large).read(work, data, limits, key)

    async def close(self) -> None:
        """End both."""
        await self.large.close()
        await self.huge.close()


def _too_many() -> CallError:
    return CallError(
        429,
        f"{MOST_WAITING} bodies over {LARGE} bytes are waiting to be read, none larger; send less or try again later",
        kind="rate_limit_error",
        code="too_many_large_bodies",
        retry_after=1,
    )


def _framed(value: Any) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_SIZE, "little") + data


# -- in the reader's process ------------------------------------------------------------------------------------------


def main() -> None:
    """Entry of the process: one reply for every job, until the worker is gone or too much memory is held."""
    obey_parent("verifypd-reader")
    jobs = sys.stdin.buffer
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may get in between the replies
    folder, log_format, name, parent = _next(jobs)
    die_with(parent)
    os.nice(NICE)
    gc.disable()  # it would look through millions of parsed values again and again; what grows is replaced anyway
    set_up_logs(log_format, name)
    tokenizer = Tokenizer.from_folder(Path(folder)) if folder is not None else None
    tool_format = ToolFormat.of(tokenizer)
    start = _resident()
    while (job := _next(jobs)) is not None:
        reply = _reply(job, tokenizer, tool_format)
        del job
        reply = replace(reply, last=_resident() - start > GROWTH)
        replies.write(_framed(reply))
        replies.flush()
        if reply.last:
            return


def _resident() -> int:
    """Bytes of memory this process holds; where the system does not tell, the most it has held."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _next(file: BinaryIO) -> Any:
    size = file.read(_SIZE)
    return pickle.loads(file.read(int.from_bytes(size, "little"))) if len(size) == _SIZE else None


def _reply(job: Job, tokenizer: Tokenizer | None, tool_format: ToolFormat | None) -> Reply:
    try:
        return Reply(read_and_do(job.work, job.data, Desk(job.limits, tokenizer, tool_format, job.key)))
    except CallError as error:
        names = ("status", "message", "kind", "code", "param", "retry_after")
        return Reply(error={name: getattr(error, name) for name in names})
    except Exception:
        log.exception("a body could not be read")
        return Reply()
