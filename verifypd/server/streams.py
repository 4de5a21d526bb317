"""Sends calls to clients: as an event stream, or whole. Sees clients leave and clients that do not read. Knows ASGI."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from starlette.responses import Response

from verifypd.server.bridge import Bridge
from verifypd.server.calls import Call, CallError, failed
from verifypd.server.render import Renderer

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
SWEEP = 1.0  # s between two looks at streams nobody reads


class ClientGoneError(CallError):
    """Nobody waits for the answer any more."""

    def __init__(self, why: str = "the client left") -> None:
        super().__init__(499, why, code="client_gone")


async def gone(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def watch(receive: Receive, call: Call) -> None:
    """Fail the call when its client leaves."""
    await gone(receive)
    if not call.done:
        call.fail(ClientGoneError())
    call.wake()


class Stream(Response):
    """Server-sent events to a client that may stop reading."""

    media_type = "text/event-stream"

    def __init__(self, cache_control: str) -> None:
        self.sending_since = 0.0  # s of the monotonic clock; 0 while nothing waits to be read
        self.background = None
        self.status_code = 200
        self.body = b""
        self._task: asyncio.Task[Any] | None = None  # the one that sends
        self.init_headers({"cache-control": cache_control, "x-accel-buffering": "no"})
        del self.headers["content-length"]

    def drop(self) -> None:
        """The client does not read: end the stream."""
        self.sending_since = 0.0
        if self._task is not None:
            self._task.cancel()

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        if data or last:
            self.sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            self.sending_since = 0.0


class Sweeper:
    """Finds streams whose client has not read for too long, and drops them."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.streams: set[Stream] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """In the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP, self.timeout / 2))
            overdue = time.monotonic() - self.timeout
            for stream in [s for s in self.streams if s.sending_since and s.sending_since < overdue]:
                stream.drop()


class Wire(Protocol):
    """The connection under a response, for pieces of its body that need not wait."""

    @property
    def ready(self) -> bool:
        """Whether it takes a piece now."""
        ...

    def write(self, data: bytes) -> None:
        """Send a piece of the body, after the headers."""
        ...


class EventStream(Stream):
    """A call as server-sent events. Headers go out when the engine has admitted it.

    News go straight from the engine's message to the connection. Only where it is full, or at the end, does the task
    of this response take over.
    """

    def __init__(
        self,
        call: Call,
        renderer: Renderer,
        bridge: Bridge,
        sweeper: Sweeper,
        finished: Callable[[Call, str], None],
    ) -> None:
        super().__init__("no-cache")
        self.call = call
        self.renderer = renderer
        self.bridge = bridge
        self.sweeper = sweeper
        self.finished = finished
        self._wire: Wire | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the call ends, fails or is left."""
        self._task = asyncio.current_task()
        self._wire = scope.get("state", {}).get("wire")
        self.sweeper.streams.add(self)
        watcher = asyncio.get_running_loop().create_task(watch(receive, self.call))
        outcome = "ok"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            outcome = await self._stream(send)
        except asyncio.CancelledError:
            outcome = "unread"
            raise
        finally:
            self.call.sink = None
            watcher.cancel()
            self.sweeper.streams.discard(self)
            self.bridge.close(self.call)
            self.finished(self.call, outcome)

    async def _stream(self, send: Send) -> str:
        call, renderer = self.call, self.renderer
        await self._send(send, renderer.opening())
        call.sink = self._push if self._wire is not None else None
        try:
            while not call.done:
                await call.news()
                await renderer.write_scores()
                data = renderer.news()
                if data:
                    await self._send(send, data)
            if call.error is not None:
                raise call.error
        except ClientGoneError:
            return "gone"
        except CallError as error:
            end = renderer.news() if error.code == "format_too_complex" else b""  # tells which choice, and its text
            await self._send(send, end + renderer.failure(error), last=True)
            return error.code or "error"
        await renderer.write_scores()
        await self._send(send, renderer.news() + renderer.closing(), last=True)
        return "ok"

    def _push(self) -> bool:
        """Send what is new without a turn of the event loop; False when the task must do it."""
        assert self._wire is not None
        if not self._wire.ready or self.renderer.unwritten:
            return False
        try:
            data = self.renderer.news()
        except Exception:
            log.exception("a stream failed", extra={"fields": {"request_id": self.call.name}})
            self.call.sink = None
            self.call.fail(failed(self.call.ask))
            return True
        if data:
            self._wire.write(data)
        return True


async def whole(call: Call, bridge: Bridge, receive: Receive, finished: Callable[[Call, str], None]) -> None:
    """Wait for a call to end; raises CallError when it fails or its client leaves."""
    watcher = asyncio.get_running_loop().create_task(watch(receive, call))
    outcome = "ok"
    try:
        while not call.done:
            await call.news()
        if call.error is not None:
            raise call.error
    except CallError as error:
        outcome = "gone" if isinstance(error, ClientGoneError) else error.code or "error"
        raise
    finally:
        watcher.cancel()
        bridge.close(call)
        finished(call, outcome)
