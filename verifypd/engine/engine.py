"""The loop: absorb verdicts, admit, plan, reserve, launch. Knows requests and lanes; nothing of text or kernels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from verifypd.batch import DraftBatch, Verdict, VerifyBatch, VerifySpan
from verifypd.config import EngineConfig
from verifypd.control.architectures import Architecture
from verifypd.control.cost import CostModel
from verifypd.control.snapshot import Plan
from verifypd.drafters.base import Drafter
from verifypd.drafters.choice import Choice
from verifypd.engine.first_drafts import FirstDrafts
from verifypd.engine.heads import HeadBooks
from verifypd.engine.memory import RequestMemory
from verifypd.engine.record import Recorder
from verifypd.engine.residents import Residents
from verifypd.engine.synthetic import SyntheticAcceptance
from verifypd.engine.terms import terms_of
from verifypd.engine.timing import RECENT, PastStep, TimedPlan, TimedPlans
from verifypd.engine.verdicts import confirm, observation, origins, take_prompt_logprobs
from verifypd.engine.views import proposable, snapshot
from verifypd.errors import ConfigError, RequestError
from verifypd.inflight import Draft
from verifypd.lanes.decode import DecodeLane
from verifypd.lanes.hand_over import PrefillProcess
from verifypd.lanes.placement import LaneTimer, Placements
from verifypd.lanes.verify import PassResult, VerifyLane
from verifypd.metrics.pauses import WATCH, Pauses
from verifypd.metrics.stats import EngineStats
from verifypd.request import Request, State
from verifypd.runtime.faults import out_of_memory
from verifypd.runtime.inputs import Slots
from verifypd.runtime.streams import Inflight, Ticket, taken
from verifypd.sampling.state import SamplingState


class Engine:
    """Runs requests through the lanes. Not thread-safe: one loop calls `step`, and between steps `add` and `finish`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        architectures: Callable[[str], Architecture],
        memory: RequestMemory,
        slots: Slots,
        sampling: SamplingState,
        verify: VerifyLane,
        decode: DecodeLane,
        placements: Placements,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        verifier_bytes: int = 0,
        choice: Choice | None = None,
        cost: CostModel | None = None,
        prefill: PrefillProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.architectures = architectures
        self.architecture = architectures(config.arch)
        self.memory = memory
        self.slots = slots
        self.sampling = sampling
        self.verify = verify
        self.verify.keeps = self.architecture.speculative
        self.decode = decode
        self.placements = placements
        self.eos_ids = eos_ids
        self.max_model_len = max_model_len
        self.verifier_bytes = verifier_bytes
        self.clock = clock
        self.drafter: Drafter | None = next(iter(decode.drafters.values()), None)
        self.choice = choice  # where there are two drafters
        self.cost = cost
        self.prefill = prefill  # who reads prompts in a process of its own
        self.synthetic = SyntheticAcceptance(config.alphas) if config.alphas is not None else None
        self.first_drafts = FirstDrafts()
        self.recorder = Recorder(config.record) if config.record else None
        self.offline = False  # whether nobody reads an answer before all are written
        self.forgiving = False  # whether a pass that ran out of memory is tried again with fewer requests
        self.inflight = Inflight(delay=1 if config.late_tickets else 0)
        self.timed = TimedPlans()
        self.recent: deque[PastStep] = deque(maxlen=RECENT)
        self.latest: TimedPlan | None = None  # that was launched
        self._launched: TimedPlan | None = None  # by this step
        self._paused, self._taken = WATCH.total, taken(slots.device)  # before the first request
        self._begun = 0.0  # s, when this step began
        self._collecting: float | None = None  # s, when verdicts were last collected for the step to come
        self.residents = Residents(
            config,
            memory=memory,
            slots=slots,
            sampling=sampling,
            grammars=verify.grammars,
            shown=verify.shown,
            placements=placements,
            stats=EngineStats(),
            eos_ids=eos_ids,
            clock=clock,
            forget=self._forget,
        )
        self.waiting, self.running = self.residents.waiting, self.residents.running
        self.free_slots = self.residents.free_slots
        self.heads = HeadBooks(memory, config.draft_chunk)

    # -- requests in and out ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it could never run."""
        self.validate(request.tokens)
        if not self.busy:
            self._collecting = None  # what was collected before is long past
        self.residents.add(request)

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
        self.end(request, reason, stop_reason)
        self.residents.withdraw(request)

    def _forget(self, request: Request) -> None:
        """It has ended: nobody needs to know it any more."""
        self.memory.forget(request)
        for drafter in self.decode.drafters.values():
            drafter.forget(request)
        if self.choice is not None:
            self.choice.forget(request.order)
        self.architecture.forget(request.order)

    def switch(self, name: str) -> None:
        """Change the architecture between two steps. Drafts waiting for the verify lane are verified as they stand."""
        config = self.config.switched(name)
        if name != "plain" and self.drafter is None and config.drafts and config.max_draft:
            raise ConfigError("this engine was started with --arch plain, without its drafter: start it with another")
        self.config = config
        if name != self.architecture.name:
            self.architecture = self.architectures(name)
            if self.recorder:
                self.recorder.switched(self.architecture)
            self.verify.keeps = self.architecture.speculative
            self.stats.switches += 1

    def skip_prefill(self, request: Request) -> None:
        """Take a prompt as computed, whatever the caches hold: for measurements, whose texts nobody reads."""
        request.admitted(len(request.tokens), draft_lag=0)
        self.residents.enter(request, State.DECODE)

    @property
    def stats(self) -> EngineStats:
        """The books, which are kept with the requests."""
        return self.residents.stats

    @stats.setter
    def stats(self, stats: EngineStats) -> None:
        self.residents.stats = stats

    def started(self) -> None:
        """All that comes before the first request has been done; `pauses` and `memory_taken` count from here on."""
        self._paused, self._taken = WATCH.total, taken(self.slots.device)
        self.recent.clear()

    @property
    def pauses(self) -> Pauses:
        """What was compiled, captured and collected in this process while requests may have waited for it."""
        return WATCH.total.since(self._paused)

    @property
    def memory_taken(self) -> dict[str, int]:
        """How often memory was got from the driver since, by what for; nothing on a CPU."""
        return {name: count - self._taken.get(name, 0) for name, count in taken(self.slots.device).items()}

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running or len(self.inflight))

    def check(self) -> None:
        """Prove that nothing leaks, and that idle means empty."""
        self.residents.check()
        if not self.busy:
            assert self.memory.verifier.blocks.used == 0, "an idle engine holds verifier blocks"
            assert self.memory.draft is None or self.memory.draft.blocks.used == 0, "an idle engine holds draft blocks"
            assert not self.memory.remembers, "an idle engine remembers requests"

    # -- the step -----------------------------------------------------------------------------------------------------

    def collect(self) -> list[Request]:
        """Wait until the next step may be planned, and take in what has run. Returns who got tokens or ended.

        A loop that calls it before it adds requests lets those join the next plan who arrived while the device was
        waited for, and passes tokens on before it plans. `step` does the same for loops that do not.
        """
        if self.inflight.delay:
            return []  # verdicts are held back by counting steps
        self._collecting = self.clock()
        news = self._absorb_all(self.inflight.finished())
        if not self.busy:
            self.tell()
        return news

    def step(self) -> list[Request]:
        """One turn. Returns the requests that got tokens or ended."""
        news: dict[int, Request] = {}
        self._begun = self.clock() if self._collecting is None else self._collecting
        self._collecting = None
        self._read_prompts()
        news.update((request.order, request) for request in self._absorb_all(self.inflight.finished()))
        self._admit()
        self._tell_drafters()
        plan = self.residents.reserve(self.architecture.plan(snapshot(self)))
        self.launch(plan)
        if plan.empty and not news:
            self.inflight.pause(self.config.wait)
        news.update((request.order, request) for request in self._absorb_all(self.inflight.arrived()))
        self.tell()
        if not self.busy:
            self.check()
        ended = self.clock()
        self.stats.step_seconds += ended - self._begun
        if self._launched is not None:
            self._launched.ended, self._launched = ended, None
        return list(news.values())

    def _admit(self) -> None:
        """Let requests in. Where one cannot be brought to the device, those who came with it fail as in a launch."""
        if not self.residents.waiting:
            return
        before = set(self.running)
        try:
            admitted = self.residents.admit(unread=not self.verify.keeps)
            if self.synthetic and admitted:
                self._set_alpha(admitted)
            for drafter in self.decode.drafters.values() if admitted else ():
                for request in admitted:
                    drafter.admitted(request)
        except BaseException as error:
            self._fail(set(self.running) - before, error)
            raise

    def _tell_drafters(self) -> None:
        """Before a plan that may draft: what was confirmed. Where there are two, it is decided who proposes for whom,
        by what a row and a step cost beside those who decode now."""
        drafter, choice, config = self.drafter, self.choice, self.config
        if drafter is None or not self.architecture.controller.may_draft:
            return
        decoding = [each for each in self.running.values() if each.state is State.DECODE or each.state is State.VERIFY]
        wanting = [each for each in decoding if terms_of(each, config).draft_limit]
        drafter.observe(wanting)
        if choice is None:
            return
        if self.cost is not None and self.cost.known:
            lengths = [request.length_bound for request in decoding]
            choice.row, choice.step = self.cost.prices(len(lengths), float(sum(lengths)))
        for request in wanting:
            choice.decide(request, terms_of(request, config).draft_limit, able=proposable(drafter, request) > 0)

    # -- launch and absorb --------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Start the plan's batches, in order of priority, and note what they will have changed."""
        self.stats.steps += 1
        if plan.empty:
            return
        self.stats.plans += 1
        self.stats.plans_left += plan.leaves_drafts
        timed = TimedPlan(self.stats.steps, self.architecture.name, self.architecture.ran, plan, self._begun)
        timed.why = self.architecture.why() if self.recorder else {}
        self.latest = timed
        made = self.verify.captured, WATCH.compiled
        self.memory.publish()
        timed.beside = bool(self.inflight.away)
        self.sampling.settle(self.placements.marks)
        try:
            if plan.draft:
                slots = [span.slot for span in plan.draft.spans]
                with self.placements.run("decode", slots) as timed.timers["decode"]:
                    self.decode.launch(plan.draft)
                timed.decode_wait = self._note_drafts(plan.draft)
                self.stats.lanes["decode"].ran(len(slots))
            if plan.verify:
                timed.timers["verify"] = self._launch_pass("verify", plan.verify, plan)
            if plan.prefill:
                timed.timers["prefill"] = self._launch_pass("prefill", plan.prefill, plan)
                timed.beside = timed.beside or (self.prefill is not None and bool(self.inflight.away))
        except BaseException as error:
            batches = [batch.spans for batch in (plan.draft, plan.verify, plan.prefill) if batch]
            self._fail({span.slot for spans in batches for span in spans}, error)
            raise
        if (self.verify.captured, WATCH.compiled) == made:  # else the time is a capture's or a compiler's
            self.timed.add(timed)
            self._launched = timed
        self.residents.grow()

    def _read_prompts(self) -> None:
        """A head reads the prompt chunks of the step before."""
        spans = self.heads.due()
        if not spans or self.drafter is None:
            return
        slots = {span.slot for span in spans}
        try:
            with self.placements.run("decode", slots):
                self.drafter.follow(spans)
        except BaseException as error:
            self._fail(slots, error)
            raise

    def _launch_pass(self, lane: str, batch: VerifyBatch, plan: Plan) -> LaneTimer:
        """One verifier pass, in the lane it belongs to."""
        requests = [self.running[span.slot] for span in batch.spans]
        if self.synthetic and self.synthetic.drifts:
            self._set_alpha(requests)
        apart = self.placements.apart(lane)
        with self.placements.run(lane, [span.slot for span in batch.spans]) as timer:
            if self.verify.keeps:
                self.heads.begin(requests, batch.spans, self.slots.lengths)
            ticket = self._hand_over(batch, requests) if lane == "prefill" else None
            ticket = ticket or self.verify.launch(batch, replay=not apart)
        ticket.slots, ticket.apart = frozenset(span.slot for span in batch.spans), apart
        self._note_launch(requests, batch.spans)
        ticket.launched = timer.started
        self.inflight.add(ticket)
        self.stats.passes += 1
        self.stats.rows += batch.rows
        self.stats.lanes[lane].ran(len(batch.spans))
        follows = self.drafter is not None and self.drafter.follows and self.verify.keeps
        if follows and self.architecture.controller.drafting:  # while nobody drafts, a head may lag behind
            self.heads.add(requests, batch.spans)
        return timer

    def _hand_over(self, batch: VerifyBatch, requests: Sequence[Request]) -> Ticket | None:
        """Prompt chunks to the process that reads them; None: there is none, or it cannot."""
        if self.prefill is None:
            return None
        return self.prefill.launch(batch, [request.order for request in requests])

    def _note_drafts(self, batch: DraftBatch) -> float:
        """The draft's cache catches up now; what is drafted waits for the verify lane. Returns the longest wait, s."""
        now, step, longest = self.clock(), self.stats.steps, 0.0
        for span in batch.spans:
            request = self.running[span.slot]
            request.caught_up(span.rows)
            if span.drafts:
                longest = max(longest, now - request.entered)
                self.residents.enter(request, State.VERIFY, now)
                request.drafted(Draft(span.drafts, span.drafter or batch.drafter, span.temperature))
                request.served = step
        return longest

    def _fail(self, slots: set[int], error: BaseException) -> None:
        """A launch broke off: what the device holds of its requests is unknown. Nobody else is harmed.

        They end; or, when memory ran out and the engine is forgiving, they are computed again, half as many at once
        beside the others. A request that does not fit alone ends. Who gives way is computed again in any case.
        """
        touched = [self.running[slot] for slot in sorted(slots & set(self.running))]
        again = self.forgiving and len(self.running) > 1 and out_of_memory(error)
        if again:
            self.residents.limit = max(1, len(self.running) - len(touched) + len(touched) // 2)
        for request in touched:
            if request.preempting:
                continue
            if not again:
                self.finish(request, "error")
            elif not request.finished:
                self.residents.preempt(request)

    def _note_launch(self, requests: Sequence[Request], spans: Sequence[VerifySpan]) -> None:
        """What the pass reads is read, and whoever gets a token drafts next."""
        now, stats, enter = self.clock(), self.stats, self.residents.enter
        kept = {name: drafter.has_cache and drafter.keeps_drafts for name, drafter in self.decode.drafters.items()}
        for request, span in zip(requests, spans, strict=True):
            request.tickets += 1
            request.served = stats.steps
            request.unread = request.unread or not self.verify.keeps
            if span.start is not None:
                request.read(span.rows)
                stats.prompt_tokens += span.rows
            if not span.emits:
                continue
            request.launched(span.drafts, kept=span.drafter is not None and kept[span.drafter])
            if request.state is State.DECODE:
                # one token and no draft: through the lane within this plan
                enter(request, State.VERIFY, now)
            enter(request, State.DECODE, now)

    def tell(self) -> None:
        """Pass on what has been timed since: to the policy, and to the record."""
        for timed in self.timed.finished():
            for lane, timer in timed.timers.items():
                self.stats.lanes[lane].seconds += timer.seconds()
            timing = timed.timing()
            self.stats.chunk_seconds += timing.chunk_seconds
            if not timed.beside:  # what others took of the device meanwhile is no cost of this plan
                self.architecture.observe_step(timing)
            self.recent.append(PastStep(timed, timing))
            if self.recorder:
                self.recorder.plan(timed, self.clock())
        if self.recorder:
            self.recorder.policy(self.stats.steps, self.clock(), self.architecture, idle=not self.busy)

    def _absorb_all(self, tickets: Sequence[Ticket]) -> list[Request]:
        """Take in finished passes, oldest first. Where one breaks off, those behind it are still out."""
        news = []
        for place, ticket in enumerate(tickets):
            try:
                news += self.absorb(ticket)
            except BaseException:
                self.inflight.put_back(tickets[place + 1 :])
                raise
        return news

    def absorb(self, ticket: Ticket) -> list[Request]:
        """Take in a finished pass: confirm tokens, end what has ended, free what nobody touches any more."""
        batch: VerifyBatch = ticket.batch
        try:
            result: PassResult = ticket.result()
        except BaseException as error:
            self._lose(batch, error)
            raise
        now, news = self.clock(), []
        for span, verdict in zip(batch.spans, result.verdicts, strict=True):
            request = self.running[span.slot]
            request.tickets -= 1
            going = not request.finished
            draft = None if verdict is None else request.absorbed(len(verdict.tokens) if going else 0)
            if going:
                if request.prompt_logprobs is not None:
                    take_prompt_logprobs(request, span, result)
                if verdict is not None and draft is not None:
                    self._confirm(request, span, verdict, now)
                    if verdict.drafted:
                        self._observe(request, span, verdict, draft.temperature)
                    news.append(request)
                computed = len(request.tokens) - 1 if verdict is not None else (span.start or 0) + span.rows
                self.memory.commit(request, computed)
            if not request.tickets and (request.finished or request.preempting):
                self.residents.leave(request)
        if self.recorder:
            self.recorder.verdicts(self.clock(), batch, result.verdicts)
        return news

    def _lose(self, batch: VerifyBatch, error: BaseException) -> None:
        """A pass that was launched came to nothing: for its requests it is as if the launch had broken off.

        Who has a later pass out cannot go on, for its tokens would follow ones that nobody knows.
        """
        requests = [self.running[span.slot] for span in batch.spans]
        for request, span in zip(requests, batch.spans, strict=True):
            request.tickets -= 1
            if span.emits:
                request.absorbed(0)
            if request.tickets:
                self.finish(request, "error")
        self._fail({span.slot for span in batch.spans}, error)
        for request in requests:
            if request.slot is not None and not request.tickets and (request.finished or request.preempting):
                self.residents.leave(request)  # it had ended, or given way, before

    def _confirm(self, request: Request, span: VerifySpan, verdict: Verdict, now: float) -> None:
        """The verdict's tokens are the request's; what ends with it ends."""
        stats, emitted = self.stats, len(verdict.tokens)
        confirm(request, verdict, now)
        stats.emitted += emitted
        stats.drafted += verdict.drafted
        stats.accepted += verdict.accepted
        if span.start is None:
            stats.verdicts += 1
            stats.continued += emitted
        if request.origins is not None:
            request.origins += origins(span, verdict)
        if verdict.finish == "stop":
            last = verdict.tokens[-1]
            self.end(request, "stop", None if last in self.eos_ids else last)
        elif verdict.finish is not None:
            self.end(request, verdict.finish)

    def _observe(self, request: Request, span: VerifySpan, verdict: Verdict, tau: float) -> None:
        """Tell the policy, and whoever chooses between drafters, what became of a draft."""
        if span.drafter == "head" and self.synthetic is None:
            self.first_drafts.count(verdict.drafted, verdict.accepted)
        if self.choice is not None:
            self.choice.observe(request.order, span.drafter, verdict.drafted, verdict.accepted)
        self.architecture.observe(observation(request, span, verdict, tau, self.config))

    def end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """The request has all its tokens; it leaves when nothing of it is in flight."""
        self.residents.enter(request, State.FINISHED)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.metrics.finished_time = self.clock()
        self.stats.finished += 1
        self.stats.answered += request.output_len > 0
        self.stats.finished_tokens += request.output_len

    def _set_alpha(self, requests: Iterable[Request]) -> None:
        assert self.synthetic is not None
        chosen = list(requests)
        values = [self.synthetic.value(request.order, request.output_len) for request in chosen]
        self.sampling.set_alpha([request.slot for request in chosen if request.slot is not None], values)

    def drain(self) -> None:
        """Wait for everything in flight; requests that have ended leave, whatever became of their passes."""
        self._absorb_all(self.inflight.drain())
        for request in [r for r in self.running.values() if r.finished]:
            request.tickets = 0
            self.residents.leave(request)

    def shutdown(self) -> None:
        """Drop all work."""
        try:
            for request in [*self.waiting, *self.running.values()]:
                self.finish(request)
            self.drain()
            self.check()
            if self.recorder:
                self.tell()
                self.recorder.close()
        finally:
            for drafter in self.decode.drafters.values():
                drafter.close()
            if self.prefill is not None:
                self.prefill.close()
            self.verify.runner.close()
