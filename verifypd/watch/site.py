"""A small web server for pages that watch: a record played back, or several arms side by side. Serves what it is given.

Pages and their files are those of the dashboard. Knows HTTP; nothing of engines, records or benchmarks.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from verifypd.errors import ConfigError
from verifypd.server.dashboard import HEADERS, KINDS, POLICY
from verifypd.server.gate import DASHBOARD, PAGE_FILES

LOOK = 0.25  # s between two looks at what is new
START = 10.0  # s the server may take to listen
# A page of several shows those of its arms in frames, which are its own.
FRAMED = POLICY.replace("frame-ancestors 'none'", "frame-ancestors 'self'; frame-src 'self'")
PAGE = HEADERS | {"content-security-policy": FRAMED}


class Told(Protocol):
    """What happened so far, by when: grows while it is live, and is whole when it is played back."""

    @property
    def length(self) -> int:
        """How many there are."""
        ...

    def since(self, index: int) -> list[dict[str, Any]]:
        """Those from that one on."""
        ...


@dataclass(slots=True)
class Log:
    """Events in the order they came. One thread adds, others read."""

    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many there are."""
        return len(self.events)

    def add(self, event: dict[str, Any]) -> None:
        """One more."""
        self.events.append(event)

    def since(self, index: int) -> list[dict[str, Any]]:
        """Those from that one on."""
        return self.events[index:]


@dataclass(slots=True)
class Arm:
    """One column: its name, and the frames of its dashboard."""

    name: str
    frames: Told


@dataclass(slots=True)
class Show:
    """What the site shows: arms, what happened to all of them, and whether it still happens."""

    title: str
    arms: list[Arm]
    events: Told
    live: bool
    charts: list[dict[str, str]] = field(default_factory=list)  # name, title and unit of what events bring
    report: Path | None = None  # a folder with report.html, once there is one
    control: dict[str, Any] | None = None  # limits of what the page may change; None: nothing
    key: str | None = None  # opens the control
    over: bool = False  # nobody is kept waiting for more
    change: Callable[[dict[str, Any]], str | None] = lambda _: "nothing can be changed here"  # what is wrong, or None


def application(show: Show) -> Starlette:
    """The pages of a show."""
    folder = files("verifypd.server") / "static"
    mode = "arm" if show.live else "replay"
    dashboard = _with_mode((folder / "dashboard.html").read_bytes(), mode)
    compare = _with_mode((folder / "compare.html").read_bytes(), "live" if show.live else "replay")

    def page(data: bytes, kind: str) -> Callable[[Request], Any]:
        async def answer(_request: Request) -> Response:
            return Response(data, media_type=kind, headers=PAGE)

        return answer

    def arm_of(request: Request) -> Arm | None:
        index = request.path_params["index"]
        return show.arms[index] if index < len(show.arms) else None

    async def first(_request: Request) -> Response:
        return RedirectResponse("/compare" if show.live or len(show.arms) > 1 else "/arms/0/dashboard")

    async def about(_request: Request) -> Response:
        arms = [{"name": arm.name, "page": f"/arms/{i}/dashboard"} for i, arm in enumerate(show.arms)]
        told = {"title": show.title, "arms": arms, "live": show.live, "charts": show.charts, "control": show.control}
        return JSONResponse(told, headers={"cache-control": "no-store"})

    async def arm_page(request: Request) -> Response:
        found = arm_of(request)
        return Response(dashboard, media_type="text/html", headers=PAGE) if found else _missing()

    async def arm_frames(request: Request) -> Response:
        found = arm_of(request)
        return _whole(found.frames) if found else _missing()

    async def arm_events(request: Request) -> Response:
        found = arm_of(request)
        return _stream(show, found.frames, latest=True) if found else _missing()

    async def events(_request: Request) -> Response:
        return _stream(show, show.events, latest=False) if show.live else _whole(show.events)

    async def report(_request: Request) -> Response:
        path = show.report / "report.html" if show.report else None
        if path is None or not path.is_file():
            return _missing()
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        return Response(path.read_bytes(), media_type="text/html", headers={"content-security-policy": policy})

    async def control(request: Request) -> Response:
        return await _control(show, request)

    statics = [
        Route(f"{above}{DASHBOARD}/{name}", page((folder / name).read_bytes(), KINDS[name.rpartition(".")[2]]))
        for name in (*PAGE_FILES, "compare.js")
        for above in ("", "/arms/{index:int}")  # a page asks for files below its own path
    ]
    return Starlette(
        routes=[
            Route("/", first),
            Route("/compare", page(compare, "text/html")),
            Route("/compare/about", about),
            Route("/compare/events", events),
            Route("/compare/control", control, methods=["POST"]),
            Route("/compare/report", report),
            Route("/arms/{index:int}/dashboard", arm_page),
            Route("/arms/{index:int}/dashboard/frames", arm_frames),
            Route("/arms/{index:int}/dashboard/events", arm_events),
            *statics,
        ]
    )


async def _control(show: Show, request: Request) -> Response:
    """Change the load, where that was allowed, with the key."""
    if show.control is None or not show.key:
        return _error(404, "this comparison takes no changes: start it with --control and a key", "not_found")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), show.key.encode()):
        return _error(401, "the key is missing or wrong: send Authorization: Bearer KEY", "invalid_api_key")
    try:
        wanted = await request.json()
    except ValueError:
        wanted = None
    if not isinstance(wanted, dict):
        return _error(400, "send a JSON object", "invalid_json")
    wrong = show.change(wanted)
    return _error(400, wrong, "invalid_value") if wrong else JSONResponse({"changed": wanted})


def _with_mode(html: bytes, mode: str) -> bytes:
    return html.replace(b'<html lang="en">', f'<html lang="en" data-mode="{mode}">'.encode(), 1)


def _missing() -> Response:
    return _error(404, "there is nothing here", "not_found")


def _error(status: int, message: str, code: str) -> Response:
    kind = "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def _whole(told: Told) -> Response:
    return JSONResponse(told.since(0), headers={"cache-control": "no-store"})


def _stream(show: Show, told: Told, latest: bool) -> Response:
    """Events as they come. `latest`: who is behind needs the last one only."""

    async def events() -> AsyncIterator[str]:
        sent, silent = 0, time.monotonic()
        while not show.over:
            fresh = told.since(sent)
            sent += len(fresh)
            for event in fresh[-1:] if latest else fresh:
                yield f"data: {json.dumps(event)}\n\n"
            if fresh:
                silent = time.monotonic()
            elif time.monotonic() - silent > 1.0:
                yield ": nothing new\n\n"
                silent = time.monotonic()
            await asyncio.sleep(LOOK)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


class Site:
    """A show on a port, in a thread of its own."""

    def __init__(self, show: Show, host: str, port: int) -> None:
        if not host:  # the system takes it for every interface
            raise ConfigError("--host is empty: give 127.0.0.1, or 0.0.0.0 for every interface")
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except OverflowError:
            self.socket.close()
            raise ConfigError(f"--port {port} must lie in 0..65535") from None
        except (OSError, UnicodeError) as error:
            self.socket.close()
            reason = getattr(error, "strerror", None) or str(error)
            taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
            other = "--port, or 0 for any" if taken else "--host"
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another {other}") from None
        self.show = show
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(application(show), log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self) -> Site:
        self._thread.start()
        until = time.monotonic() + START
        while not self._server.started and time.monotonic() < until:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.show.over = True
        self._server.should_exit = True
        self._thread.join(5.0)
        self.socket.close()
