"""What a policy sees of the engine: counts and times of each request. Reads the engine; plans nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from verifypd.buckets import CHUNKS
from verifypd.config import EngineConfig
from verifypd.control.architectures import Architecture
from verifypd.control.prompts import COUNTED
from verifypd.control.snapshot import RequestView, Snapshot, mean_output
from verifypd.drafters.base import Drafter
from verifypd.drafters.choice import Choice
from verifypd.engine.terms import targets, terms_of
from verifypd.lanes.decode import DecodeLane
from verifypd.lanes.verify import VerifyLane
from verifypd.metrics.stats import EngineStats
from verifypd.request import Request, State
from verifypd.runtime.inputs import Slots
from verifypd.runtime.streams import Inflight


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
    """What the policy sees, by what drafters and the choice between them were told last. Reading changes nothing;
    counters only grow."""
    now, may_draft = engine.clock(), engine.architecture.controller.may_draft
    verify_batch, verify_wait_ms = engine.config.verify_limits
    running = [r for r in engine.running.values() if not (r.finished or r.preempting)]
    away = engine.inflight.away  # nothing that runs beside the rest is waited for
    here = [r for r in running if not (r.slot in away or r.state is State.PREFILL)] if away else running
    expected = mean_output(engine.stats.finished_tokens, engine.stats.answered)
    return Snapshot(
        step=engine.stats.steps,
        requests=tuple([_view(engine, r, now, may_draft, expected) for r in here]),
        away=len(running) - len(here),
        most_chunks=CHUNKS if engine.verify.padded is not None else 1 << 30,
        now=now,
        waiting=len(engine.waiting),
        waiting_tokens=_waiting_tokens(engine.waiting),
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


def _waiting_tokens(waiting: Sequence[Request]) -> int:
    """Of the prompts in the queue; those behind the first are taken to be as long as these on average."""
    counted = [len(request.tokens) for request in waiting[:COUNTED]]
    return sum(counted) * len(waiting) // max(1, len(counted))


def proposable(drafter: Drafter, request: Request) -> int:
    """Tokens that a drafter expects to propose; none where the states that it reads were passed over."""
    return 0 if request.unread and drafter.reader is not None else drafter.expected(request)


def _view(engine: Seen, request: Request, now: float, may_draft: bool, mean: float) -> RequestView:
    """mean: tokens that a request comes to."""
    terms, drafter = terms_of(request, engine.config), engine.drafter
    decoding, first_token = request.state is not State.PREFILL, request.metrics.first_token_time
    limit = terms.draft_limit if may_draft and decoding and drafter is not None else 0
    proposer, expected, lag, lookups = None, 0, request.draft_lag, (0, 0)
    if limit and drafter is not None:
        if engine.choice is None:
            expected = proposable(drafter, request)
        else:
            name, expected, lookups = engine.choice.pick(request.order)
            if name != drafter.name:
                proposer, lag = name, lag if engine.decode.drafters[name].has_cache else 0
    slo_tpot = terms.slo_tpot if request.params.deadline_ms is None else targets(request, engine.config, mean)[1]
    assert request.slot is not None
    return RequestView(  # in order: names would take twice the time, for every request in every step
        request.slot,
        terms.rank,
        request.served,
        request.computed,  # chunk_start
        0 if decoding else len(request.tokens) - request.computed,  # prefill_left
        request.length_floor,
        request.length_bound,
        request.max_length,
        limit,
        lag,
        expected,
        terms.prompt_logprobs,
        request.order,  # request_id
        now - request.entered if now > request.entered else 0.0,  # waited
        request.draft.length,  # pending
        request.draft.drafter,
        terms.slo_ttft,
        slo_tpot,
        now - first_token if first_token and now > first_token else 0.0,  # decoding
        now - request.last_output if now > request.last_output else 0.0,  # since_output
        len(request.tokens) - request.prompt_len,  # emitted
        terms.greedy,
        terms.coupled,
        terms.temperature,
        terms.draft_temperature,
        proposer,
        lookups,
    )
