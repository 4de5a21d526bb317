"""What the server costs: streamed tokens a second with an engine that answers at once, and the engine's step time
behind HTTP against the same steps offline, in the same process.

    python benchmarks/server_cost.py --json benchmarks/results/server_cost.json
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop
from script import command_line, keep

from verifypd.bench.provenance import provenance
from verifypd.config import EngineConfig
from verifypd.request import Request, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
ORDERS = "VERIFYPD_COST_ORDERS"  # names the folder through which the engine below is told what to do
WAIT = 120.0  # s, for an order to be carried out


# -- the server and its clients ---------------------------------------------------------------------------------------


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
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},  # it finds this script
        )
        assert self.process.stdout is not None
        match = re.search(r"http://\S+:(\d+)", self.process.stdout.readline())
        assert match, "the server did not start"
        self.port = int(match.group(1))

    def cpu(self) -> dict[str, float]:
        """Seconds of processor time each process has used."""
        used = {"client": sum(psutil.Process().cpu_times()[:2])}
        for child in psutil.Process(self.process.pid).children():
            maps = {Path(each.path).name for each in child.memory_maps()}
            name = "engine" if any("libtorch" in each for each in maps) else "api"
            if name == "engine" or any("httptools" in each or "parser" in each for each in maps):
                used[name] = sum(child.cpu_times()[:2])
        return used

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)


class Client(asyncio.Protocol):
    """Sends one request and keeps what comes; it is read when the clock has stopped."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parts: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closes when it is done."""
        self.done.set_result(None)

    def events(self, tokens: int) -> int:
        """How many events the answer came in; an answer that is not whole is no measurement."""
        head, _, body = b"".join(self.parts).partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        assert status == b"200", f"status {status.decode()}: {body[:300]!r}"
        events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
        assert b"data: [DONE]" in body and events, "the stream broke off"
        last = events[-1]["usage"]["completion_tokens"]
        assert last == tokens, f"{last} tokens instead of {tokens}"
        return len(events) - 1


def request(body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + data


async def stream(port: int, bodies: list[dict[str, Any]]) -> tuple[float, list[Client]]:
    """All at once; returns seconds and the clients."""
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    made = [await loop.create_connection(lambda b=b: Client(request(b)), "127.0.0.1", port) for b in bodies]
    clients = [client for _, client in made]
    await asyncio.gather(*(client.done for client in clients))
    return time.perf_counter() - begun, clients


def instant(model: str, streams: int, tokens: int, rounds: int, step_ms: float) -> dict[str, Any]:
    """Streamed tokens a second with one API worker; `step_ms` > 0 paces the engine: an event for every token."""
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
    flags = ("--model", model, "--engine-factory", "verifypd.testing.instant:build", "--batch-size", str(streams))
    rates, events, cpu = [], [], []
    with Served(*flags, "--draft", "none", "--arch", "plain", VERIFYPD_INSTANT_STEP_MS=str(step_ms)) as server:
        for index in range(rounds + 1):
            before = server.cpu()
            seconds, clients = uvloop.run(stream(server.port, [body] * streams))
            after = server.cpu()
            count = sum(client.events(tokens) for client in clients)
            if index:  # the first warms up
                rates.append(streams * tokens / seconds)
                events.append(count / seconds)
                cpu.append({name: (after[name] - before[name]) / (streams * tokens) * 1e6 for name in after})
    return {
        "streams": streams,
        "tokens_each": tokens,
        "engine_step_ms": step_ms,
        "offered_tokens_per_second": round(streams / step_ms * 1e3) if step_ms else None,
        "tokens_per_second": [round(rate) for rate in rates],
        "median_tokens_per_second": round(median(rates)),
        "median_events_per_second": round(median(events)),
        "cpu_us_per_token": {name: round(median(each[name] for each in cpu), 1) for name in cpu[0]},
    }


# -- the engine, which steps offline or for the server ----------------------------------------------------------------


def stepping(config: EngineConfig) -> Any:
    """An engine factory for the server: the real engine, every step of which is timed.

    Between requests it looks for orders in a folder: `offline` runs the requests in the file by itself, as a program
    without a server would; `report` ends a round. Either writes `done`: start, s, and tokens of each step.
    """
    from verifypd.engine.build import build

    built = build(config)
    engine: Any = built.engine
    step, check, folder = engine.step, engine.check, Path(os.environ[ORDERS])
    steps: list[tuple[float, float, int]] = []
    orders = iter(range(1 << 40, 1 << 41))  # far from those of the server

    def timed_step() -> list[Request]:
        begun = time.perf_counter()
        news: list[Request] = step()
        steps.append((begun, time.perf_counter() - begun, len(news)))
        return news

    def idle() -> None:
        check()
        offline, report = folder / "offline", folder / "report"
        if offline.exists():
            work = json.loads(offline.read_text())
            offline.unlink()
            params = SamplingParams(**work["params"])
            for prompt in work["prompts"]:
                longest = len(prompt) + (params.max_tokens or 0)
                engine.add(
                    Request("x", prompt, params, seed=0, max_length=longest, arrival=engine.clock(), order=next(orders))
                )
            while engine.busy:
                engine.step()
            report.touch()
        if report.exists():
            report.unlink()
            (folder / "part").write_text(json.dumps(steps))
            steps.clear()
            (folder / "part").rename(folder / "done")

    engine.step, engine.check = timed_step, idle
    return built


def carried_out(folder: Path, order: str, content: str = "") -> list[tuple[float, float, int]]:
    """Give the engine an order; returns the steps it timed."""
    (folder / "part-of-order").write_text(content)
    (folder / "part-of-order").rename(folder / order)
    until = time.monotonic() + WAIT
    while not (folder / "done").exists():
        assert time.monotonic() < until, f"the engine did not carry out {order!r}"
        time.sleep(0.02)
    found = json.loads((folder / "done").read_text())
    (folder / "done").unlink()
    return [tuple(each) for each in found]  # type: ignore[misc]


def medians(steps: list[tuple[float, float, int]], streams: int) -> tuple[float, float]:
    """Median ms of a step that gave every stream a token, and from its start to that of the next: the loop's turn."""
    whole = [place for place, (_, _, news) in enumerate(steps) if news == streams]
    assert len(whole) > 4, "too few steps with all streams in them"
    turns = [steps[place + 1][0] - steps[place][0] for place in whole if place + 1 in whole]
    return median(steps[place][1] for place in whole) * 1e3, median(turns) * 1e3


def behind_http(model: str, streams: int, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """The same requests offline and through the server, in turn; no prefix cache, no speculation."""
    prompts = [[10 + 7 * i + j for j in range(16)] for i in range(streams)]
    fields = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    bodies = [{"prompt": prompt, **fields} for prompt in prompts]
    flags = ["--model", model, "--draft", "none", "--arch", "plain", "--batch-size", str(streams), "--no-prefix-cache"]
    flags += ["--max-model-len", "512", "--engine-factory", "benchmarks.server_cost:stepping"]
    work = json.dumps({"prompts": prompts, "params": fields})
    arms: dict[str, list[tuple[float, float]]] = {"offline": [], "served": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Served(*flags, OMP_NUM_THREADS=str(threads), **{ORDERS: name}) as server:
            for index in range(rounds + 1):
                print(f"step time: round {index} of {rounds}", file=sys.stderr)
                alone = carried_out(folder, "offline", work)
                _, clients = uvloop.run(stream(server.port, bodies))
                for client in clients:
                    client.events(tokens)
                served = carried_out(folder, "report")
                if index:  # the first warms up
                    arms["offline"].append(medians(alone, streams))
                    arms["served"].append(medians(served, streams))
    ratios = [[b[k] / a[k] for a, b in zip(arms["offline"], arms["served"], strict=True)] for k in (0, 1)]
    return {
        "model": model,
        "streams": streams,
        "tokens_each": tokens,
        "compute_threads": threads,
        **{f"{arm}_step_ms": [round(step, 3) for step, _ in each] for arm, each in arms.items()},
        **{f"{arm}_turn_ms": [round(turn, 3) for _, turn in each] for arm, each in arms.items()},
        "median_step_ratio": round(median(ratios[0]), 4),
        "median_turn_ratio": round(median(ratios[1]), 4),
    }


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream, with the instant engine")
    parser.add_argument("--pace", type=float, default=1.2, help="ms of a step of the paced engine")
    parser.add_argument("--step-model", help="for the step time (default: that of --model)")
    parser.add_argument("--step-tokens", type=int, default=16, help="of each stream, with the real one")
    threads = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument("--threads", type=int, default=threads, help="compute threads of the engine's steps")
    parser.add_argument("--skip-step", action="store_true", help="only the instant engine")
    parser.add_argument("--skip-instant", action="store_true", help="only the step time")
    args = parser.parse_args()
    record: dict[str, Any] = provenance(args.commit)
    if not args.skip_instant:
        record["instant_engine"] = instant(args.model, args.streams, args.tokens, args.rounds, 0.0)
        record["paced_engine"] = instant(args.model, args.streams, args.tokens, args.rounds, args.pace)
    if not args.skip_step:
        model = args.step_model or args.model
        record["step_time"] = behind_http(model, args.streams, args.step_tokens, args.rounds, args.threads)
    print(json.dumps(record, indent=1))
    keep(record, args.json)


if __name__ == "__main__":
    main()
