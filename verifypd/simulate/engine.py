"""A discrete-event twin of the engine: the same policies, a manual clock, costs and acceptance from a formula.

Keeps the engine's books (slots, chunks, length bounds, draft lag, drafts that wait for the verify lane, verdicts one
step late) over the same architecture and controller objects. Knows nothing of tensors, text or KV blocks: memory never
runs out here. What is true (costs, acceptance) and what the policy believes are different objects.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verifypd.batch import DraftBatch, VerifyBatch
from verifypd.buckets import CHUNKS
from verifypd.control.architectures import Architecture
from verifypd.control.cost import Work
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import PromptKey, admissible, prompt_key
from verifypd.control.snapshot import Plan, RequestView, Snapshot, mean_output
from verifypd.errors import EngineError
from verifypd.inflight import CAUGHT_UP, Draft, Progress
from verifypd.simulate.report import Outcome, Report
from verifypd.simulate.traffic import Arrival
from verifypd.simulate.world import Settings, TrueCosts

POLL = 0.25e-3  # s between two looks of a loop that waits for a batch to fill
MOST_OUT = 1  # passes that may still run when a step is planned, as in the engine: the host is one step ahead, not more
MAX_IDLE = 40_000  # looks in a row after which a policy counts as stuck: 10 s


class _Request(Progress):
    """The host's books of a request, and beside them what the device knows."""

    def __init__(self, request_id: int, arrival: Arrival, outcome: Outcome, max_length: int) -> None:
        super().__init__(arrival.prompt, max_length)
        self.request_id = request_id
        self.arrival = arrival
        self.outcome = outcome
        self.slot = -1
        self.decoding = False
        self.tickets = 0
        self.served = 0
        self.entered = arrival.time  # s, when it came into its lane
        self.device_length = arrival.prompt
        self.alive = True
        self.targets = (0.0, 0.0)  # ms for its first token and each further one

    @property
    def deadline(self) -> float:
        """s, when it is stopped."""
        return math.inf if (own := self.arrival.deadline_ms) is None else self.arrival.time + own / 1e3

    @property
    def rank(self) -> tuple[int, int]:
        return (self.arrival.priority, self.request_id)


@dataclass(frozen=True, slots=True)
class _Verdict:
    request: _Request
    drafted: int
    accepted: int
    emitted: int
    ends: bool
    drafter: str | None
    decode: bool  # of a decode span, not the end of a prompt


@dataclass(frozen=True, slots=True)
class _Ticket:
    done: float  # s, when the pass has run
    verdicts: tuple[_Verdict, ...]
    touched: tuple[_Request, ...]


class Simulation:
    """Runs arrivals through an architecture. `step` mirrors the engine's: absorb, admit, plan, launch."""

    def __init__(
        self,
        architecture: Architecture,
        arrivals: Sequence[Arrival],
        costs: TrueCosts,
        settings: Settings | None = None,
        *,
        seed: int = 0,
        on_step: Callable[[Simulation, Snapshot, Plan], None] | None = None,
    ) -> None:
        self.architecture = architecture
        self.costs = costs
        self.model = costs.model()
        self.settings = settings or Settings()
        self.model.padded = architecture.cost.padded = self.settings.padded
        self.on_step = on_step
        self.rng = random.Random(f"noise/{seed}")
        self.now = 0.0  # s of the host
        self.device_free = 0.0  # s, when the device has run what was launched
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.emitted = self.verdicts = 0  # of requests that had a token already
        self.ended = self.ended_tokens = 0
        self.requests = [self._request(number, arrival) for number, arrival in enumerate(arrivals)]
        self.coming = deque(sorted(self.requests, key=lambda r: r.arrival.time))
        self.deadlines = deque(sorted((r for r in self.requests if r.deadline < math.inf), key=lambda r: r.deadline))
        self.waiting: list[_Request] = []
        self.running: dict[int, _Request] = {}
        self.free_slots = deque(range(self.settings.slots))
        self.inflight: deque[_Ticket] = deque()
        self._reading = 0.0  # s that a head takes to read the prompt chunks of the last step, before the next one
        self.timed: deque[tuple[float, StepTiming]] = deque()  # when each will be known

    def _request(self, request_id: int, arrival: Arrival) -> _Request:
        target = self.settings.slo_tpot if arrival.slo_tpot is None else arrival.slo_tpot
        longest = self.settings.max_tokens if arrival.max_tokens is None else arrival.max_tokens
        limit = arrival.prompt + max(longest, arrival.output)
        outcome = Outcome(request_id, arrival.time, arrival.priority, target, arrival.slo_ttft)
        made = _Request(request_id, arrival, outcome, limit)
        made.targets = self._targets(made)
        return made

    def _targets(self, request: _Request) -> tuple[float, float]:
        longest = request.max_length - request.arrival.prompt
        return self.settings.targets(request.arrival, min(longest, mean_output(self.ended_tokens, self.ended)))

    def run(self, until: float = math.inf) -> Report:
        """Step until every request has ended or the clock reaches `until` (s)."""
        idle = 0
        while (self.coming or self.waiting or self.running) and self.now < until:
            idle = 0 if self.step() else idle + 1
            if idle > MAX_IDLE:
                raise EngineError(f"{self.architecture.name} plans nothing while {len(self.running)} requests wait")
        times = [request.arrival.time for request in self.requests]
        return Report(
            outcomes=tuple(request.outcome for request in self.requests),
            window=max(times, default=0.0) - min(times, default=0.0),
            seconds=self.now,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            slo_ttft=self.settings.slo_ttft,
        )

    def step(self) -> bool:
        """One turn; whether anything ran or is running."""
        self._take_in(MOST_OUT)
        self.admit()
        plan = self._plan()
        self.steps += 1
        going = bool(self.inflight) or not plan.empty
        if not plan.empty:
            self.launch(plan)
        else:
            self._pass_time()
        self._take_in(len(self.inflight))
        while self.timed and self.timed[0][0] <= self.now:
            self.architecture.observe_step(self.timed.popleft()[1])
        return going

    def _take_in(self, most_out: int) -> None:
        """Absorb what has run by now, and wait for the oldest where more than `most_out` passes are out."""
        while self.inflight and (len(self.inflight) > most_out or self.inflight[0].done <= self.now):
            ticket = self.inflight.popleft()
            self.now = max(self.now, ticket.done)
            self.absorb(ticket)

    def _pass_time(self) -> None:
        """Nothing is to be launched: wait for a verdict or an arrival, or look again a little later."""
        verdict = self.inflight[0].done if self.inflight else math.inf
        arrival = self.coming[0].arrival.time if self.coming else math.inf
        if self.inflight or (self.coming and not (self.running or self.waiting)):
            self.now = max(self.now, min(verdict, arrival))
        else:
            self.now += POLL

    def _plan(self) -> Plan:
        """What the architecture makes of what it sees."""
        snapshot = self.snapshot()
        plan = self.architecture.plan(snapshot)
        if self.on_step:
            self.on_step(self, snapshot, plan)
        return plan

    def admit(self) -> None:
        """Take in what has arrived and give slots to the best-ranked."""
        while self.coming and self.coming[0].arrival.time <= self.now:
            insort(self.waiting, self.coming.popleft(), key=lambda request: request.rank)
        while self.deadlines and self.deadlines[0].deadline <= self.now:
            self._stop(self.deadlines.popleft())
        unread = [request for request in self.running.values() if not request.decoding]
        while self.waiting and self.free_slots:
            tokens = sum([r.confirmed - r.computed for r in unread])
            request = admissible(self.waiting, unread, tokens, self.settings.prefill_chunk, self._prompt_key)
            if request is None:
                break
            self.waiting.remove(request)
            unread.append(request)
            request.slot = self.free_slots.popleft()
            reads = self.settings.drafter_has_cache and not self.settings.head  # a head reads behind the verifier
            cached = request.arrival.cached
            request.admitted(cached, draft_lag=request.confirmed - cached if reads else 0)
            request.entered = self.now
            self.running[request.slot] = request

    def _stop(self, request: _Request) -> None:
        """End a request with what it has."""
        if request.outcome.ended:
            return
        request.outcome.stopped, request.alive = self.now, False
        if request in self.waiting:
            self.waiting.remove(request)
        self._leave(request)

    def _leave(self, request: _Request) -> None:
        """Free the slot of a request that has ended, once no pass is out that has it."""
        if request.outcome.ended and not request.tickets and request.slot in self.running:
            del self.running[request.slot]
            self.free_slots.append(request.slot)
            written = request.confirmed - request.arrival.prompt
            self.ended, self.ended_tokens = self.ended + 1, self.ended_tokens + written
            self.architecture.forget(request.request_id)

    def _prompt_key(self, request: _Request) -> PromptKey:
        waited = self.now - request.arrival.time
        left = request.confirmed - request.computed
        return prompt_key(request.rank, left, waited, request.targets[0], self.settings.slo_gap)

    def snapshot(self) -> Snapshot:
        """What the policy sees."""
        settings, running = self.settings, [each for each in self.running.values() if not each.outcome.ended]
        may_draft = self.architecture.controller.may_draft and settings.drafter is not None
        return Snapshot(
            step=self.steps,
            requests=tuple([self._view(request, may_draft and request.decoding) for request in running]),
            batch_size=settings.batch_size,
            prefill_chunk=settings.prefill_chunk,
            draft_chunk=settings.draft_chunk,
            drafter=settings.drafter,
            drafter_has_cache=settings.drafter_has_cache,
            now=self.now,
            waiting=len(self.waiting),
            waiting_tokens=sum(request.confirmed for request in self.waiting),
            emitted=self.emitted,
            verdicts=self.verdicts,
            mean_output=mean_output(self.ended_tokens, self.ended),
            slo_gap=settings.slo_gap,
            routine_lag=settings.max_draft + 1 if settings.head else CAUGHT_UP,
            verify_batch=settings.verify_batch,
            verify_wait_ms=settings.verify_wait_ms,
            workers=settings.workers,
            queue_factor=settings.queue_factor,
            slo_ttft=settings.slo_ttft,
            verifier_bytes=settings.verifier_bytes,
            most_chunks=CHUNKS if settings.padded else 1 << 30,
        )

    def _view(self, request: _Request, drafting: bool) -> RequestView:
        first, last = request.outcome.first, request.outcome.last
        if request.arrival.deadline_ms is not None:  # its share of it changes with what requests come to
            request.targets = self._targets(request)
        return RequestView(
            slot=request.slot,
            rank=request.rank,
            served=request.served,
            chunk_start=request.computed,
            prefill_left=0 if request.decoding else request.confirmed - request.computed,
            length_floor=request.length_floor,
            length_bound=request.length_bound,
            max_length=request.max_length,
            draft_limit=self.settings.max_draft if drafting else 0,
            draft_lag=request.draft_lag,
            expected=self.settings.max_draft if drafting else 0,
            prompt_logprobs=-1,
            request_id=request.request_id,
            waited=self.now - request.entered,
            pending=request.pending,
            drafter=request.draft.drafter,
            slo_ttft=request.targets[0],
            slo_tpot=request.targets[1],
            decoding=0.0 if first is None else self.now - first,
            since_output=self.now - (request.arrival.time if last is None else last),
            emitted=request.confirmed - request.arrival.prompt,
        )

    # -- launch and absorb --------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Give the plan's batches to the device, which runs them once it is free. The host waits for them, or goes on
        where verdicts are late."""
        begun, timing = self.now, self.timing(plan)
        self.now += self.settings.host_seconds + self.settings.host_request * len(self.running)
        self.device_free = max(self.now, self.device_free) + self._reading + timing.device_seconds
        self._reading = self.settings.head_token * timing.chunk_rows if self.settings.head else 0.0
        if plan.draft:
            self._draft(plan.draft)
        if plan.verify:
            self._verify(plan.verify, self.device_free - timing.prefill_seconds)
        if plan.prefill:
            self._verify(plan.prefill, self.device_free)
        if not self.settings.late:
            self.now = self.device_free
            timing = replace(timing, step_seconds=self.now - begun)
        self.timed.append((self.device_free, timing))

    def timing(self, plan: Plan) -> StepTiming:
        """The plan's work as the host counts it, and how long it takes this time by what the device really holds."""
        costs, factor = self.model, self.costs.factor
        work = plan.work()
        drafting = [self.running[span.slot] for span in plan.draft.spans] if plan.draft else []
        context = sum(request.device_length for request in drafting)
        draft = costs.draft_seconds(work.draft_steps, work.draft_rows, context)
        return replace(
            work,
            draft_seconds=draft * factor(self.now, self.rng),
            verify_seconds=self._seconds(plan.verify) * factor(self.now, self.rng),
            prefill_seconds=self._seconds(plan.prefill) * factor(self.now, self.rng),
            decode_wait=max((self.now - request.entered for request in drafting), default=0.0),
        )

    def _seconds(self, batch: VerifyBatch | None) -> float:
        """What a pass takes, by what the device really holds."""
        work = Work()
        for span in batch.spans if batch else ():
            if span.start is None:
                work += Work(span.rows, self.running[span.slot].device_length + span.drafts)
            else:
                work += Work(span.rows, span.context, span.rows, span.rows * span.context)
        return self.model.pass_seconds(work)

    def _draft(self, batch: DraftBatch) -> None:
        for span in batch.spans:
            request = self.running[span.slot]
            request.caught_up(span.rows)
            if span.drafts:
                request.drafted(Draft(span.drafts, span.drafter or batch.drafter, span.temperature))
                request.entered = self.now
                request.served = self.steps

    def _verify(self, batch: VerifyBatch, done: float) -> None:
        verdicts = []
        touched = []
        for span in batch.spans:
            request = self.running[span.slot]
            touched.append(request)
            request.tickets += 1
            request.served = self.steps
            if span.start is not None:
                assert span.start == request.computed, "a chunk must begin where the last one ended"
                request.read(span.rows)
            if not span.emits:
                continue
            verdicts.append(self._judge(request, span.drafts, span.drafter, span.start is None))
            settings = self.settings
            kept = span.drafter is not None and settings.drafter_has_cache and not settings.head
            request.launched(span.drafts, kept=kept)
            request.decoding = True
            request.entered = self.now
        self.inflight.append(_Ticket(done, tuple(verdicts), tuple(touched)))

    def _judge(self, request: _Request, drafts: int, drafter: str | None, decode: bool) -> _Verdict:
        """What the device decides, at once; the host learns of it when the ticket is absorbed."""
        if not request.alive:
            return _Verdict(request, 0, 0, 0, False, drafter, decode)
        written = request.device_length - request.arrival.prompt
        stands = request.arrival.stands
        left = request.arrival.output - written
        accepted = 0
        while accepted < min(drafts, left) and stands[written + accepted]:
            accepted += 1
        emitted = min(accepted + 1, left)
        request.device_length += emitted
        request.alive = emitted < left
        return _Verdict(request, drafts, min(accepted, emitted), emitted, not request.alive, drafter, decode)

    def absorb(self, ticket: _Ticket) -> None:
        """The host learns what a pass came to."""
        for request in ticket.touched:
            request.tickets -= 1
        for verdict in ticket.verdicts:
            request = verdict.request
            request.absorbed(0 if request.outcome.ended else verdict.emitted)
            if request.outcome.ended:
                continue
            request.outcome.output(self.now, verdict.emitted)
            request.outcome.finished = verdict.ends
            self.drafted += verdict.drafted
            self.accepted += verdict.accepted
            if verdict.decode:
                self.emitted += verdict.emitted
                self.verdicts += 1
            if verdict.drafted:
                self.architecture.observe(
                    Observation(
                        request_id=request.request_id,
                        drafted=verdict.drafted,
                        accepted=verdict.accepted,
                        emitted=verdict.emitted,
                        coupled=False,
                        greedy=False,
                        temperature=1.0,
                        drafter=verdict.drafter,
                    )
                )
        for request in ticket.touched:
            self._leave(request)
