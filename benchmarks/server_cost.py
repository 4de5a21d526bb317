"""What the server costs: streamed tokens a second with an engine that answers at once, and the engine's step time
behind HTTP against the same steps offline.

    python benchmarks/server_cost.py --json benchmarks/results/server_cost.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import verifypd
from verifypd import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^verifypd:step_seconds_(sum|count)\{[^}]*\} (\S+)$", re.MULTILINE)


class Served:
    """A server on a port the system chooses."""

    def __init__(self, *flags: str, **environment: str) -> None:
        command = [sys.executable, "-m", "verifypd", "serve", "--port", "0", "--metrics-interval", "0.1", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        match = re.search(r"http://\S+:(\d+)", self.process.stdout.readline())
        assert match, "the server did not start"
        self.address, self.port = match.group(), int(match.group(1))

    def steps(self) -> tuple[float, float]:
        """Seconds and number of engine steps so far."""
        time.sleep(0.4)  # the engine reports every 0.1 s
        with urllib.request.urlopen(self.address + "/metrics") as answer:
            found = dict(STEP.findall(answer.read().decode()))
        return float(found["sum"]), float(found["count"])

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)


class Counter(asyncio.Protocol):
    """Sends one request and counts the events of its answer."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Count; an event cut in two by the network may be missed."""
        self.events += data.count(b"data: {")

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closes when it is done."""
        self.done.set_result(None)


def request(body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + data


async def stream(port: int, bodies: list[dict[str, Any]]) -> tuple[float, int]:
    """All at once; returns seconds and events."""
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    made = [await loop.create_connection(lambda b=b: Counter(request(b)), "127.0.0.1", port) for b in bodies]
    await asyncio.gather(*(counter.done for _, counter in made))
    return time.perf_counter() - begun, sum(counter.events for _, counter in made)


def instant(model: str, streams: int, tokens: int, rounds: int, step_ms: float) -> dict[str, Any]:
    """Streamed tokens a second with one API worker; `step_ms` > 0 paces the engine: an event for every token."""
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    flags = ("--model", model, "--engine-factory", "verifypd.testing.instant:build", "--batch-size", str(streams))
    rates, events = [], []
    with Served(*flags, "--draft", "none", "--arch", "plain", VERIFYPD_INSTANT_STEP_MS=str(step_ms)) as server:
        for index in range(rounds + 1):
            seconds, count = asyncio.run(stream(server.port, [body] * streams))
            if index:  # the first warms up
                rates.append(streams * tokens / seconds)
                events.append(count / seconds)
    return {
        "streams": streams,
        "tokens_each": tokens,
        "engine_step_ms": step_ms,
        "tokens_per_second": [round(rate) for rate in rates],
        "median_tokens_per_second": round(median(rates)),
        "median_events_per_second": round(median(events)),
    }


def offline_step(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Mean seconds of a step."""
    engine, original = llm.engine, llm.engine.step
    spent, count = 0.0, 0

    def step() -> Any:
        nonlocal spent, count
        begun = time.perf_counter()
        news = original()
        spent, count = spent + time.perf_counter() - begun, count + 1
        return news

    engine.step = step  # type: ignore[method-assign]
    llm.generate(prompts, params)
    engine.step = original  # type: ignore[method-assign]
    return spent / count


def behind_http(model: str, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The same requests offline and through the server, in turn; no prefix cache, no speculation."""
    prompts = [[10 + 7 * i + j for j in range(16)] for i in range(streams)]
    settings: dict[str, Any] = {"arch": "plain", "batch_size": streams, "prefix_cache": False, "max_model_len": 512}
    flags = ["--arch", "plain", "--batch-size", str(streams), "--no-prefix-cache", "--max-model-len", "512"]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    common = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [{"prompt": prompt, **common} for prompt in prompts]
    alone, served = [], []
    with LLM(model, draft=None, **settings) as llm, Served("--model", model, "--draft", "none", *flags) as server:
        for index in range(rounds + 1):
            one = offline_step(llm, prompts, params)
            before = server.steps()
            asyncio.run(stream(server.port, bodies))
            after = server.steps()
            other = (after[0] - before[0]) / (after[1] - before[1])
            if index:
                alone.append(one)
                served.append(other)
    return {
        "model": model,
        "streams": streams,
        "tokens_each": tokens,
        "offline_step_ms": [round(value * 1e3, 3) for value in alone],
        "served_step_ms": [round(value * 1e3, 3) for value in served],
        "median_ratio": round(median(b / a for a, b in zip(alone, served, strict=True)), 4),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream, with the instant engine")
    parser.add_argument("--pace", type=float, default=1.4, help="ms of a step of the paced engine")
    parser.add_argument("--step-tokens", type=int, default=32, help="of each stream, with the real one")
    parser.add_argument("--skip-step", action="store_true", help="only the instant engine")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    record: dict[str, Any] = {
        "command": "python benchmarks/server_cost.py " + " ".join(sys.argv[1:]),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"verifypd": verifypd.__version__, "python": platform.python_version()},
        "instant_engine": instant(args.model, args.streams, args.tokens, args.rounds, 0.0),
        "paced_engine": instant(args.model, args.streams, args.tokens, args.rounds, args.pace),
    }
    if not args.skip_step:
        record["step_time"] = behind_http(args.model, args.streams, args.step_tokens, args.rounds)
    text = json.dumps(record, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
