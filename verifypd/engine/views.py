"""What a policy sees of the engine: counts and times of each request. Reads the engine; plans nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from verifypd.buckets import CHUNKS
from verifypd.config import EngineConfig
from verifypd.control.architectures import Architecture
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.tuning import MEAN_OUTPUT, PRIOR_TRIALS
from verifypd.drafters.base import Drafter
from verifypd.drafters.choice import Choice
from verifypd.lanes.decode import DecodeLane
from verifypd.lanes.verify import VerifyLane
from verifypd.metrics.stats import EngineStats
from verifypd.request import Request, State
from verifypd.runtime.inputs import Slots
from verifypd.runtime.streams import Inflight

COUNTED = 256  # requests without a slot that are looked at, the first by rank: thousands would take a step to count


class Seen(Protocol):
    """What is read of an engine."""

    config: EngineConfig
    architecture: Architecture
    drafter: Drafter | None
    choice: Choice | None
    decode: DecodeLane
    verify: VerifyLane
    slots: Slots
    inflight: Inflight
    running: dict[int, Request]
    clock: Callable[[], float]
    offline: bool
    verifier_bytes: int

    @property
    def waiting(self) -> Sequence[Request]:
        """Who has no slot yet."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The books."""
        ...


def snapshot(engine: Seen) -> Snapshot:
    """What the policy sees. Reading changes nothing; counters only grow."""
    now, may_draft = engine.clock(), engine.architecture.controller.may_draft
    verify_batch, verify_wait_ms = engine.config.verify_limits
    running = [r for r in engine.running.values() if not (r.finished or r.preempting)]
    away = engine.inflight.away  # nothing that runs beside the rest is waited for
    here = [r for r in running if not (r.slot in away or r.state is State.PREFILL)] if away else running
    expected = mean_output(engine.stats)
    return Snapshot(
        step=engine.stats.steps,
        requests=tuple([_view(engine, r, now, may_draft, expected) for r in here]),
        away=len(running) - len(here),
        most_chunks=CHUNKS if engine.verify.padded is not None else 1 << 30,
        now=now,
        waiting=len(engine.waiting),
        waiting_tokens=sum([len(request.tokens) for request in engine.waiting[:COUNTED]]),
        emitted=engine.stats.continued,
        verdicts=engine.stats.verdicts,
        mean_output=expected,
        verify_batch=verify_batch,
        verify_wait_ms=verify_wait_ms,
        workers=engine.config.worker_count,
        queue_factor=engine.config.queue_factor,
        lane_weights=engine.config.weights,
        slo_ttft=engine.config.slo_ttft,
        slo_gap=engine.config.slo_gap,
        offline=engine.offline,
        verifier_bytes=engine.verifier_bytes,
        batch_size=engine.config.batch_size,
        prefill_chunk=engine.config.prefill_chunk,
        draft_chunk=engine.config.draft_chunk,
        drafter=engine.drafter.name if engine.drafter else None,
        copier=engine.choice.copier if engine.choice else None,
        drafter_has_cache=bool(engine.drafter and engine.drafter.has_cache),
        routine_lag=engine.drafter.routine if engine.drafter is not None else 0,
    )


def _view(engine: Seen, request: Request, now: float, may_draft: bool, mean: float) -> RequestView:
    """mean: tokens that a request comes to."""
    params = request.params
    decoding = request.state is not State.PREFILL
    limit = engine.config.max_draft if params.max_draft is None else min(params.max_draft, engine.config.max_draft)
    drafting = may_draft and decoding and params.speculation and engine.drafter is not None
    assert request.slot is not None
    proposer, expected, lag, lookups = None, 0, request.draft_lag, (0, 0)
    if drafting and engine.drafter is not None and limit:
        able = not (request.unread and engine.drafter.reader is not None)
        proposed = engine.drafter.expected(request) if able else 0
        if engine.choice is None:
            expected = proposed
        else:
            name, expected, lookups = engine.choice.pick(request, limit, able=proposed > 0)
            if name != engine.drafter.name:
                proposer, lag = name, lag if engine.decode.drafters[name].has_cache else 0
    first, further = targets(request, engine.config, mean)
    return RequestView(
        slot=request.slot,
        rank=request.rank(),
        served=request.served,
        chunk_start=request.computed,
        prefill_left=0 if decoding else len(request.tokens) - request.computed,
        length_floor=request.length_floor,
        length_bound=request.length_bound,
        max_length=request.max_length,
        draft_limit=limit if drafting else 0,
        draft_lag=lag,
        expected=expected,
        prompt_logprobs=-1 if request.prompt_logprobs is None else params.prompt_logprobs or 0,
        request_id=request.order,
        waited=max(0.0, now - request.entered),
        pending=request.pending,
        drafter=request.draft.drafter,
        slo_ttft=first,
        slo_tpot=further,
        decoding=max(0.0, now - request.metrics.first_token_time) if request.metrics.first_token_time else 0.0,
        since_output=max(0.0, now - request.last_output),
        emitted=request.output_len,
        greedy=params.greedy,
        coupled=params.coupled(engine.config.acceptance),
        temperature=params.temperature,
        draft_temperature=engine.config.draft_temperature
        if params.draft_temperature is None
        else params.draft_temperature,
        proposer=proposer,
        lookups=lookups,
    )


def mean_output(stats: EngineStats) -> float:
    """Tokens of a request that has ended with any; before many have, about what is expected of any request."""
    return (PRIOR_TRIALS * MEAN_OUTPUT + stats.finished_tokens) / (PRIOR_TRIALS + stats.answered)


def targets(request: Request, config: EngineConfig, expected: float = MEAN_OUTPUT) -> tuple[float, float]:
    """ms for its first token and for each further one: its own, or the engine's; a deadline leaves half for each.

    expected: tokens it will come to, at most. No first token can be asked for within less than a step may last, and no
    further one within less than a millisecond: whoever asked for it would take everybody else's time.
    """
    params = request.params
    first = config.slo_ttft if params.slo_ttft is None else params.slo_ttft
    further = config.slo_tpot if params.slo_tpot is None else params.slo_tpot
    if params.deadline_ms is not None:
        first = min(first, params.deadline_ms / 2)
        further = min(
            further, params.deadline_ms / 2 / max(1.0, min(request.max_length - request.prompt_len, expected))
        )
    return max(first, config.slo_gap), max(further, 1.0)
