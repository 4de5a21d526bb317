"""What an engine has done, in plain numbers: counters over all requests, and all that /metrics shows. Sends nothing."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # s
# vLLM's, and some below its first
GAP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)  # s
QUEUE_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)  # s


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is held to where it names no targets of its own, ms."""

    ttft: float
    tpot: float

    def met(self, first: float, per_token: float, own_ttft: float | None, own_tpot: float | None) -> bool:
        """Whether a request's first token came in time, and the others fast enough. first, per_token: s."""
        return first * 1e3 <= (own_ttft or self.ttft) and per_token * 1e3 <= (own_tpot or self.tpot)


class Spread:
    """How often a number of seconds fell under each bound, and all of them together."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = (*bounds, math.inf)
        self.counts = [0] * len(self.bounds)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def by_bound(self) -> dict[str, int]:
        """Counts by upper bound, not cumulative."""
        return {str(bound): count for bound, count in zip(self.bounds, self.counts, strict=True)}


@dataclass(slots=True)
class Totals:
    """Counters over all requests since this engine started."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    drafted_per_position: Counter[int] = field(default_factory=Counter)
    drafted_by_context: Counter[int] = field(default_factory=Counter)  # context at most so many tokens: a power of 2
    accepted_by_context: Counter[int] = field(default_factory=Counter)
    verdicts: int = 0  # times a request got tokens from a verifier pass, after its prefill
    verdict_tokens: int = 0
    draft_lengths: Counter[int] = field(default_factory=Counter)  # mean length of the spans of a step, rounded
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queries: int = 0  # prompt tokens looked up in the prefix cache
    out_of_memory: int = 0
    architecture: str = ""  # whose plan the last step was
    architecture_steps: Counter[str] = field(default_factory=Counter)
    switches: int = 0  # of architecture, by whoever
    steps: Spread = field(default_factory=lambda: Spread(STEP_BUCKETS))
    step_count: int = 0
    queued: Spread = field(default_factory=lambda: Spread(QUEUE_BUCKETS))  # requests by their wait for a slot

    def step(self, seconds: float, architecture: str) -> None:
        """A step has ended."""
        self.steps.add(seconds)
        self.step_count += 1
        self.architecture_steps[architecture] += 1
        self.switches += bool(self.architecture) and architecture != self.architecture
        self.architecture = architecture


def figures(engine: Any, totals: Totals, gpu: dict[str, float]) -> dict[str, Any]:
    """Everything /metrics shows of the engine; the dashboard reads the same."""
    stats = engine.stats
    pools = {"verifier": engine.memory.verifier, "draft": engine.memory.draft}
    return {
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "slots": engine.config.slots,
        "drafts": totals.drafts,
        "draft_tokens": totals.draft_tokens,
        "accepted_tokens": totals.accepted_tokens,
        "accepted_per_position": {str(k): v for k, v in totals.accepted_per_position.items()},
        "drafted_per_position": {str(k): v for k, v in totals.drafted_per_position.items()},
        "drafted_by_context": {str(k): v for k, v in totals.drafted_by_context.items()},
        "accepted_by_context": {str(k): v for k, v in totals.accepted_by_context.items()},
        "verdicts": totals.verdicts,
        "verdict_tokens": totals.verdict_tokens,
        "passes": stats.passes,
        "cpu_seconds": time.process_time(),
        "draft_lengths": {str(k): v for k, v in totals.draft_lengths.items()},
        "finished": dict(totals.finished),
        "prompt_tokens": totals.prompt_tokens,
        "generation_tokens": stats.emitted,
        "prefix_queries": totals.queries,
        "prefix_hits": totals.cached_tokens,
        "preemptions": stats.preemptions,
        "out_of_memory": totals.out_of_memory,
        "pauses": engine.pauses.summary(),
        "memory_taken": engine.memory_taken,
        "architecture": engine.architecture.ran,
        "architecture_steps": dict(totals.architecture_steps),
        "policy": engine.architecture.name,
        "switches": totals.switches,
        "lanes": {name: lane.summary() for name, lane in stats.lanes.items()},
        "pools": {
            name: {"used": pool.blocks.used, "cached": len(pool.blocks.cached), "free": len(pool.blocks.free)}
            for name, pool in pools.items()
            if pool is not None
        },
        "kv_bytes": {_dtype(engine.verify.runner.cache): engine.verify.runner.cache.nbytes},
        "steps": totals.steps.by_bound(),
        "step_seconds": totals.steps.seconds,
        "step_count": totals.step_count,
        "queued": totals.queued.by_bound(),
        "queued_seconds": totals.queued.seconds,
        "gpu": gpu,
    }


def _dtype(cache: Any) -> str:
    """As --kv-cache-dtype has it, or torch."""
    return "fp8" if cache.scales is not None else str(cache.data.dtype).removeprefix("torch.")
