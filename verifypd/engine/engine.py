"""The loop: absorb verdicts, admit, plan, reserve, launch. Knows requests and lanes; nothing of text or kernels."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from verifypd.batch import DraftBatch, Verdict, VerifyBatch, VerifySpan
from verifypd.config import EngineConfig
from verifypd.control.architectures import Architecture
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.drafters.base import Drafter
from verifypd.engine.memory import RequestMemory
from verifypd.engine.record import Recorder
from verifypd.engine.synthetic import SyntheticAcceptance
from verifypd.errors import EngineError, RequestError
from verifypd.lanes.decode import DecodeLane
from verifypd.lanes.verify import PassResult, VerifyLane
from verifypd.metrics.stats import EngineStats
from verifypd.request import Logprob, Request, State
from verifypd.runtime.inputs import Slots
from verifypd.runtime.streams import Inflight, Ticket
from verifypd.sampling.state import SamplingState


class Engine:
    """Runs requests through the lanes. Not thread-safe: one loop calls `step`, and between steps `add` and `finish`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        architecture: Architecture,
        memory: RequestMemory,
        slots: Slots,
        sampling: SamplingState,
        verify: VerifyLane,
        decode: DecodeLane,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.memory = memory
        self.slots = slots
        self.sampling = sampling
        self.verify = verify
        self.decode = decode
        self.eos_ids = eos_ids
        self.max_model_len = max_model_len
        self.clock = clock
        self.drafter: Drafter | None = next(iter(decode.drafters.values()), None)
        self.synthetic = SyntheticAcceptance(config.alphas) if config.alphas is not None else None
        self.recorder = Recorder(config.record) if config.record else None
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}  # slot -> request, until its slot is free again
        self.free_slots = deque(range(config.slots))
        self.inflight = Inflight(delay=1 if config.late_tickets else 0)
        self.stats = EngineStats()

    # -- requests in and out ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it could never run."""
        self.validate(request.tokens)
        insort(self.waiting, request, key=Request.rank)

    def validate(self, prompt: Sequence[int]) -> None:
        """Raise RequestError for a prompt that could never run."""
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with at least one output token the limit is "
                f"{self.max_model_len} (--max-model-len)",
                param="prompt",
            )
        bad = next((token for token in prompt if not 0 <= token < self.sampling.vocab), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary of {self.sampling.vocab}", param="prompt")

    def finish(self, request: Request, reason: str = "abort", stop_reason: int | str | None = None) -> None:
        """End a request from outside: an abort or a stop string. Verdicts still in flight for it are dropped."""
        if request.finished:
            return
        self._end(request, reason, stop_reason)
        if request in self.waiting:
            self.waiting.remove(request)
            self._forget(request)
        elif request.slot is not None and not request.tickets:
            self._leave(request)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running or len(self.inflight))

    def check(self) -> None:
        """Prove that nothing leaks: blocks have one owner, slots are free or taken, and idle means empty."""
        self.memory.check()
        assert sorted([*self.free_slots, *self.running]) == list(range(self.config.slots)), "a slot is lost"
        if not self.busy:
            assert self.memory.verifier.blocks.used == 0, "an idle engine holds verifier blocks"
            assert self.memory.draft is None or self.memory.draft.blocks.used == 0, "an idle engine holds draft blocks"
            assert not self.memory.remembers, "an idle engine remembers requests"

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """One turn. Returns the requests that got tokens or ended."""
        news: dict[int, Request] = {}
        for ticket in self.inflight.finished():
            news.update((request.order, request) for request in self.absorb(ticket))
        self.admit()
        plan = self.reserve(self.architecture.plan(self.snapshot()))
        self.launch(plan)
        for ticket in self.inflight.arrived():
            news.update((request.order, request) for request in self.absorb(ticket))
        if not self.busy:
            self.check()
        return list(news.values())

    def snapshot(self) -> Snapshot:
        """What the policy sees."""
        return Snapshot(
            step=self.stats.steps,
            requests=tuple(self._view(r) for r in self.running.values() if not (r.finished or r.preempting)),
            batch_size=self.config.batch_size,
            prefill_chunk=self.config.prefill_chunk,
            draft_chunk=self.config.draft_chunk,
            drafter=self.drafter.name if self.drafter else None,
            drafter_has_cache=bool(self.drafter and self.drafter.has_cache),
        )

    def _view(self, request: Request) -> RequestView:
        params = request.params
        decoding = request.state is State.DECODE
        limit = self.config.max_draft if params.max_draft is None else min(params.max_draft, self.config.max_draft)
        drafting = decoding and params.speculation and self.drafter is not None
        assert request.slot is not None
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
            draft_lag=request.draft_lag,
            promise=self.drafter.promise(request) if drafting and self.drafter and limit else 0,
            prompt_logprobs=-1 if request.prompt_logprobs is None else params.prompt_logprobs or 0,
        )

    # -- admission and memory -----------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give waiting requests a slot and blocks, in order of rank, as long as both last."""
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            if not self.memory.admit(request, self.free_slots[0], spare=len(self.running)):
                return
            self.waiting.pop(0)
            request.slot = self.free_slots.popleft()
            request.state = State.PREFILL
            self.running[request.slot] = request
            self.slots.assign(request.slot, request.tokens)
            self.sampling.assign(
                request.slot,
                request.params,
                seed=request.seed,
                choice=request.choice,
                prompt_len=request.prompt_len,
                max_len=request.max_length,
                eos_ids=self.eos_ids,
                bad_words_ids=request.bad_words_ids,
                acceptance=self.config.acceptance,
            )
            if self.synthetic:
                self._set_alpha([request])

    def reserve(self, plan: Plan) -> Plan:
        """Make room for what the plan may write, best rank first. Drafts give way first, then the youngest request."""
        if plan.verify is None:
            return plan
        planned = {span.slot: span for span in plan.verify.spans}
        drafts: dict[int, int] = {}
        for slot, request in sorted(((slot, self.running[slot]) for slot in planned), key=lambda pair: pair[1].rank()):
            wanted = planned[slot].drafts
            for length in (wanted, 0) if wanted else (0,):
                if self._make_room(request, length, may_preempt=length == 0):
                    drafts[slot] = length
                    break
        return _keep(plan, drafts)

    def _make_room(self, request: Request, drafts: int, may_preempt: bool) -> bool:
        needed = request.length_bound + drafts + 1
        while not request.preempting and request.slot is not None:
            if self.memory.reserve(request, needed):
                return True
            victim = max((r for r in self.running.values() if not r.finished and not r.preempting), key=Request.rank)
            leaving = any(r.finished or r.preempting for r in self.running.values())
            if not may_preempt or (victim is request and leaving):
                return False  # blocks are on their way back: try again next step
            if victim is request and len(self.running) == 1:
                raise EngineError("the KV pool cannot hold one request: raise --kv-memory or lower --max-model-len")
            self.preempt(victim)
            if victim.preempting:
                return False  # its verdicts are still out: its blocks come back when they are absorbed
        return False

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a request; it waits, keeps its tokens and is recomputed later."""
        request.preempting = True
        request.metrics.preemptions += 1
        self.stats.preemptions += 1
        if not request.tickets:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Free slot and blocks; a preempted request queues again."""
        assert request.slot is not None and not request.tickets
        self.memory.release(request)
        self.sampling.release(request.slot)
        del self.running[request.slot]
        self.free_slots.append(request.slot)
        request.slot = None
        if request.finished:
            self._forget(request)
            return
        request.preempting = False
        request.state = State.WAITING
        insort(self.waiting, request, key=Request.rank)

    def _forget(self, request: Request) -> None:
        """Drop what drafters and memory keep about a request that has ended."""
        self.memory.forget(request)
        for drafter in self.decode.drafters.values():
            drafter.forget(request)

    # -- launch and absorb --------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Start the plan's batches and note what they will have changed."""
        self.stats.steps += 1
        if plan.empty:
            return
        if self.synthetic and self.synthetic.drifts and plan.verify:
            self._set_alpha(self.running[span.slot] for span in plan.verify.spans)
        try:
            if plan.draft:
                self.decode.launch(plan.draft)
            ticket = self.verify.launch(plan.verify) if plan.verify else None
        except BaseException:
            self._fail(plan)
            raise
        if plan.draft:
            for draft in plan.draft.spans:
                self.running[draft.slot].draft_lag -= draft.rows
        if plan.verify and ticket:
            for span in plan.verify.spans:
                self._note_launch(self.running[span.slot], span)
            ticket.launched = self.clock()
            self.inflight.add(ticket)
            self.stats.passes += 1
            self.stats.rows += plan.verify.rows
        if self.recorder:
            self.recorder.plan(self.stats.steps, self.clock(), plan)

    def _fail(self, plan: Plan) -> None:
        """A launch broke off: what the device holds of its requests is unknown, so they end; nobody else is harmed."""
        for span in plan.verify.spans if plan.verify else ():
            self.finish(self.running[span.slot], "error")

    def _note_launch(self, request: Request, span: VerifySpan) -> None:
        request.tickets += 1
        request.served = self.stats.steps
        if span.start is not None:
            request.computed += span.rows
            self.stats.prompt_tokens += span.rows
        if not span.emits:
            return
        request.state = State.DECODE
        request.inflight.append(span.drafts)
        # after drafting, the draft's cache lacks the verdict's next token and, if all stood, the last draft token
        drafted = span.drafter is not None and self.decode.drafters[span.drafter].has_cache
        request.draft_lag = 2 if drafted else request.draft_lag + span.drafts + 1

    def absorb(self, ticket: Ticket) -> list[Request]:
        """Take in a finished pass: confirm tokens, end what has ended, free what nobody touches any more."""
        batch: VerifyBatch = ticket.batch
        result: PassResult = ticket.result()
        news = []
        for index, span in enumerate(batch.spans):
            request = self.running[span.slot]
            request.tickets -= 1
            verdict = result.verdicts[index]
            if verdict is not None:
                request.inflight.pop(0)
            if not request.finished:
                self._take_prompt_logprobs(request, span, result)
                if verdict is not None:
                    self._confirm(request, verdict)
                    news.append(request)
                computed = len(request.tokens) - 1 if verdict is not None else (span.start or 0) + span.rows
                self.memory.commit(request, computed)
            if not request.tickets and (request.finished or request.preempting):
                self._leave(request)
        if self.recorder:
            self.recorder.verdicts(self.clock(), batch, result.verdicts)
        return news

    def _confirm(self, request: Request, verdict: Verdict) -> None:
        metrics = request.metrics
        if request.output_len == 0 and verdict.tokens:
            metrics.first_token_time = self.clock()
        else:
            metrics.count(verdict.drafted, verdict.accepted, len(verdict.tokens))
        if verdict.drafted:
            request.last_draft = (verdict.drafted, verdict.accepted)
        request.tokens.extend(verdict.tokens)
        if request.logprobs is not None:
            for token, (own, rank, top) in zip(verdict.tokens, verdict.logprobs, strict=True):
                request.logprobs.append(_logprobs(token, own, rank, top, request.params.logprobs or 0))
        self.stats.emitted += len(verdict.tokens)
        self.stats.drafted += verdict.drafted
        self.stats.accepted += verdict.accepted
        if verdict.finish == "stop":
            last = verdict.tokens[-1]
            self._end(request, "stop", None if last in self.eos_ids else last)
        elif verdict.finish is not None:
            self._end(request, verdict.finish)

    def _take_prompt_logprobs(self, request: Request, span: VerifySpan, result: PassResult) -> None:
        if request.prompt_logprobs is None or span.start is None:
            return
        for row, (own, rank, top) in enumerate(result.prompt_logprobs.get(span.slot, ())):
            position = span.start + row + 1  # the row predicts the next token of the prompt
            if position == len(request.prompt_logprobs) < request.prompt_len:
                wanted = request.params.prompt_logprobs or 0
                request.prompt_logprobs.append(_logprobs(request.tokens[position], own, rank, top, wanted))

    def _end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        request.state = State.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.metrics.finished_time = self.clock()
        self.stats.finished += 1

    def _set_alpha(self, requests: Iterable[Request]) -> None:
        assert self.synthetic is not None
        chosen = list(requests)
        values = [self.synthetic.value(request.order, request.output_len) for request in chosen]
        self.sampling.set_alpha([request.slot for request in chosen if request.slot is not None], values)

    def drain(self) -> None:
        """Wait for everything in flight; requests that have ended leave, whatever became of their passes."""
        for ticket in self.inflight.drain():
            self.absorb(ticket)
        for request in [r for r in self.running.values() if r.finished]:
            request.tickets = 0
            self._leave(request)

    def shutdown(self) -> None:
        """Drop all work."""
        for request in [*self.waiting, *self.running.values()]:
            self.finish(request)
        self.drain()
        self.check()
        if self.recorder:
            self.recorder.close()


def _keep(plan: Plan, drafts: dict[int, int]) -> Plan:
    """The part of a plan whose slots have room, with the draft lengths that fit."""
    assert plan.verify is not None
    spans = tuple(
        span if span.drafts == drafts[span.slot] else replace(span, drafts=0, rows=1, drafter=None)
        for span in plan.verify.spans
        if span.slot in drafts
    )
    draft = None
    if plan.draft:
        kept = (replace(s, drafts=min(s.drafts, drafts[s.slot])) for s in plan.draft.spans if s.slot in drafts)
        draft_spans = tuple(span for span in kept if span.rows or span.drafts)
        draft = DraftBatch(plan.draft.drafter, draft_spans) if draft_spans else None
    return Plan(draft=draft, verify=replace(plan.verify, spans=spans) if spans else None)


def _logprobs(token: int, own: float, rank: int, top: tuple[tuple[int, float], ...], wanted: int) -> dict[int, Logprob]:
    """The token itself and the `wanted` most likely ones."""
    entries = {token: Logprob(own, rank)}
    for place, (other, value) in enumerate(top[:wanted]):
        entries.setdefault(other, Logprob(value, place + 1))
    return entries
