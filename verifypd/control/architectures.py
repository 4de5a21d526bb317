"""Architectures: policies that turn a snapshot into a plan. Pure: no tensors, no clock, no requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from verifypd.batch import DraftBatch, DraftSpan, VerifyBatch, VerifySpan
from verifypd.config import ARCHITECTURES
from verifypd.control.controller import Controller, FixedController
from verifypd.control.lanes import allot, lane_views, longest_queued, longest_waiting
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.control.observe import Observation, StepTiming


SELECT_VARIANTS = ("readme", "slides")  # where the original gives its advice; the two differ


class Architecture(Protocol):
    """Makes plans, and is told what came of them."""

    name: str
    speculative: bool  # whether its plans may ever draft

    @property
    def ran(self) -> str:
        """Whose plan its last one was, for records and metrics: a policy over others names the one it has chosen."""
        ...

    @property
    def curious(self) -> bool:
        """Whether the next plan may draft: while not, the views need not say what could be proposed."""
        ...

    @property
    def drafting(self) -> bool:
        """Whether it drafts at present, and does not only try now and then whether it should."""
        ...

    @property
    def at_rest(self) -> bool:
        """Whether, while nobody prefills, its next plan is one token for each request and nothing else.

        It is told of no verdicts without drafts meanwhile: the next snapshot says how many tokens there are.
        """
        ...

    def plan(self, snapshot: Snapshot) -> Plan:
        """What the next step runs."""
        ...

    def observe(self, observation: Observation) -> None:
        """A verdict was absorbed. Those without drafts are not told of at rest."""
        ...

    def observe_step(self, timing: StepTiming) -> None:
        """The batches of a plan have run."""
        ...

    def forget(self, order: int, emitted: int) -> None:
        """A request has left for good, with so many output tokens."""
        ...

    def state(self) -> dict[str, float | str]:
        """What runs now and what it rests on, by name, for metrics and records."""
        ...


class Policy:
    """What architectures share: drafting as the controller says, and passing on to it what happened."""

    name: str
    speculative = True

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    @property
    def ran(self) -> str:
        """Its own."""
        return self.name

    @property
    def at_rest(self) -> bool:
        """Not by itself: lanes and turns have an order of their own."""
        return False

    @property
    def curious(self) -> bool:
        """As its controller is."""
        return self.controller.curious

    @property
    def drafting(self) -> bool:
        """As its controller does."""
        return self.controller.drafting

    def observe(self, observation: Observation) -> None:
        """A verdict was absorbed."""
        self.controller.observe(observation)

    def observe_step(self, timing: StepTiming) -> None:
        """The batches of a plan have run."""
        self.controller.observe_step(timing)

    def forget(self, order: int, emitted: int) -> None:
        """A request has left for good, with so many output tokens."""
        self.controller.forget(order, emitted)

    def state(self) -> dict[str, float | str]:
        """Whose plans it gives, and what its controller believes."""
        return {"architecture": self.ran, **self.controller.state()}

    def draft(self, views: Sequence[RequestView], snapshot: Snapshot) -> list[DraftSpan]:
        """Who drafts how much. A draft model that lags behind catches up first, within the chunk budget.

        What it lacks after every verdict is not counted against that budget.
        """
        fresh = [view for view in views if not view.pending and view.draft_limit]
        if snapshot.drafter is None or not fresh:
            self.controller.meet(views)
            return []
        lengths = self.controller.draft_lengths(fresh, snapshot)
        budget, routine = snapshot.draft_chunk, snapshot.routine_lag
        spans = []
        for view in sorted(fresh, key=lambda v: v.draft_lag):  # one far behind must not hold up those that are level
            drafts = max(0, min(lengths.get(view.slot, 0), view.draft_limit, view.promise, view.room - 1))
            if not drafts:
                continue
            lag = view.draft_lag if snapshot.drafter_has_cache else 0
            if lag > routine and budget <= 0:
                continue
            rows = min(lag, budget + routine)
            if rows < lag:
                drafts = 0
            budget -= max(0, rows - routine)
            if rows or drafts:
                temperature = self._temperature(view) if drafts else 1.0
                spans.append(DraftSpan(view.slot, lag, rows, drafts, view.context + drafts, temperature, view.proposer))
        return spans

    def _temperature(self, view: RequestView) -> float:
        """τ of a draft: what the request or the engine's settings fix, else the controller's choice."""
        return self.controller.temperature(view) if view.draft_temperature is None else view.draft_temperature

    def atomic(
        self, views: Sequence[RequestView], snapshot: Snapshot
    ) -> tuple[DraftBatch | None, tuple[VerifySpan, ...]]:
        """Draft and verify the same requests in one plan; drafts already written are verified as they stand."""
        drafts = self.draft(views, snapshot)
        lengths = {span.slot: span.drafts for span in drafts}
        spans = tuple(decode_span(view, lengths.get(view.slot, 0), view.proposer or snapshot.drafter) for view in views)
        return draft_batch(drafts, snapshot), spans


class Unified(Policy):
    """One worker, no hand-off: a ragged verifier pass carries verify spans, plain tokens and prefill chunks."""

    name = "unified"

    def __init__(self, controller: Controller, queue_factor: float | None = None) -> None:
        super().__init__(controller)
        self.queue_factor = queue_factor  # None: the server's setting
        self._prompts = False  # whether prompts were waiting at the last plan

    @property
    def at_rest(self) -> bool:
        """While its controller would not draft, and has met everybody."""
        return not (self.controller.curious or self._prompts)

    def plan(self, snapshot: Snapshot) -> Plan:
        """Draft for as many decoding requests as the batch takes, verify them, and let prompt chunks ride along.

        Backpressure: a prompt does not end, and so does not join the decode queue, while that queue is full.
        """
        self._prompts = any(view.prefill_left for view in snapshot.requests)
        queue = decoding(snapshot)
        factor = snapshot.queue_factor if self.queue_factor is None else self.queue_factor
        free = math.ceil(factor * snapshot.batch_size) - sum(1 for v in snapshot.requests if not v.prefill_left)
        batch = queue[: snapshot.batch_size]
        draft, spans = self.atomic(batch, snapshot)
        chunks = prefill_spans(snapshot, snapshot.batch_size - len(batch), snapshot.prefill_chunk, joining=free)
        return Plan(draft=draft, verify=verify_batch((*spans, *chunks)))


class Plain(Unified):
    """Continuous batching without speculation: the arm every claim is held against."""

    name = "plain"
    speculative = False

    def __init__(self) -> None:
        super().__init__(FixedController(0))


class Baseline(Policy):
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
            return Plan(prefill=verify_batch(prefill_spans(replace(snapshot, requests=(view,)), 1)))
        draft, spans = self.atomic([view], snapshot)
        return Plan(draft=draft, verify=verify_batch(spans))


class PD(Policy):
    """Two lanes: prefill in a pass of its own; draft and verify atomic, lock-step over the batch."""

    name = "pd"

    def plan(self, snapshot: Snapshot) -> Plan:
        """Draft and verify the whole batch, then a pass over prompt chunks."""
        batch = decoding(snapshot)[: snapshot.batch_size]
        draft, spans = self.atomic(batch, snapshot)
        chunks = prefill_spans(snapshot, snapshot.batch_size - len(batch))
        return Plan(draft=draft, verify=verify_batch(spans), prefill=verify_batch(chunks))


class PDV(PD):
    """Three lanes: drafts queue for the verify lane, which takes `verify_batch` requests at once while others draft.

    With too few running requests to fill one verify batch while another drafts, steps are atomic, as in `pd`. The way
    back is wider than the way in, so that a request more or less does not flip it.
    """

    name = "pdv"

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller)
        self.is_atomic = True

    @property
    def ran(self) -> str:
        """Its own, and whether draft and verification were one step."""
        return f"{self.name} ({'atomic' if self.is_atomic else 'pipelined'})"

    def plan(self, snapshot: Snapshot) -> Plan:
        """Everyone who is ready drafts; the verify lane runs when it is due; prompts take what tokens are left."""
        self._settle(len(snapshot.requests) + snapshot.away, snapshot.verify_batch)
        if self.is_atomic:
            return super().plan(snapshot)
        ready = decoding(snapshot)
        fresh = [view for view in ready if not view.pending][: snapshot.batch_size]
        drafts = self.draft(fresh, snapshot)
        writing = {span.slot for span in drafts if span.drafts}
        # who drafts nothing needs no draft to be verified: its one token queues with the drafts
        queue = longest_queued([v for v in ready if v.pending] + [v for v in fresh if v.slot not in writing])
        batch = queue[: min(snapshot.verify_batch, snapshot.batch_size)]
        chunks = prefill_spans(snapshot, snapshot.batch_size, self._prompt_tokens(snapshot))
        if not verify_due(batch, snapshot, idle=not (writing or chunks)):
            batch = []
        spans = tuple(decode_span(view, 0, None) for view in batch)
        return Plan(draft=draft_batch(drafts, snapshot), verify=verify_batch(spans), prefill=verify_batch(chunks))

    def _settle(self, running: int, verify_batch: int) -> None:
        """Pipelined from two verify batches of running requests on; atomic again when only one is left."""
        if self.is_atomic:
            self.is_atomic = running < 2 * verify_batch
        else:
            self.is_atomic = running <= verify_batch

    @staticmethod
    def _prompt_tokens(snapshot: Snapshot) -> int:
        """The prefill lane's part of a step of `batch_size` + `prefill_chunk` tokens."""
        step = snapshot.batch_size + snapshot.prefill_chunk
        share = allot(lane_views(snapshot), step, snapshot.lane_weights).get("prefill", 0)
        return min(share, snapshot.prefill_chunk)


class Table(Policy):
    """The original's advice as code, kept to be compared with: `pd` or `pdv` by concurrency and size of the model."""

    name = "table"

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller)
        self.choices: dict[str, Architecture] = {"pd": PD(controller), "pdv": PDV(controller)}
        self.running = "pd"  # whose plans it answers with

    @property
    def ran(self) -> str:
        """The chosen one's."""
        return self.choices[self.running].ran

    def plan(self, snapshot: Snapshot) -> Plan:
        """As the chosen one plans."""
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
    return longest_waiting(view for view in snapshot.requests if not view.prefill_left and view.room > 0)


def verify_due(queue: Sequence[RequestView], snapshot: Snapshot, idle: bool) -> bool:
    """Whether the verify lane runs: its batch is full, its oldest request has waited enough, or nothing else can."""
    if not queue:
        return False
    oldest = max(view.waited for view in queue) * 1e3
    return idle or len(queue) >= snapshot.verify_batch or oldest >= snapshot.verify_wait_ms


def decode_span(view: RequestView, drafts: int, drafter: str | None) -> VerifySpan:
    """The last confirmed token and its drafts, pending ones as they stand; plain decoding is the case of no draft."""
    if view.pending:
        drafts, drafter = view.pending, view.drafter
    return VerifySpan(
        slot=view.slot,
        rows=drafts + 1,
        drafts=drafts,
        start=None,
        emits=True,
        context=view.context + drafts,
        drafter=drafter if drafts else None,
    )


def prefill_spans(
    snapshot: Snapshot, room: int, tokens: int | None = None, joining: int | None = None
) -> tuple[VerifySpan, ...]:
    """Prompt chunks in order of rank: `tokens` (the prefill chunk) in all, for `room` requests, but one at least.

    At most `joining` prompts are finished; the others stop one token short.
    """
    budget = snapshot.prefill_chunk if tokens is None else min(tokens, snapshot.prefill_chunk)
    spans: list[VerifySpan] = []
    for view in sorted((v for v in snapshot.requests if v.prefill_left), key=lambda v: v.rank):
        if not budget or len(spans) >= max(min(room, snapshot.most_chunks), 1):
            break
        left = view.prefill_left - (joining is not None and joining <= 0)
        rows = min(left, budget)
        if not rows:
            continue
        budget -= rows
        ends = rows == view.prefill_left
        if ends and joining is not None:
            joining -= 1
        spans.append(
            VerifySpan(
                slot=view.slot,
                rows=rows,
                drafts=0,
                start=view.chunk_start,
                emits=ends,
                context=view.chunk_start + rows,
                prompt_logprobs=view.prompt_logprobs,
            )
        )
    return tuple(spans)


def draft_batch(spans: Sequence[DraftSpan], snapshot: Snapshot) -> DraftBatch | None:
    """The spans as a batch; None without any."""
    return DraftBatch(snapshot.drafter, tuple(spans)) if spans and snapshot.drafter else None


def verify_batch(spans: Sequence[VerifySpan]) -> VerifyBatch | None:
    """The spans as a batch; None without any."""
    return VerifyBatch(tuple(spans)) if spans else None


def make_architecture(name: str, controller: Controller) -> Architecture:
    """The architecture of that name."""
    if name == "plain":
        return Plain()
    if name == "unified":
        return Unified(controller)
    if name == "baseline":
        return Baseline(controller)
    if name == "pd":
        return PD(controller)
    if name == "pdv":
        return PDV(controller)
    if name == "table":
        return Table(controller)
    if name == "auto":
        from verifypd.control.auto import Auto  # it stands over all the others

        return Auto(controller)
    raise ConfigError(f"--arch {name!r} is not known; choose from {', '.join(ARCHITECTURES)}")
