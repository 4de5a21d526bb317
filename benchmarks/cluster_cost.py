"""What Ray Serve costs: streamed tokens a second through `verifypd deploy` with two replicas, against two servers that
clients call directly, all with an engine that answers at once.

    python benchmarks/cluster_cost.py --json benchmarks/results/cluster_cost.json
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any

import psutil
import uvloop
from script import command_line, keep
from server_cost import ROOT, Client, Served, stream

from verifypd.bench.provenance import provenance
from verifypd.cli.deploy import free_port

FLAGS = ("--engine-factory", "verifypd.testing.instant:build", "--draft", "none", "--arch", "plain")


class Deployed:
    """Two replicas on this machine."""

    def __init__(self, *flags: str, **environment: str) -> None:
        self.port = free_port("127.0.0.1")
        command = [sys.executable, "-m", "verifypd", "deploy", "--local", "--replicas", "2", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        while not re.search("--address", line := self.process.stdout.readline()):
            assert line, "it did not start"

    def __enter__(self) -> Deployed:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def all_at_once(ports: list[int], body: dict[str, Any], streams: int) -> tuple[float, list[Client]]:
    """The same number of streams for each port; returns seconds and the clients."""
    begun = time.perf_counter()
    parts = await asyncio.gather(*(stream(port, [body] * (streams // len(ports))) for port in ports))
    return time.perf_counter() - begun, [client for _, clients in parts for client in clients]


def processor() -> float:
    """Seconds of processor time that this process and all below it have used."""
    here, used = psutil.Process(), 0.0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    return used


def rates(ports: list[int], streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Streamed tokens and events a second, and what they cost: other work on the machine changes that less."""
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
    found, events, used = [], [], 0.0
    for index in range(rounds + 1):
        before = processor()
        seconds, clients = uvloop.run(all_at_once(ports, body, streams))
        count = sum(client.events(tokens) for client in clients)
        if index:  # the first warms up
            used += processor() - before
            found.append(streams * tokens / seconds)
            events.append(count / seconds)
    return {
        "tokens_per_second": [round(rate) for rate in found],
        "median_tokens_per_second": round(median(found)),
        "median_events_per_second": round(median(events)),
        "processor_us_per_token": round(1e6 * used / (rounds * streams * tokens), 1),
    }


def compare(model: str, streams: int, tokens: int, rounds: int, step_ms: float) -> dict[str, Any]:
    """Both ways, one after the other."""
    flags = ("--model", model, "--batch-size", str(streams), *FLAGS)
    pace = {"VERIFYPD_INSTANT_STEP_MS": str(step_ms)}
    with ExitStack() as stack:
        ports = [stack.enter_context(Served(*flags, **pace)).port for _ in range(2)]
        direct = rates(ports, streams, tokens, rounds)
    with Deployed(*flags, **pace) as cluster:
        through = rates([cluster.port], streams, tokens, rounds)
    ratio = through["median_tokens_per_second"] / direct["median_tokens_per_second"]
    return {"engine_step_ms": step_ms, "two_servers": direct, "ray_serve": through, "ratio": round(ratio, 3)}


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=10.0, help="ms of a step of the paced engine")
    args = parser.parse_args()
    record: dict[str, Any] = {**provenance(args.commit), "streams": args.streams, "tokens_each": args.tokens}
    record["cores"] = len(os.sched_getaffinity(0))
    record["instant_engine"] = compare(args.model, args.streams, args.tokens, args.rounds, 0.0)
    record["paced_engine"] = compare(args.model, args.streams, args.tokens, args.rounds, args.pace)
    print(json.dumps(record, indent=1))
    keep(record, args.json)


if __name__ == "__main__":
    main()
