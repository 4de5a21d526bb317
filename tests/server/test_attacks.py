"""Large bodies: refused by length, or read beside everybody else. A neighbour's stream goes on, and memory returns.

A short form runs with the other tests; `make soak` sends the largest bodies there are and writes the true gaps.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.neighbour import Neighbour, calmest
from tests.server.results import keep
from tests.server.serving import Server

pytestmark = pytest.mark.xdist_group("server-attacks")

GAP = 1.5  # s; it was 3 to 24
SIZE = 7_900_000  # bytes of text just under the default of --max-body


@pytest.fixture(scope="module")
def attacked(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "attacked.log"
    with Server(folders[0], str(folders[1]), log) as running:
        yield running
        running.idle()


def raw(text: str) -> bytes:
    return json.dumps({"prompt": text}, ensure_ascii=False).encode()


def messages(count: int) -> bytes:
    return b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * count) + b"]}"


def texts(size: int) -> dict[str, str]:
    return {"words": "a " * (size // 2), "one word": "a" * size, "spaces": " " * size, "letters": "日" * (size // 3)}


def memory(server: Server) -> float:
    """MiB of all processes of the server but the engine."""
    supervisor = psutil.Process(server.process.pid)
    engine = server.children()["engine"]
    others = [process for process in supervisor.children(recursive=True) if process.pid != engine]
    return sum(process.memory_info().rss for process in others) / 2**20


def attack(server: Server, attacks: Iterator[tuple[str, str, bytes]]) -> dict[str, dict[str, Any]]:
    """What a neighbour and the attacker saw of each attack."""
    return {name: calmest(partial(attack_once, server, path, body), longest_wait, GAP) for name, path, body in attacks}


def longest_wait(seen: dict[str, Any]) -> float:
    return float(max(seen["stream_gap_s"], seen["health_gap_s"]))


def attack_once(server: Server, path: str, body: bytes) -> dict[str, Any]:
    made = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with Neighbour(server) as neighbour:
        begun = time.monotonic()
        made.request("POST", path, body, {"Content-Type": "application/json"})
        answer = made.getresponse()
        data = answer.read()
        seconds = time.monotonic() - begun
    made.close()
    assert not neighbour.odd, neighbour.odd[:2]
    return {
        "status": answer.status,
        "code": json.loads(data)["error"]["code"] if answer.status != 200 else None,
        "attacker_s": round(seconds, 2),
        "stream_gap_s": round(neighbour.stream_gap, 3),
        "health_gap_s": round(neighbour.health_gap, 3),
    }


def large_bodies(size: int, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Prompts and conversations far too long, odd bodies, then texts of that size and so many messages to tokenise."""
    for name, text in texts(SIZE).items():
        yield f"completion: {name}", "/v1/completions", raw(text)
    said = [{"role": "user", "content": "a " * (SIZE // 2)}]
    yield "chat: words", "/v1/chat/completions", json.dumps({"messages": said}).encode()
    yield "chat: messages", "/v1/chat/completions", messages(200_000)
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 95_000
    yield "responses: words", "/v1/responses", json.dumps({"input": "a " * (SIZE // 2)}).encode()
    yield "responses: calls", "/v1/responses", json.dumps({"input": calls}).encode()
    yield "completion: ids", "/v1/completions", b'{"prompt":[' + b"1," * (SIZE // 2) + b"1]}"
    yield "completion: lists", "/v1/completions", b'{"prompt":[' + b"[]," * (SIZE // 3) + b"[]]}"
    yield "completion: no JSON", "/v1/completions", b"[" * SIZE
    yield "tokenize: messages", "/tokenize", messages(count)
    for name, text in texts(size).items():
        yield f"tokenize: {name}", "/tokenize", raw(text)


def check(found: dict[str, dict[str, Any]]) -> None:
    for name, seen in found.items():
        assert longest_wait(seen) < GAP, (name, seen)
        expected = 200 if "tokenize" in name else 400
        assert seen["status"] == expected, (name, seen)
        if name not in ("completion: lists", "completion: no JSON"):
            assert seen["code"] in (None, "context_length_exceeded"), (name, seen)


@pytest.mark.slow
def test_a_neighbour_of_large_bodies_waits_no_longer(attacked: Server) -> None:
    """Neither its stream nor /health, whatever the body; and the memory it took is returned."""
    before = memory(attacked)
    found = attack(attacked, large_bodies(300_000, 5_000))
    check(found)
    assert memory(attacked) < before + 400, "a reader of 128 MB more than at its start at most, and buffers"
    attacked.idle()


@pytest.mark.soak
def test_a_neighbour_of_the_largest_bodies(attacked: Server) -> None:
    before = memory(attacked)
    found = attack(attacked, large_bodies(SIZE, 200_000))
    record = {
        "body_bytes": SIZE,
        "longest_stream_gap_s": max(seen["stream_gap_s"] for seen in found.values()),
        "longest_health_gap_s": max(seen["health_gap_s"] for seen in found.values()),
        "memory_mib": {"before": round(before), "after": round(memory(attacked))},
        "attacks": found,
    }
    keep("server-attacks", " with a noisy copy as its draft", record)
    check(found)
