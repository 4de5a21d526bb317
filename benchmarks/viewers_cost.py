"""What five open dashboards cost: five interleaved pairs of runs, with and without viewers. Some minutes on a CPU.

    python benchmarks/viewers_cost.py --json benchmarks/results/viewers-cost.json

One server, one workload in a closed loop; viewers are connections to /dashboard/events that read all they get, in a
process of their own, as browsers elsewhere would. In every second pair the run with viewers comes first. Beside the
tokens a second stand the processor seconds of the engine a token, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from typing import Any

from script import command_line, keep

from verifypd.bench.arrivals import Process, make
from verifypd.bench.play import Limits, play, warm_up
from verifypd.bench.provenance import provenance
from verifypd.bench.sources import source
from verifypd.cli.compare import names
from verifypd.cli.flags import Parser, add_engine_flags
from verifypd.watch.arms import Started
from verifypd.watch.scrape import Scraper

CPU = "verifypd:engine_cpu_seconds_total"
T95 = {4: 2.776}  # Student's t for 95 %, by degrees of freedom


def view(address: str, key: str, count: int, ready: Any) -> None:
    """Entry of the viewers' process: reads until it is ended."""

    async def one() -> None:
        scraper = Scraper(address, key)
        async for _ in scraper.client.events("/dashboard/events", None):
            ready.release()

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(all_of_them())


async def run(server: Started, workload: Any, mark: str) -> dict[str, float]:
    """One run: tokens/s, and processor seconds of the engine a token."""
    address, key = server.where
    assert address is not None
    scraper = Scraper(address, key)
    before = (await scraper.read())[CPU]
    outcome = await play(server, workload.marked(mark), Limits())
    assert all(record.finished for record in outcome.records), "a request failed"
    await asyncio.sleep(1.0)  # until the engine has reported
    tokens = sum(record.tokens for record in outcome.records)
    after = (await scraper.read())[CPU]
    return {"tokens_s": tokens / outcome.seconds, "cpu_ms_token": 1e3 * (after - before) / tokens}


async def pairs(args: argparse.Namespace, server: Started) -> list[dict[str, Any]]:
    """The pairs, interleaved."""
    workload = make(source(args.source), Process(clients=args.clients), 0, count=args.requests)
    await warm_up(server, workload, Limits())
    address, key = server.where
    found = []
    for number in range(args.pairs):
        pair: dict[str, Any] = {}
        for viewed in (False, True) if number % 2 == 0 else (True, False):
            spawn = multiprocessing.get_context("spawn")
            ready = spawn.Semaphore(0)
            process = spawn.Process(target=view, args=(address, key, args.viewers, ready), daemon=True)
            if viewed:
                process.start()
                for _ in range(args.viewers):
                    await asyncio.to_thread(ready.acquire)
            pair["with" if viewed else "without"] = await run(server, workload, f"{number}-{viewed}")
            if viewed:
                process.terminate()
                process.join()
        found.append(pair)
        print(f"pair {number + 1}: {json.dumps(pair)}", file=sys.stderr, flush=True)
    return found


def summary(found: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Geometric mean of with over without, and its 95 % interval."""
    logs = [math.log(pair["with"][name] / pair["without"][name]) for pair in found]
    mean = statistics.mean(logs)
    wide = T95.get(len(logs) - 1, 2.0) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return {"ratio": math.exp(mean), "low": math.exp(mean - wide), "high": math.exp(mean + wide)}


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the server, measure, stop it."""
    server = Started(args.arch, {"model": args.model, "arch": args.arch}, args.names)
    try:
        await server.start()
        return await pairs(args, server)
    finally:
        await server.close()


def main() -> None:
    """Run it, and write what was found."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--arch", default="plain")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--source", default="fixed:32x48")
    args = parser.parse_args()
    engine = Parser()
    add_engine_flags(engine)
    args.names = names(engine)
    random.seed(0)
    begun = time.time()
    found = asyncio.run(measure(args))
    record = provenance(args.commit)
    settings = {name: getattr(args, name) for name in ("model", "arch", "viewers", "clients", "requests", "source")}
    record |= {"settings": settings, "seconds": round(time.time() - begun), "pairs": found}
    record |= {name: summary(found, name) for name in ("tokens_s", "cpu_ms_token")}
    keep(record, args.json)
    for name in ("tokens_s", "cpu_ms_token"):
        own = record[name]
        print(f"{name} with viewers over without: {own['ratio']:.4f} ({own['low']:.4f}–{own['high']:.4f})")


if __name__ == "__main__":
    main()
