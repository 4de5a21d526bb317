"""The page /dashboard, and the frames it draws: one a report of the engine, made once for all who watch a worker.

Knows ASGI and the figures of /metrics; it never asks the engine for anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from verifypd import __version__
from verifypd.config import ARCHITECTURES
from verifypd.server.calls import CallError, unavailable
from verifypd.server.gate import DASHBOARD, PAGE_FILES
from verifypd.server.service import Service
from verifypd.server.streams import Stream, Sweeper, gone

VIEWERS = 32  # pages that may watch one worker at a time
HEARTBEAT = 1.0  # s after which a frame is sent though the engine has said nothing
LEAST = 0.2  # s between two frames of a viewer, however often the engine reports
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
# Nothing from another host, nothing written into the page, nobody's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Frames:
    """The latest frame of a worker, for all its viewers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.viewers = 0
        self._frame = b""
        self._made = 0.0  # s of the monotonic clock
        self._news: asyncio.Future[None] | None = None  # who waits for the next report
        service.bridge.on_report = self._report

    @property
    def over(self) -> bool:
        """Whether the server is about to end: nobody is kept waiting for its last frame."""
        return self.service.bridge.draining

    def _report(self) -> None:
        self._frame = b""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    @property
    def news(self) -> asyncio.Future[None]:
        """Done when the engine has reported."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def latest(self) -> bytes:
        """The frame as it is sent, made at most once a report and a heartbeat."""
        now = time.monotonic()
        if not self._frame or now - self._made >= HEARTBEAT:
            self._frame, self._made = b"data: " + orjson.dumps(self.frame(now)) + b"\n\n", now
        return self._frame

    def frame(self, now: float) -> dict[str, Any]:
        """All a page shows: every sample of /metrics, the engine's live view, and what does not change."""
        service, bridge = self.service, self.service.bridge
        return {
            "time": now,
            "server": {
                "version": __version__,
                "model": service.model,
                "ready": bridge.ready,
                "draining": bridge.draining,
                "lost": bridge.lost,
                "epoch": bridge.up.epoch if bridge.up else 0,
                "drafter": bridge.info.get("drafter"),
                "slots": bridge.info.get("slots"),
                "slo_ttft": bridge.info.get("slo_ttft"),
                "slo_tpot": bridge.info.get("slo_tpot"),
                "architectures": ARCHITECTURES if service.config.admin_key else (),  # that an operator may set here
            },
            "metrics": service.metrics.samples(),
            "live": bridge.figures.get("live", {}),
            "policy": bridge.figures.get("policy", ""),
            "architecture": bridge.figures.get("architecture", ""),
        }


class FrameStream(Stream):
    """Frames as server-sent events until the viewer leaves. A slow viewer skips frames."""

    def __init__(self, frames: Frames, sweeper: Sweeper) -> None:
        super().__init__("no-store")
        self.frames = frames
        self.sweeper = sweeper

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the viewer leaves or the server ends."""
        self._task = asyncio.current_task()
        self.frames.viewers += 1
        self.sweeper.streams.add(self)
        leaving = asyncio.get_running_loop().create_task(gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not leaving.done() and not self.frames.over:
                await self._send(send, self.frames.latest())
                await asyncio.wait([leaving], timeout=LEAST)
                await asyncio.wait([leaving, self.frames.news], timeout=HEARTBEAT, return_when=FIRST_COMPLETED)
            if not leaving.done():
                await self._send(send, self.frames.latest())
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaving.cancel()
            self.sweeper.streams.discard(self)
            self.frames.viewers -= 1


def add_dashboard(app: FastAPI, service: Service) -> None:
    """The page, its files, and the frames. The page and its files need no key: they hold nothing."""
    frames = Frames(service)
    folder = files("verifypd.server") / "static"
    for name, path in {"dashboard.html": DASHBOARD, **{name: f"{DASHBOARD}/{name}" for name in PAGE_FILES}}.items():
        app.get(path, include_in_schema=False)(_page((folder / name).read_bytes(), KINDS[name.rpartition(".")[2]]))

    @app.get(f"{DASHBOARD}/events", include_in_schema=False)
    async def events() -> Response:
        if frames.over:
            raise unavailable("the server is shutting down", "draining")
        if frames.viewers >= VIEWERS:
            raise CallError(
                503,
                f"{VIEWERS} dashboards are open here; close one",
                kind="service_unavailable",
                code="too_many_viewers",
                retry_after=5,
            )
        return FrameStream(frames, service.sweeper)


def _page(data: bytes, kind: str) -> Callable[[Request], Any]:
    """Answers with a file, or with nothing where the browser has it already."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag, **HEADERS})
        return Response(data, media_type=kind, headers={"etag": tag, **HEADERS})

    return page
