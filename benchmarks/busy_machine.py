"""The built-in pair on a CPU that it has to share: tokens/s beside programs that never rest, by how long threads ask.

    python benchmarks/busy_machine.py --json benchmarks/results/busy-machine.json      # minutes, nothing else running

Threads of one product wait for each other by asking again and again before they sleep; `GOMP_SPINCOUNT` says how often.
An arm is a number of times: that of the library, and that of the package. Engines run in processes of their own and
take turns; figures are medians over turns, with the least and the most.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any

from script import command_line, keep

import verifypd  # sets the package's own number
from verifypd.bench.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = os.environ["GOMP_SPINCOUNT"]
ARMS = {"library": "300000", "own": OWN}  # times that a thread asks
TOKENS = 32
PROMPT = "The sea is a place where"
KINDS = {"auto": {}, "plain": {"draft": None, "arch": "plain"}}


def serve(kind: str) -> None:
    """One engine: a line in, the tokens/s of one answer out."""
    params = verifypd.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with verifypd.LLM("smollm2", max_model_len=512, prefix_cache=False, **KINDS[kind]) as llm:
        llm.generate([PROMPT], params)
        print("ready", flush=True)
        for _ in sys.stdin:
            begun = time.perf_counter()
            llm.generate([PROMPT], params)
            print(TOKENS / (time.perf_counter() - begun), flush=True)


@contextmanager
def engine(kind: str, asked: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """An engine in a process of its own: where to write, and where to read."""
    command = [sys.executable, __file__, "--serve", kind]
    with subprocess.Popen(
        command, env=os.environ | {"GOMP_SPINCOUNT": asked}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            while (said := process.stdout.readline()) != "ready\n":
                if not said:
                    raise RuntimeError("the engine did not start")
            yield process.stdin, process.stdout
        finally:
            process.kill()


@contextmanager
def programs(count: int) -> Iterator[None]:
    """So many programs that never rest."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()


def measure(kind: str, beside: list[int], rounds: int) -> list[dict[str, Any]]:
    """All arms, by turns, beside so many programs."""
    found = []
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(kind, asked)) for name, asked in ARMS.items()}
        for count in beside:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            with programs(count):
                for turn in range(rounds):
                    for name in list(engines)[:: 1 if turn % 2 == 0 else -1]:
                        question, answer = engines[name]
                        print(file=question, flush=True)
                        speeds[name].append(float(answer.readline()))
            arms = {
                name: {"tok_s": statistics.median(own), "least": min(own), "most": max(own)}
                for name, own in speeds.items()
            }
            print(kind, f"beside {count}:", {name: round(own["tok_s"], 1) for name, own in arms.items()}, flush=True)
            found.append({"kind": kind, "programs": count, "arms": arms})
    return found


def main() -> None:
    """Measure and write."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of every arm (default: 9)")
    parser.add_argument("--programs", default="0,1,2", help="programs that never rest (default: 0,1,2)")
    parser.add_argument("--serve", choices=KINDS, help="used by the script itself")
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    made = provenance(args.commit)
    beside = [int(count) for count in args.programs.split(",")]
    cells = [cell for kind in KINDS for cell in measure(kind, beside, args.rounds)]
    keep({**made, "asked": ARMS, "rounds": args.rounds, "tokens": TOKENS, "cells": cells}, args.json)
    return None


if __name__ == "__main__":
    main()
