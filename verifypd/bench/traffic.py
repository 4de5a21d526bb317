"""Self-made traffic for a server that runs: a few clients that ask, read the answer and pause. Knows HTTP only."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from verifypd.bench.texts import EDITS, PROSE, TEXTS

PAUSE = 1.5  # s a client thinks between two requests, at most
PATIENCE = 120.0  # s it waits for an answer
BACK_OFF = 1.0  # s before it tries again after a refusal


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who asks what, and for how long."""

    address: str
    model: str
    key: str | None
    clients: int
    seconds: float


def run(traffic: Traffic, parent: int) -> None:
    """Entry of the process: asks until the time is over or the process that started it has gone."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: os._exit(0))
    until = time.monotonic() + traffic.seconds
    for number in range(traffic.clients):
        threading.Thread(target=_client, args=(traffic, random.Random(number), until), daemon=True).start()
    while time.monotonic() < until and os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)  # streams under way are left: nobody reads them


def _client(traffic: Traffic, draw: random.Random, until: float) -> None:
    while time.monotonic() < until:
        try:
            ask(traffic, body(traffic.model, draw))
        except (OSError, urllib.error.URLError):  # refused, restarting, or gone: another time
            time.sleep(BACK_OFF)
        time.sleep(draw.uniform(0.0, PAUSE))


def body(model: str, draw: random.Random) -> dict[str, Any]:
    """One request: half of them invite copying, some have long prompts, some sample."""
    copied = draw.choice(EDITS).format(draw.choice(TEXTS) * draw.choice((1, 1, 4)))
    return {
        "model": model,
        "prompt": copied if draw.random() < 0.5 else draw.choice(PROSE),
        "max_tokens": draw.randint(24, 96),
        "temperature": draw.choice((0.0, 0.0, 0.7)),
        "stream": True,
    }


def ask(traffic: Traffic, content: dict[str, Any]) -> int:
    """Send a request and read its answer; returns the answer's bytes."""
    headers = {"Content-Type": "application/json"}
    if traffic.key is not None:
        headers["Authorization"] = f"Bearer {traffic.key}"
    request = urllib.request.Request(f"{traffic.address}/v1/completions", json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return sum(len(line) for line in answer)
