"""Architectures: shapes of a plan. Each turns a snapshot into what the next step runs. Pure: no tensors, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verifypd.batch import DraftBatch, DraftSpan, VerifyBatch, VerifySpan
from verifypd.control.controller import Controller, FixedController, decode_work
from verifypd.control.cost import CostModel, Work
from verifypd.control.lanes import prompt_tokens
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import Beside, Reading, Room, next_chunks
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.control.tuning import LEARNING_RATE
from verifypd.control.value import MS, decode_worth
from verifypd.errors import ConfigError

SELECT_VARIANTS = ("readme", "slides")  # where the original gives its advice; the two differ


class Architecture:
    """Makes plans, and is told what came of them.

    All share drafting as the controller says, prompts by one rule, and learning what steps cost.
    """

    name: str
    speculative = True  # whether its plans may ever draft

    def __init__(self, controller: Controller, cost: CostModel | None = None) -> None:
        self.controller = controller
        self.cost = cost or CostModel()
        self.tokens_each = 1.0  # that a step brings each request, lately
        self.reading = Reading()  # of the last plan
        self._counted = (0, 0)  # tokens and verdicts at the last plan

    def plan(self, snapshot: Snapshot) -> Plan:
        """What the next step runs."""
        raise NotImplementedError

    @property
    def ran(self) -> str:
        """What its last plan was, for records and metrics: one that chooses names its choice."""
        return self.name

    def observe(self, observation: Observation) -> None:
        """A draft was judged."""
        self.controller.observe(observation)

    def observe_step(self, timing: StepTiming) -> None:
        """The batches of a plan have run."""
        self.cost.observe(timing)
        self.controller.observe_step(timing)

    def forget(self, request_id: int) -> None:
        """A request has left for good."""
        self.controller.forget(request_id)

    def why(self) -> dict[str, Any]:
        """Drafts as its controller weighed them, and prompt tokens: what the step takes, their value, and the next."""
        said = self.controller.why()
        for prefix, each in {"": self.reading.chosen, "next_": self.reading.runner_up}.items():
            if each is not None and each.value < math.inf:
                said |= {f"{prefix}prompt_tokens": each.tokens, f"{prefix}step_ms": 1e3 * each.seconds}
                said |= {f"{prefix}value_ms": 1e3 * each.value}
        return said

    def state(self) -> dict[str, float | str]:
        """Whose plans it gives, and what its controller believes."""
        return {"architecture": self.ran, **self.controller.state()}

    # -- parts of a plan ----------------------------------------------------------------------------------------------

    def atomic(
        self, views: Sequence[RequestView], snapshot: Snapshot, room: Room | None = None
    ) -> tuple[DraftBatch | None, tuple[VerifySpan, ...], Beside]:
        """Draft and verify the same requests in one plan; drafts already written are verified as they stand.

        room: for the prompts that ride in this pass; None: they get a pass of their own.
        """
        riding = self.riding(views, snapshot, room) if room is not None and self.controller.may_draft else Reading()
        drafts = self.draft(views, snapshot, riding)
        lengths, own = {span.slot: span.drafts for span in drafts}, snapshot.drafter
        spans = tuple([decode_span(view, lengths.get(view.slot, 0), view.proposer or own) for view in views])
        decode = decode_work(views) + Work(rows=sum(lengths.values()))
        return draft_batch(drafts, snapshot), spans, self._beside(decode, views, drafts, snapshot, apart=room is None)

    def riding(self, views: Sequence[RequestView], snapshot: Snapshot, room: Room) -> Reading:
        """The prompt chunks that would join these requests' pass if nothing were drafted. With drafts the step may read
        more or less; the drafts that the forecast leads to are hardly ever others for it."""
        beside = self._beside(decode_work(views), views, (), snapshot, apart=False)
        return next_chunks(snapshot, self.cost, beside, room)

    def read(self, snapshot: Snapshot, beside: Beside, room: Room) -> tuple[VerifySpan, ...]:
        """The prompt chunks of the step."""
        self.reading = next_chunks(snapshot, self.cost, beside, room)
        return self.reading.spans

    def draft(self, views: Sequence[RequestView], snapshot: Snapshot, riding: Reading) -> list[DraftSpan]:
        """Who drafts how much. A drafter that lags behind catches up first, within the chunk budget.

        What it lacks after every verdict is not counted against that budget.
        """
        self._count_tokens(snapshot)
        fresh = [view for view in views if not view.pending and view.draft_limit]
        if snapshot.drafter is None or not fresh:
            return []
        lengths = self.controller.draft_lengths(fresh, snapshot, riding)
        budget, routine = snapshot.draft_chunk, snapshot.routine_lag
        spans = []
        for view in sorted(fresh, key=lambda v: v.draft_lag):  # one far behind must not hold up those that are level
            drafts, lag = lengths.get(view.slot, 0), view.draft_lag if snapshot.drafter_has_cache else 0
            if not drafts or (lag > routine and budget <= 0):
                continue
            rows = min(lag, budget + routine)
            drafts = drafts if rows == lag else 0
            budget -= max(0, rows - routine)
            tau = self.controller.temperature(view) if view.draft_temperature is None else view.draft_temperature
            spans.append(DraftSpan(view.slot, lag, rows, drafts, view.context + drafts, tau, view.proposer))
        return spans

    def _beside(
        self, decode: Work, views: Sequence[RequestView], drafts: Sequence[DraftSpan], snapshot: Snapshot, apart: bool
    ) -> Beside:
        """A step in which these requests are verified, with so much `decode` work, and these drafts are written."""
        model = [span for span in drafts if span.drafter is None]
        longest, caught_up = max([span.drafts for span in model], default=0), sum([span.rows for span in model])
        loop = self.cost.draft_seconds(longest, caught_up, sum([span.context for span in model]))
        if not any(view.prefill_left for view in snapshot.requests):
            return Beside(decode, loop, 0.0, apart)
        least = MS * (loop + self.cost.pass_seconds(decode) + self.cost.overhead) / self.tokens_each
        worth, drafting = decode_worth(views, self.tokens_each, snapshot.mean_output, least), bool(drafts)
        return Beside(decode, loop, worth, apart, drafting)

    def _count_tokens(self, snapshot: Snapshot) -> None:
        """Note how many tokens verdicts have brought since the last plan."""
        tokens, verdicts = snapshot.emitted - self._counted[0], snapshot.verdicts - self._counted[1]
        self._counted = snapshot.emitted, snapshot.verdicts
        if verdicts > 0:
            self.tokens_each += LEARNING_RATE * (tokens / verdicts - self.tokens_each)


class Unified(Architecture):
    """One worker, no hand-off: a ragged verifier pass carries verify spans, plain tokens and prefill chunks."""

    name = "unified"

    def plan(self, snapshot: Snapshot) -> Plan:
        """Draft for as many decoding requests as the batch takes, verify them, and let prompt chunks ride along.

        Backpressure: a prompt does not end, and so does not join the decode queue, while that queue is full.
        """
        batch = decoding(snapshot)[: snapshot.batch_size]
        free = math.ceil(snapshot.queue_factor * snapshot.batch_size)
        free -= sum([1 for view in snapshot.requests if not view.prefill_left])
        room = Room(snapshot.batch_size - len(batch), snapshot.prefill_chunk, joining=free)
        draft, spans, beside = self.atomic(batch, snapshot, room)
        chunks = self.read(snapshot, beside, room)
        return Plan(draft=draft, verify=verify_batch((*spans, *chunks)))


class Plain(Unified):
    """Continuous batching without speculation: the arm every claim is held against."""

    name = "plain"
    speculative = False

    def __init__(self, controller: Controller, cost: CostModel | None = None) -> None:
        """controller: of the architectures that it takes turns with."""
        super().__init__(FixedController(0), cost)
        self.others = controller

    def forget(self, request_id: int) -> None:
        """The others may have known it."""
        self.others.forget(request_id)


class Baseline(Architecture):
    """Colocation: each request runs its own prefill → draft → verify loop at batch 1; workers take turns.

    A worker keeps its request until it ends; the turn goes to the one that had it longest ago, whatever its priority.
    """

    name = "baseline"

    def plan(self, snapshot: Snapshot) -> Plan:
        """One request: a chunk of its prompt, or a draft and its verification."""
        runnable = [view for view in snapshot.requests if view.prefill_left or view.room > 0]
        held = sorted(runnable, key=lambda view: (not view.served, view.rank))[: snapshot.workers]
        if not held:
            return Plan()
        view = min(held, key=lambda view: (view.served, view.rank))
        if view.prefill_left:
            alone = replace(snapshot, requests=(view,))
            return Plan(prefill=verify_batch(self.read(alone, Beside(apart=True), Room(1, snapshot.prefill_chunk))))
        draft, spans, _ = self.atomic([view], snapshot)
        return Plan(draft=draft, verify=verify_batch(spans))


class PD(Architecture):
    """Two lanes: prefill in a pass of its own; draft and verify atomic, lock-step over the batch."""

    name = "pd"

    def plan(self, snapshot: Snapshot) -> Plan:
        """Draft and verify the whole batch, then a pass over prompt chunks."""
        batch = decoding(snapshot)[: snapshot.batch_size]
        draft, spans, beside = self.atomic(batch, snapshot)
        chunks = self.read(snapshot, beside, Room(snapshot.batch_size - len(batch), snapshot.prefill_chunk))
        return Plan(draft=draft, verify=verify_batch(spans), prefill=verify_batch(chunks))


class PDV(PD):
    """Three lanes: drafts queue for the verify lane, which takes `verify_batch` requests at once while others draft.

    It is pipelined from two verify batches of running requests on. With fewer, steps are atomic, as in `pd`; on the way
    back only when a single batch is left, so that a request more or less does not flip it.
    """

    name = "pdv"
    is_atomic = True  # at present

    @property
    def ran(self) -> str:
        """Its own, and whether draft and verification were one step."""
        return f"{self.name} ({'atomic' if self.is_atomic else 'pipelined'})"

    def plan(self, snapshot: Snapshot) -> Plan:
        """Everyone who is ready drafts; the verify lane runs when it is due; prompts take what tokens are left."""
        running = len(snapshot.requests) + snapshot.away
        self.is_atomic = running < 2 * snapshot.verify_batch if self.is_atomic else running <= snapshot.verify_batch
        if self.is_atomic:
            return super().plan(snapshot)
        ready = decoding(snapshot)
        fresh = [view for view in ready if not view.pending][: snapshot.batch_size]
        drafts = self.draft(fresh, snapshot, Reading())
        writing = {span.slot for span in drafts if span.drafts}
        # who drafts nothing needs no draft to be verified: its one token queues with the drafts
        queue = [v for v in ready if v.pending] + [v for v in fresh if v.slot not in writing]
        queue.sort(key=lambda view: (view.rank[0], -view.waited, view.rank[1]))
        batch = queue[: min(snapshot.verify_batch, snapshot.batch_size)]
        beside = self._beside(decode_work(batch), batch, drafts, snapshot, apart=True)
        chunks = self.read(snapshot, beside, Room(snapshot.batch_size, prompt_tokens(snapshot)))
        due = self._verify_due(batch, snapshot, idle=not (writing or chunks))
        spans = tuple(decode_span(view, 0, None) for view in batch if due)
        return Plan(draft=draft_batch(drafts, snapshot), verify=verify_batch(spans), prefill=verify_batch(chunks))

    @staticmethod
    def _verify_due(batch: Sequence[RequestView], snapshot: Snapshot, idle: bool) -> bool:
        """Whether the verify lane runs: its batch is full, its oldest has waited enough, or nothing else can run."""
        oldest = max((view.waited for view in batch), default=0.0) * 1e3
        return idle or len(batch) >= snapshot.verify_batch or oldest >= snapshot.verify_wait_ms


class Table(Architecture):
    """The original's advice as code, kept to be compared with: `pd` or `pdv` by concurrency and size of the model."""

    name = "table"

    def __init__(self, controller: Controller, cost: CostModel | None = None) -> None:
        super().__init__(controller, cost)
        self.choices = {shape.name: shape(controller, self.cost) for shape in (PD, PDV)}
        self.running = PD.name

    @property
    def ran(self) -> str:
        """The chosen one's."""
        return self.choices[self.running].ran

    def why(self) -> dict[str, Any]:
        """As the chosen one."""
        return self.choices[self.running].why()

    def plan(self, snapshot: Snapshot) -> Plan:
        """Choose, then as the chosen one plans."""
        concurrency = len(snapshot.requests) + snapshot.away + snapshot.waiting
        self.running = select_architecture(concurrency, snapshot.verifier_bytes / 1e9)
        return self.choices[self.running].plan(snapshot)


def select_architecture(concurrency: int, verifier_size_gb: float, variant: str = "readme") -> str:
    """`pd` or `pdv`, as the original advises for so many requests at once and a verifier of that size.

    Both variants say `pdv` from 32 requests on. `readme` says `pd` up to 4, and between them `pdv` for verifiers over
    7 GB. `slides` says `pd` for 6 to 16, and elsewhere `pdv` for verifiers of 34B parameters, 68 GB, or more.
    """
    if variant not in SELECT_VARIANTS:
        raise ConfigError(f"variant {variant!r} is not known; choose from {', '.join(SELECT_VARIANTS)}")
    if concurrency >= 32:
        return "pdv"
    if variant == "slides":
        return "pdv" if verifier_size_gb >= 68 and not 6 <= concurrency <= 16 else "pd"
    return "pdv" if verifier_size_gb > 7 and concurrency > 4 else "pd"


def decoding(snapshot: Snapshot) -> list[RequestView]:
    """Requests that draft or are verified next, those served longest ago first."""
    able = [view for view in snapshot.requests if not view.prefill_left and view.room > 0]
    return sorted(able, key=lambda view: (view.rank[0], view.served, view.rank[1]))


def decode_span(view: RequestView, drafts: int, drafter: str | None) -> VerifySpan:
    """The last confirmed token and its drafts, pending ones as they stand; plain decoding is the case of no draft."""
    if view.pending:
        drafts, drafter = view.pending, view.drafter
    start, emits = None, True
    return VerifySpan(view.slot, drafts + 1, drafts, start, emits, view.context + drafts, drafter if drafts else None)


def draft_batch(spans: Sequence[DraftSpan], snapshot: Snapshot) -> DraftBatch | None:
    """The spans as a batch; None without any."""
    return DraftBatch(snapshot.drafter, tuple(spans)) if spans and snapshot.drafter else None


def verify_batch(spans: Sequence[VerifySpan]) -> VerifyBatch | None:
    """The spans as a batch; None without any."""
    return VerifyBatch(tuple(spans)) if spans else None
