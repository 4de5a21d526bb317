"""What an engine has done, in plain numbers: counters over all requests, and all that /metrics shows. Sends nothing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # s


@dataclass(slots=True)
class Totals:
    """Counters over all requests since this engine started."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    draft_lengths: Counter[int] = field(default_factory=Counter)  # mean length of the spans of a step, rounded
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queries: int = 0  # prompt tokens looked up in the prefix cache
    out_of_memory: int = 0
    switches: int = 0  # of architecture, by whoever
    steps: Counter[float] = field(default_factory=Counter)  # steps by upper bound of their length
    step_seconds: float = 0.0
    step_count: int = 0

    def step(self, seconds: float) -> None:
        """A step has ended."""
        self.step_seconds += seconds
        self.step_count += 1
        self.steps[next((b for b in STEP_BUCKETS if seconds <= b), math.inf)] += 1


def figures(engine: Any, totals: Totals, architecture: str, gpu: dict[str, float]) -> dict[str, Any]:
    """Everything /metrics shows of the engine."""
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
        "draft_lengths": {str(k): v for k, v in totals.draft_lengths.items()},
        "finished": dict(totals.finished),
        "prompt_tokens": totals.prompt_tokens,
        "generation_tokens": stats.emitted,
        "prefix_queries": totals.queries,
        "prefix_hits": totals.cached_tokens,
        "preemptions": stats.preemptions,
        "out_of_memory": totals.out_of_memory,
        "architecture": architecture,
        "policy": engine.architecture.name,
        "switches": totals.switches,
        "lanes": {name: lane.summary() for name, lane in stats.lanes.items()},
        "pools": {
            name: {"used": pool.blocks.used, "cached": len(pool.blocks.cached), "free": len(pool.blocks.free)}
            for name, pool in pools.items()
            if pool is not None
        },
        "steps": {str(bound): totals.steps[bound] for bound in (*STEP_BUCKETS, math.inf)},
        "step_seconds": totals.step_seconds,
        "step_count": totals.step_count,
        "gpu": gpu,
    }
