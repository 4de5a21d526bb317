"""Clients for tests of load and faults: many at once, slow, vanishing, half-open. Bounded in time, loopback only."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.server.serving import Server


def connect(server: Server, receive_buffer: int | None = None, timeout: float = 60.0) -> socket.socket:
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(timeout)
    made.connect(("127.0.0.1", server.port))
    return made


def request_bytes(path: str, body: dict[str, Any], key: str = "none") -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
    return head.encode() + data


def greedy_and_drawn(server: Server, **headers: str) -> tuple[list[int], list[list[int]]]:
    """Tokens of a greedy completion, and of three whose bodies say nothing of sampling."""
    asked = {"prompt": [5, 9, 200], "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    bodies: list[dict[str, Any]] = [{**asked, "temperature": 0}, asked, asked, asked]
    greedy, *drawn = [server.post("/v1/completions", body, **headers)[1]["choices"][0]["token_ids"] for body in bodies]
    return greedy, drawn


def check_counters(server: Server, foreign: Path, **headers: str) -> None:
    """It counts what it is asked, and nothing where other programs count."""
    name = 'verifypd:calls_total{outcome="ok"}'
    before = server.idle().get(name, 0.0)
    assert server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}, **headers)[0] == 200
    assert server.metrics()[name] == before + 1
    assert len(list(foreign.iterdir())) == 2 and not list(foreign.glob("*/*"))


def vanish(made: socket.socket) -> None:
    """Close at once with a reset: what a killed client looks like."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


def read_all(made: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            part = made.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not part:
            return data
        data += part


@dataclass
class Stream:
    """A streaming completion in a thread of its own; `parts` grows."""

    server: Server
    body: dict[str, Any]
    path: str = "/v1/completions"
    key: str = "none"
    parts: list[dict[str, Any]] = field(default_factory=list)
    status: int = 0
    error: dict[str, Any] | None = None
    done: bool = False  # [DONE] was seen
    headers: bytes = b""

    def start(self) -> Stream:
        self.first = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        made = connect(self.server)
        made.sendall(request_bytes(self.path, {"stream": True, **self.body}, self.key))
        file = made.makefile("rb")
        self.status = int(file.readline().split()[1])
        while (line := file.readline()) not in (b"\r\n", b""):
            self.headers += line.lower()
        for line in file:
            if line.startswith(b"data: [DONE]"):
                self.done = True
                break
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]
                else:
                    self.parts.append(event)
                    self.first.set()
            elif line.startswith(b'{"error"'):
                self.error = json.loads(line)["error"]
                break
        self.first.set()
        made.close()

    @property
    def text(self) -> str:
        return "".join(choice["text"] for part in self.parts for choice in part["choices"])

    @property
    def finish(self) -> str | None:
        return self.parts[-1]["choices"][0]["finish_reason"] if self.parts else None

    def begun(self, seconds: float = 30.0) -> Stream:
        assert self.first.wait(seconds), "no token came"
        return self

    def join(self, seconds: float = 60.0) -> Stream:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the stream does not end"
        return self


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Run calls at once; their results in order."""
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        found[place] = works[place]()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a call does not end"
    return found
