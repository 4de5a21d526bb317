"""Overload for a while: everybody is answered or refused, memory stays flat, those let in are served as before.

A short form runs with the other tests; `make soak` runs ten minutes and writes its figures.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.clients import request_bytes
from tests.server.results import keep
from tests.server.serving import Server

pytestmark = pytest.mark.xdist_group("server-soak")

CLIENTS = 24  # at once, against 10 slots and a queue of 6
SHORT, LONG = 20.0, 600.0  # s


@dataclass
class Tally:
    """What happened to every request."""

    sent: int = 0
    served: list[tuple[float, float]] = field(default_factory=list)  # end and length of each, s
    refused: int = 0
    left: int = 0
    odd: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # time, MiB of all processes


async def one(server: Server, dice: random.Random, tally: Tally, begun: float) -> None:
    """A request from connecting to its end; one in twenty leaves early, one in ten does not stream."""
    stream, leave = dice.random() > 0.1, dice.random() < 0.05
    prompt = [3 + dice.randrange(300) for _ in range(dice.randrange(4, 120))]
    body = {"prompt": prompt, "max_tokens": dice.randrange(2, 60), "seed": dice.randrange(1 << 30), "stream": stream}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    tally.sent += 1
    start = time.monotonic()
    try:
        writer.write(request_bytes("/v1/completions", body).replace(b"Host: x", b"Host: x\r\nConnection: close"))
        await writer.drain()
        if leave:
            await asyncio.sleep(dice.random() * 0.3)
            tally.left += 1
            return
        data = await asyncio.wait_for(reader.read(), 120)
        status = int(data.split(None, 2)[1])
        if status == 200 and (b'"finish_reason":"' in data) and (not stream or b"[DONE]" in data):
            tally.served.append((time.monotonic() - begun, time.monotonic() - start))
        elif status == 429 and b"retry-after" in data.lower():
            tally.refused += 1
            await asyncio.sleep(dice.uniform(0.02, 0.2))
        else:
            tally.odd.append(data[:200].decode(errors="replace"))
    finally:
        writer.close()


def own_memory(process: psutil.Process) -> float:
    """MiB that belong to a process alone: pages of libraries come and go as the system likes."""
    info = process.memory_info()
    return float(info.rss - info.shared) / 2**20


async def load(server: Server, seconds: float) -> Tally:
    tally, begun = Tally(), time.monotonic()
    supervisor = psutil.Process(server.process.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    assert {server.process.pid, *server.children().values()} <= {process.pid for process in processes}

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() - begun < seconds:
            await one(server, dice, tally, begun)

    async def watch() -> None:
        while time.monotonic() - begun < seconds:
            tally.memory.append((time.monotonic() - begun, sum(own_memory(process) for process in processes)))
            await asyncio.sleep(seconds / 120)

    await asyncio.gather(watch(), *(client(number) for number in range(CLIENTS)))
    return tally


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def soak(folders: tuple[Path, Path], tmp_path: Path, seconds: float) -> dict[str, Any]:
    """Run, check what must hold, and return the figures."""
    flags: dict[str, Any] = {"max-queue": 6, "log-format": "json"}
    with Server(folders[0], str(folders[1]), tmp_path / "soak.log", **flags) as server:
        tally = asyncio.run(load(server, seconds))
        after = server.idle()
    assert not tally.odd, tally.odd[:3]
    assert tally.sent == len(tally.served) + tally.refused + tally.left
    assert tally.served and tally.refused, "it was no overload"
    assert after["verifypd:engine_restarts_total"] == 0
    settled = [used for at, used in tally.memory if at > seconds * 0.25]
    third = max(1, len(settled) // 3)
    early, late = sum(settled[:third]) / third, sum(settled[-third:]) / third
    parts = [[took for at, took in tally.served if lo <= at / seconds < lo + 0.25] for lo in (0.25, 0.5, 0.75)]
    tails = [percentile(part, 0.99) / percentile(part, 0.5) for part in parts]
    return {
        "seconds": seconds,
        "clients": CLIENTS,
        "requests": tally.sent,
        "served": len(tally.served),
        "refused": tally.refused,
        "left_early": tally.left,
        "neither_served_nor_refused": len(tally.odd),
        "memory_mib": {"second_quarter": round(early, 1), "last_quarter": round(late, 1)},
        "memory_growth": round(late / early - 1, 4),
        "p50_s_by_quarter": [round(percentile(part, 0.5), 3) for part in parts],
        "p99_s_by_quarter": [round(percentile(part, 0.99), 3) for part in parts],
        "p99_to_p50_by_quarter": [round(tail, 2) for tail in tails],
        "tokens": after["vllm:generation_tokens_total"],
    }


def check(figures: dict[str, Any], slack: float) -> None:
    """Memory is flat and p99 of the admitted stays; `slack`: what chance and other work on the machine may add."""
    assert abs(figures["memory_growth"]) < 0.05, figures
    for name in ("p99_s_by_quarter", "p99_to_p50_by_quarter"):
        first, *_, last = figures[name]
        assert last < slack * first, (name, figures)


@pytest.mark.slow
def test_overload_for_a_short_while(folders: tuple[Path, Path], tmp_path: Path) -> None:
    check(soak(folders, tmp_path, SHORT), slack=4.0)  # p99 is the third longest of some 240 here


@pytest.mark.soak
def test_overload_for_ten_minutes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    figures = soak(folders, tmp_path, float(os.environ.get("VERIFYPD_SOAK_SECONDS", LONG)))
    keep("server-soak", " with a noisy copy as its draft", figures)
    check(figures, slack=1.5)
