"""Lanes as threads: condition variables against polling, when one lane hands work to another. Some minutes.

    python benchmarks/hand_over.py --json benchmarks/results/hand-over.json

The system this one follows runs a thread for each lane and says that polling a locked queue every 10 µs beats condition
variables. Verify-PD has one loop and no threads to wake, so this measures what that choice is worth. Arms in turn:

- *ring*: a request goes from one lane to the next and back, as drafts and verdicts do; every lane does real work on it
  (SHA-256, which runs without the interpreter's lock), and a third lane has nothing to do and waits. A hand-over takes
  what a trip takes beyond its work.
- *engine*: the real engine decodes while two lanes wait for something that never comes, as lanes of an idle kind do.

Waiting: `condition` (notified), `poll` (looks, then sleeps 10 µs), `spin` (looks again at once); `none` is one thread
that calls both lanes.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from script import command_line, keep

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance

WAITS = ("condition", "poll", "spin")
NAP = 10e-6  # s between two looks, as published
WORK = (0.0, 0.1e-3, 1e-3, 5e-3)  # s a lane works on a request
MEASURE = 0.7  # s of each arm and round
STOP = object()


class Queue:
    """A lane's inbox."""

    def __init__(self, wait: str) -> None:
        self.wait = wait
        self._items: deque[Any] = deque()
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)

    def put(self, item: Any) -> None:
        """Hand over."""
        with self._lock:
            self._items.append(item)
            if self.wait == "condition":
                self._filled.notify()

    def get(self) -> Any:
        """Wait for the next, in this queue's way."""
        if self.wait == "condition":
            with self._lock:
                while not self._items:
                    self._filled.wait()
                return self._items.popleft()
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
            if self.wait == "poll":
                time.sleep(NAP)


def hasher(seconds: float) -> Callable[[], Any]:
    """Work that takes about so long and needs no lock."""
    if not seconds:
        return lambda: None
    block = bytes(1 << 20)
    best = min(_timed(lambda: hashlib.sha256(block).digest()) for _ in range(5))
    data = bytes(max(4096, int(len(block) * seconds / best)))
    return lambda: hashlib.sha256(data).digest()


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def ring(wait: str, work: Callable[[], Any], measure: float) -> tuple[float, float]:
    """s of a trip from one lane to another and back, and cores used meanwhile."""
    trips = 0
    if wait == "none":
        busy, begun = time.process_time(), time.perf_counter()
        while (seconds := time.perf_counter() - begun) < measure:
            work()
            work()
            trips += 1
        return seconds / trips, (time.process_time() - busy) / seconds
    decode, verify, prefill = (Queue(wait) for _ in range(3))

    def lane() -> None:
        while (item := verify.get()) is not STOP:
            work()
            decode.put(item)

    threads = [threading.Thread(target=lane), threading.Thread(target=prefill.get)]
    for thread in threads:
        thread.start()
    busy, begun = time.process_time(), time.perf_counter()
    while (seconds := time.perf_counter() - begun) < measure:
        work()
        verify.put(trips)
        assert decode.get() == trips
        trips += 1
    busy = time.process_time() - busy
    for queue in (verify, prefill):
        queue.put(STOP)
    for thread in threads:
        thread.join()
    return seconds / trips, busy / seconds


def time_rings(rounds: int) -> list[dict[str, Any]]:
    """Every way of waiting at every length of work, in turn."""
    found = []
    for seconds in WORK:
        work = hasher(seconds)
        times: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for wait in ("none", *WAITS):
                times.setdefault(wait, []).append(ring(wait, work, MEASURE))
        alone = statistics.median(each[0] for each in times["none"])
        for wait in WAITS:
            trip, cores = (statistics.median(each[i] for each in times[wait]) for i in (0, 1))
            found.append(
                {
                    "work_ms": seconds * 1e3,
                    "wait": wait,
                    "hand_over_us": 1e6 * (trip - alone) / 2,
                    "rounds_us": [round(1e6 * (each[0] - alone) / 2, 1) for each in times[wait]],
                    "trip_over_one_thread": trip / alone,
                    "cores": cores,
                }
            )
    return found


def time_engine(model: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Plain decoding of one request beside two lanes that wait."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    speeds: dict[str, list[tuple[float, float]]] = {}
    with LLM(model, draft=None, arch="plain", kv_memory="200MB", max_model_len=512) as llm:
        llm.generate(["warm"], params)
        for _ in range(rounds):
            for wait in ("none", *WAITS):
                queues = [] if wait == "none" else [Queue(wait), Queue(wait)]
                threads = [threading.Thread(target=queue.get) for queue in queues]
                llm.generate(["warm"], params)  # the way before may have left the cores to others
                for thread in threads:
                    thread.start()
                busy, begun = time.process_time(), time.perf_counter()
                llm.generate(["Once upon a time"], params)
                wall, busy = time.perf_counter() - begun, time.process_time() - busy
                for queue, thread in zip(queues, threads, strict=True):
                    queue.put(STOP)
                    thread.join()
                speeds.setdefault(wait, []).append((tokens / wall, busy / wall))
    plain = statistics.median(speed for speed, _ in speeds["none"])
    return [
        {
            "wait": wait,
            "tokens_per_second": statistics.median(speed for speed, _ in values),
            "against_none": statistics.median(speed for speed, _ in values) / plain,
            "rounds": [round(speed, 1) for speed, _ in values],
            "cores": statistics.median(busy for _, busy in values),
        }
        for wait, values in speeds.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    made = provenance(args.commit)
    rings = time_rings(args.rounds)
    print(
        "| work of a lane | waiting | a hand-over, µs | trip against one thread | cores used |\n|---|---|---|---|---|"
    )
    for row in rings:
        print(
            f"| {row['work_ms']:g} ms | {row['wait']} | {row['hand_over_us']:.0f} "
            f"| {row['trip_over_one_thread']:.2f} | {row['cores']:.2f} |"
        )
    engine = time_engine(args.model, args.tokens, args.rounds)
    print("\n| two idle lanes | tokens/s | against none | cores used |\n|---|---|---|---|")
    for row in engine:
        print(f"| {row['wait']} | {row['tokens_per_second']:.1f} | {row['against_none']:.3f} | {row['cores']:.2f} |")
    keep({**made, "ring": rings, "engine": engine}, args.json)


if __name__ == "__main__":
    main()
