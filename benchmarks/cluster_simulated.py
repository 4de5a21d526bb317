"""Two replicas of an engine of known pace through Ray Serve, and the same requests through the simulated cluster.

The simulator is told how long a step takes, and how long a request is on its way; both are measured first, with a
stream alone in each replica. How long requests wait for a slot, and for each other, it has to find by itself.

    python benchmarks/cluster_simulated.py --json benchmarks/results/cluster_simulated.json
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import uvloop
from cluster_cost import FLAGS, Deployed
from script import command_line, keep
from server_cost import Client, request

from verifypd.bench.provenance import provenance
from verifypd.cluster.config import ClusterConfig
from verifypd.cluster.simulated import Cluster
from verifypd.cluster.simulated_replica import Asked, World
from verifypd.config import EngineConfig
from verifypd.simulate.pace import even_pace

REPLICAS = 2
WITHIN = 0.15  # of what was measured
CLAIMED = ("tok_s", "ttft_ms_mean", "e2e_ms_mean")  # figures that must be so near
SHORT, LONG = 20, 100  # tokens of an output


@dataclass(frozen=True, slots=True)
class Seen:
    """One stream: s from the time its request was due."""

    first: float
    last: float
    tokens: int


class Timed(Client):
    """Keeps the times at which tokens came."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.times: list[float] = []

    def data_received(self, data: bytes) -> None:
        """Keep both."""
        super().data_received(data)
        if b"data: {" in data:
            self.times.append(time.perf_counter())


def workload(rate: float, seconds: float, seed: int) -> list[Asked]:
    """Poisson arrivals with outputs of any length between two."""
    noise, at, found = random.Random(seed), 0.0, []
    while (at := at + noise.expovariate(rate)) < seconds:
        found.append(Asked(at, 8, noise.randint(SHORT, LONG)))
    return found


async def ask(port: int, asked: Asked, begun: float, seed: int) -> Seen:
    """One request, when it is due."""
    await asyncio.sleep(begun + asked.at - time.perf_counter())
    noise = random.Random(seed)
    prompt = [noise.randrange(5, 1000) for _ in range(asked.prompt)]
    body = {"prompt": prompt, "max_tokens": asked.output, "ignore_eos": True}
    made = lambda: Timed(request(body))  # noqa: E731
    _, client = await asyncio.get_running_loop().create_connection(made, "127.0.0.1", port)
    await client.done
    client.events(asked.output)  # raises unless it is whole
    due = begun + asked.at
    # the last two events are the end and the usage
    return Seen(client.times[0] - due, client.times[-1] - due, asked.output)


async def play(port: int, requests: Sequence[Asked]) -> list[Seen]:
    """All of them."""
    begun = time.perf_counter() + 0.1
    return await asyncio.gather(*(ask(port, each, begun, place) for place, each in enumerate(requests)))


def calibrate(port: int, probes: int, pace: float) -> tuple[float, float]:
    """Seconds of a step, and of a request's way in, with one stream in each replica and a third that comes and goes.

    A request waits half a step until the next, whose end brings its first token.
    """
    apart = (SHORT + 2.3) * pace  # s; not a whole number of steps
    long = [Asked(0.0, 8, round((probes + 1) * apart / pace))] * REPLICAS
    short = [Asked((place + 0.5) * apart, 8, SHORT) for place in range(probes)]
    seen = uvloop.run(play(port, [*long, *short]))
    step = mean((each.last - each.first) / (each.tokens - 1) for each in seen[:REPLICAS])
    way = median(each.first for each in seen[REPLICAS:]) - 1.5 * step
    return step, max(0.0, way)


def figures(seen: Sequence[Seen], requests: Sequence[Asked]) -> dict[str, float]:
    """Throughput, and times in ms."""
    ends = [asked.at + each.last for asked, each in zip(requests, seen, strict=True)]
    first, last = [each.first * 1e3 for each in seen], [each.last * 1e3 for each in seen]
    found = {
        "tok_s": sum(each.tokens for each in seen) / (max(ends) - requests[0].at),
        "ttft_ms_mean": mean(first),
        "ttft_ms_p95": float(np.percentile(first, 95)),
        "e2e_ms_mean": mean(last),
        "e2e_ms_p95": float(np.percentile(last, 95)),
    }
    return {name: round(value, 2) for name, value in found.items()}


def simulate(requests: Sequence[Asked], step: float, way: float, slots: int) -> list[Seen]:
    """The same requests in the simulated cluster."""
    world = World(even_pace(step, slots), ingress_seconds=way)
    streams = Cluster(ClusterConfig(replicas=REPLICAS), world).play(requests).streams
    assert all(each.first is not None and each.ended is not None for each in streams)
    return [
        Seen((each.first or 0.0) - each.asked.at, (each.ended or 0.0) - each.asked.at, each.asked.output)
        for each in streams
    ]


def compared(measured: dict[str, float], simulated: dict[str, float]) -> dict[str, Any]:
    """Simulated over measured."""
    ratios = {name: round(simulated[name] / value, 3) for name, value in measured.items()}
    return {"ratios": ratios, "within": all(abs(ratios[name] - 1) <= WITHIN for name in CLAIMED)}


def main() -> None:
    """Measure, simulate and compare."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pace", type=float, default=100.0, help="ms of a step")
    parser.add_argument("--batch-size", type=int, default=5, help="of each replica")
    parser.add_argument("--load", default="0.5,0.85", help="shares of what all slots can do")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--probes", type=int, default=25)
    args = parser.parse_args()
    flags = ("--model", args.model, "--batch-size", str(args.batch_size), *FLAGS)
    slots = EngineConfig(model=args.model, batch_size=args.batch_size).slots
    record: dict[str, Any] = {**provenance(args.commit), "cores": len(os.sched_getaffinity(0)), "replicas": REPLICAS}
    record |= {"slots": slots, "engine_step_ms": args.pace, "runs": []}
    with Deployed(*flags, VERIFYPD_INSTANT_STEP_MS=str(args.pace)) as cluster:
        uvloop.run(play(cluster.port, workload(4.0, 5.0, 99)))  # warms up
        step, way = calibrate(cluster.port, args.probes, args.pace / 1e3)
        record |= {"measured_step_ms": round(step * 1e3, 3), "measured_way_ms": round(way * 1e3, 3)}
        for seed, share in enumerate(map(float, args.load.split(","))):
            rate = share * REPLICAS * slots / ((SHORT + LONG) / 2 * step)
            requests = workload(rate, args.seconds, seed)
            measured = figures(uvloop.run(play(cluster.port, requests)), requests)
            simulated = figures(simulate(requests, step, way, slots), requests)
            run = {"load": share, "rate": round(rate, 3), "requests": len(requests), "measured": measured}
            record["runs"].append(run | {"simulated": simulated, **compared(measured, simulated)})
    print(json.dumps(record, indent=1))
    keep(record, args.json)


if __name__ == "__main__":
    main()
