"""What every request passes first: its id, its key, its size, its log line. Plain ASGI; knows nothing of models."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from verifypd.server.calls import NOT_WHOLE, CallError, broken, unavailable
from verifypd.server.logs import event

log = logging.getLogger(__name__)

DASHBOARD = "/dashboard"
PAGE_SCRIPTS = (
    *("dashboard.js", "basics.js", "charts.js", "history.js", "operator.js", "player.js", "playground.js"),
    "uplot.js",
)
PAGE_FILES = (*PAGE_SCRIPTS, "dashboard.css", "uplot.css")  # hold nothing; the figures need a key
OPEN_PATHS = (
    *("/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json", "/favicon.ico", DASHBOARD),
    *(f"{DASHBOARD}/{name}" for name in PAGE_FILES),
)
ADMIN = "/v1/admin/"
QUIET_PATHS = ("/health", "/ready", "/metrics")  # asked for all the time; not worth a line each
DISCARDED = 8  # times the largest body: bytes that are read and forgotten of one that was refused
BODIES = 64  # times the largest body: bytes that may be arriving at one worker at a time
LOGGED = 64  # characters of a field's name in the log: an unknown field is called what its client likes
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Keys:
    """API keys, compared in constant time. Only their digests are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: str) -> int | None:
        """The number of the key in an Authorization header; None: no such key. Always compares with every key."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found if scheme.lower() == "bearer" else None


def error_response(
    error: CallError, headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two ASGI messages of an error."""
    body = orjson.dumps(error.body())
    sent = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    if error.retry_after:
        sent.append((b"retry-after", str(error.retry_after).encode()))
    if error.status == 401:
        sent.append((b"www-authenticate", b"Bearer"))
    return (
        {"type": "http.response.start", "status": error.status, "headers": sent},
        {"type": "http.response.body", "body": body},
    )


class Arriving:
    """The body of one request, as it comes."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self.more = True

    async def next(self) -> bytes:
        """The next piece."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.more = False
            raise CallError(400, NOT_WHOLE, code="incomplete_body")
        self.more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def discard(self, seconds: float, most: int) -> None:
        """Read what is left and forget it, for so long and so many bytes at most."""
        with contextlib.suppress(CallError, TimeoutError):
            async with asyncio.timeout(seconds):
                while self.more and most > 0:
                    most -= len(await self.next())


class Gate:
    """ASGI middleware. `scope["state"]` gets `request_id`, `key` and `arrival`; `log` and `error` come back in it."""

    def __init__(
        self, app: Any, keys: Keys, admin: Keys, max_body: int, body_timeout: float, count: Callable[[str, int], None]
    ) -> None:
        self.app = app
        self.keys = keys
        self.admin = admin  # the operator's: they open what is under ADMIN, and nothing else
        self.max_body = max_body
        self.body_timeout = body_timeout
        self.count = count
        self._arriving = 0  # bytes of bodies that are not whole

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request pass, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrival = time.monotonic()
        headers = dict(scope["headers"])
        if not scope["path"].startswith(DASHBOARD):  # its page has relative links
            scope["path"] = scope["path"].rstrip("/") or "/"  # a redirect would lead to whatever Host the client named
        state = scope.setdefault("state", {})
        state.update(request_id=_request_id(headers.get(b"x-request-id", b"")), key=0, arrival=arrival)
        status = 0
        arriving = Arriving(receive)

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = state["request_id"].encode()  # the body may have named it
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            await send(message)

        try:
            self._admit(scope, headers, state)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = given(await self._whole(arriving, headers), receive)
            await self.app(scope, receive, sending)
        except CallError as error:
            if status:
                raise  # the answer had begun
            state["error"] = error
            start, body = error_response(error, [(b"connection", b"close")])
            await sending(start)
            await sending({**body, "more_body": True})
            if error.status != 408 and b"expect" not in headers:
                await arriving.discard(
                    self.body_timeout, DISCARDED * self.max_body
                )  # who is cut off while sending never sees the answer
            await sending({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if status:
                raise
            ending = unavailable("the server is shutting down", "draining")  # nothing else cancels what has not begun
            state["error"] = ending
            for message in error_response(ending, [(b"connection", b"close")]):
                await sending(message)
        except Exception:
            fields = {"request_id": state["request_id"], "path": scope["path"][:200]}
            log.exception("a request failed", extra={"fields": fields})
            if status:
                raise
            state["error"] = broken()
            for message in error_response(state["error"]):
                await sending(message)
        finally:
            self.count(_route(scope["path"]), status)
            if scope["path"] not in QUIET_PATHS:
                seconds = time.monotonic() - arrival
                fields = {"request_id": state["request_id"], "method": scope["method"], "path": scope["path"][:200]}
                fields.update(status=status, ms=round(seconds * 1e3, 1), **state.get("log", {}), **_why(state))
                event(log, "request", logging.WARNING if status >= 500 else logging.INFO, **fields)

    def _admit(self, scope: Any, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        """Check what the head of a request says."""
        hosts = sum(name == b"host" for name, _ in scope["headers"])
        if hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise CallError(400, "HTTP/1.1 asks for one Host header in every request", code="invalid_http")
        coded = b",".join(value for name, value in scope["headers"] if name == b"transfer-encoding")
        if coded and coded.strip(b", \t").lower() != b"chunked":
            raise CallError(501, "the only Transfer-Encoding known here is chunked", code="unsupported_encoding")
        keys = self.admin if self.admin and scope["path"].startswith(ADMIN) else self.keys
        if keys and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            found = keys.find(headers.get(b"authorization", b"").decode("latin-1"))
            if found is None:
                raise CallError(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )
            state["key"] = found

    async def _whole(self, arriving: Arriving, headers: dict[bytes, bytes]) -> bytes:
        """The body, once all of it is here."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.body_timeout):
                while arriving.more:
                    parts.append(await arriving.next())
                    size += len(parts[-1])
                    self._arriving += len(parts[-1])
                    if size > self.max_body:
                        raise self._too_large()
                    if self._arriving > BODIES * self.max_body:
                        raise unavailable("too many large bodies are arriving; try again later", "too_many_bodies")
        except TimeoutError:
            raise CallError(408, "the body did not arrive in time", code="body_timeout") from None
        finally:
            self._arriving -= size
        return b"".join(parts)

    def _too_large(self) -> CallError:
        return CallError(413, f"the body is larger than {self.max_body} bytes", code="body_too_large")


def given(body: bytes, receive: Any) -> Any:
    """A `receive` that has the whole body, then goes on."""
    rest = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return rest.pop() if rest else await receive()

    return receiving


def _why(state: dict[str, Any]) -> dict[str, str]:
    """What the log says of a request that was refused."""
    error: CallError | None = state.get("error")
    named = {"code": error.code, "param": error.param} if error is not None else {}
    return {name: value[:LOGGED] for name, value in named.items() if value}


def _request_id(given: bytes) -> str:
    """The client's own id where it is a sane one."""
    text = given.decode("latin-1")
    return text if _ID.fullmatch(text) else uuid.uuid4().hex


def _route(path: str) -> str:
    """A path for the metrics: never what a client made up."""
    known = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info")
    ours = ("/v1/responses", "/v1/responses/input_tokens", ADMIN + "architecture", DASHBOARD + "/events")
    if path in known or path in ours or path in OPEN_PATHS:
        return path
    above = next((above for above in ("/v1/models/", "/v1/responses/") if path.startswith(above)), None)
    return above + "{id}" if above else "other"
