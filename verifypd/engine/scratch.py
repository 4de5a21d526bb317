"""Steps of scratch requests on an idle engine, which leave nothing behind: to time passes, or to run them once.

Knows engines and plans; neither times nor chooses anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from verifypd.batch import DraftBatch, DraftSpan, VerifyBatch, VerifySpan
from verifypd.control.architectures import Architecture
from verifypd.control.controller import FixedController
from verifypd.control.observe import StepTiming
from verifypd.control.snapshot import Plan, Snapshot
from verifypd.drafters.remote import RemoteDrafter
from verifypd.engine.engine import Engine
from verifypd.metrics.stats import EngineStats
from verifypd.request import Request, SamplingParams, State
from verifypd.runtime.streams import synchronize

SHORT = 64  # tokens of context
STEPS = 6  # that a point's requests must have room for
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


@dataclass(frozen=True, slots=True)
class Point:
    """Work to be timed: decode spans of some requests, a prompt chunk, or both in one pass."""

    requests: int = 0
    drafts: int = 0  # of each request; its span has a row more
    context: int = SHORT  # tokens each request has, or the chunk comes after
    lag: int = 0  # tokens a draft's cache lacks, for each request; 0: what it lacks after every verdict
    chunk: int = 0  # rows of a prompt chunk

    @property
    def rows(self) -> int:
        """Verifier rows."""
        return self.requests * (self.drafts + 1) + self.chunk

    @property
    def work(self) -> float:
        """What to sort by: rows of both models, and context at a guess of what it costs."""
        caught_up = self.requests * self.lag / 4
        return self.rows + caught_up + (self.requests + self.chunk / 8) * self.context / 500


class Probe(Architecture):
    """A policy that plans what it is told to and keeps the times."""

    name = "measure"

    def __init__(self) -> None:
        super().__init__(FixedController(0))  # it has its plan already
        self.next = Plan()
        self.timings: list[StepTiming] = []

    def plan(self, snapshot: Snapshot) -> Plan:
        """What was set, once."""
        plan, self.next = self.next, Plan()
        return plan

    def observe_step(self, timing: StepTiming) -> None:
        """Kept, and not learnt from."""
        self.timings.append(timing)


@contextmanager
def aside(engine: Engine, probe: Probe) -> Iterator[None]:
    """The engine under the probe, with books of its own, nothing recorded, and no block found by a real request."""
    kept = engine.architecture, engine.stats, engine.recorder
    engine.architecture, engine.stats, engine.recorder = probe, EngineStats(), None
    apart = engine.drafter if isinstance(engine.drafter, RemoteDrafter) else None
    if apart is not None:
        apart.patient = True
    try:
        with engine.memory.unshared():
            yield
    finally:
        engine.architecture, engine.stats, engine.recorder = kept
        if apart is not None:
            apart.patient = False


def scratch(engine: Engine, point: Point, params: SamplingParams = GREEDY) -> list[Request]:
    """Requests in slots, with blocks, that count as decoding; one more for a chunk. Empty: they do not fit."""
    lengths = [point.context] * point.requests + ([point.context + point.chunk + 1] if point.chunk else [])
    if len(lengths) > len(engine.free_slots) or not engine.memory.has_room([length_of(point)] * len(lengths)):
        return []
    noise = random.Random(0)
    requests = []
    for number, length in enumerate(lengths):
        request = Request(
            "measure",
            [noise.randrange(engine.sampling.vocab) for _ in range(length)],
            params,
            seed=number,
            max_length=engine.max_model_len,
            arrival=engine.clock(),
            order=-1 - number,
        )
        engine.add(request)
        requests.append(request)
    while missing := sum(request.slot is None for request in requests):
        engine.step()  # admits some; the probe has nothing to run yet
        if missing == sum(request.slot is None for request in requests):
            for request in requests:
                engine.finish(request)
            return []  # fewer may run than there are slots
        for request in requests[: point.requests]:
            if request.state is State.PREFILL:
                engine.skip_prefill(request)
    return requests


def plan_of(engine: Engine, point: Point, requests: Sequence[Request]) -> Plan:
    """The point as a step of the engine."""
    drafter = engine.drafter
    decoding, drafts = requests[: point.requests], []
    lag = 0
    if drafter and drafter.has_cache:
        lag = point.lag or min(drafter.routine, point.drafts + 1)
    for request in decoding if drafter and (point.drafts or point.lag) else ():
        slot, context = _slot(request), len(request.tokens) + point.drafts
        drafts.append(DraftSpan(slot, lag, lag, point.drafts, context))
    spans = [
        VerifySpan(
            slot=_slot(request),
            rows=point.drafts + 1,
            drafts=point.drafts,
            start=None,
            emits=True,
            context=len(request.tokens) + point.drafts,
            drafter=drafter.name if drafter and point.drafts else None,
        )
        for request in decoding
    ]
    if point.chunk:
        end = point.context + point.chunk
        slot, start = _slot(requests[-1]), point.context
        spans.append(VerifySpan(slot, point.chunk, drafts=0, start=start, emits=False, context=end))
    return Plan(
        draft=DraftBatch(drafter.name, tuple(drafts)) if drafter and drafts else None,
        verify=VerifyBatch(tuple(spans)),
    )


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def length_of(point: Point) -> int:
    """Tokens a request of this point may come to, over all its steps."""
    return point.context + STEPS * (point.drafts + 1) + point.chunk + 1


def run_step(engine: Engine) -> None:
    """One step, to its end."""
    engine.step()
    synchronize(engine.slots.device)
    engine.drain()
    engine.tell()


def forget(engine: Engine, requests: Sequence[Request]) -> None:
    """Take scratch requests out of the engine."""
    for request in requests:
        engine.finish(request)
    engine.drain()
