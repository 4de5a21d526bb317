"""A small HTTP client for streams: one connection a request, read as it comes. Knows HTTP/1.1; nothing of models.

It is this small so that a benchmark's client costs little of the machine that it shares with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from verifypd.errors import ConfigError, VerifyPDError

LINE = 1 << 20  # bytes of a header line at most
BODY = 1 << 24  # bytes of an answer that is read whole, at most


class HTTPError(VerifyPDError):
    """A server answered with something else than 200, or with no HTTP: then the status is 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    scheme: str
    host: str
    port: int
    path: str  # before /v1; empty or beginning with a slash

    @classmethod
    def parse(cls, url: str) -> Address:
        """`http://host:8000`, with or without /v1 behind it."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{url!r} is no URL of a server; give for example http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


class Client:
    """Asks one server."""

    def __init__(self, address: Address, key: str | None = None) -> None:
        self.address = address
        self.software = ""  # as the last answer's header names it
        self._headers = {
            "Host": f"{address.host}:{address.port}",
            "Connection": "close",
            "User-Agent": "verifypd-bench",
        }
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    async def get(self, path: str, timeout: float = 30.0) -> bytes:
        """The body of a GET."""
        async with asyncio.timeout(timeout):
            found = b""
            async with contextlib.aclosing(self._ask("GET", path, b"")) as parts:
                async for part in parts:
                    found += part
                    if len(found) > BODY:
                        raise HTTPError(f"GET {path}: the answer is too long")
            return found

    async def events(self, path: str, body: dict[str, Any] | None) -> AsyncIterator[list[dict[str, Any]]]:
        """The events of a stream, those that came together in one list. Ends at [DONE] or with the connection.

        Without a body it is a GET.
        """
        rest = b""
        method, sent = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        async with contextlib.aclosing(self._ask(method, path, sent)) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                if found := [_event(each) for each in data if each != b"[DONE]"]:
                    yield found
                if b"[DONE]" in data:
                    return

    async def _ask(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """Send a request; what comes back, piece by piece."""
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port, ssl=self._tls, limit=LINE)
        try:
            headers = self._headers | ({"Content-Type": "application/json"} if body else {})
            headers["Content-Length"] = str(len(body))
            lines = [f"{method} {self.address.path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            status, given = await _head(reader)
            self.software = given.get("server", "")
            parts = _body(reader, given)
            if status != 200:
                found = b"".join([part async for part in parts])
                raise HTTPError(f"HTTP {status}: {_message(found)}", status)
            async for part in parts:
                yield part
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise HTTPError(f"the connection broke: {error}") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    start = (await reader.readline()).split()
    if len(start) < 2 or not start[0].startswith(b"HTTP/") or not start[1].isdigit():
        raise HTTPError("no HTTP answer")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(start[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The pieces of a body, by chunks, by its length, or until the connection ends."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:size]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def _event(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HTTPError(f"an event is no JSON object: {data[:80]!r}")
    return found


def _message(body: bytes) -> str:
    """What an error says, in one line."""
    try:
        found = json.loads(body)
        error = found.get("error", found.get("detail", found))
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:300]
