"""Architectures: policies that turn a snapshot into a plan. Pure: no tensors, no clock, no requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from verifypd.batch import DraftBatch, DraftSpan, VerifyBatch, VerifySpan
from verifypd.control.controller import Controller, FixedController
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.errors import ConfigError

ROUTINE_LAG = 2  # tokens a draft model lacks after every verdict; catching up with more comes out of the chunk budget


class Architecture(Protocol):
    """Makes plans."""

    name: str

    def plan(self, snapshot: Snapshot) -> Plan:
        """What the next step runs."""
        ...


class Unified:
    """One worker, no hand-off: a ragged verifier pass carries verify spans, plain tokens and prefill chunks."""

    name = "unified"

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def plan(self, snapshot: Snapshot) -> Plan:
        """Draft for as many decoding requests as the batch takes, verify them, and let prompt chunks ride along."""
        decoding = longest_waiting(v for v in snapshot.requests if not v.prefill_left and v.room > 0)
        decoding = decoding[: snapshot.batch_size]
        drafts = self._draft(decoding, snapshot)
        lengths = {span.slot: span.drafts for span in drafts}
        spans = [decode_span(view, lengths.get(view.slot, 0), snapshot.drafter) for view in decoding]
        spans += prefill_spans(snapshot, snapshot.batch_size - len(decoding))
        return Plan(
            draft=DraftBatch(snapshot.drafter, tuple(drafts)) if drafts and snapshot.drafter else None,
            verify=VerifyBatch(tuple(spans)) if spans else None,
        )

    def _draft(self, decoding: list[RequestView], snapshot: Snapshot) -> list[DraftSpan]:
        """Who drafts how much. A draft model that lags behind catches up first, within the chunk budget."""
        if snapshot.drafter is None:
            return []
        budget = snapshot.draft_chunk
        spans = []
        for view in sorted(decoding, key=lambda v: v.draft_lag):  # one far behind must not hold up those that are level
            drafts = self.controller.draft_length(view)
            if not drafts:
                continue
            lag = view.draft_lag if snapshot.drafter_has_cache else 0
            rows = min(lag, budget + ROUTINE_LAG)
            if rows < lag:
                drafts = 0
            budget -= max(0, rows - ROUTINE_LAG)
            if rows or drafts:
                context = min(view.length_bound, view.max_length) + drafts
                spans.append(DraftSpan(view.slot, lag, rows, drafts, context))
        return spans


class Plain(Unified):
    """Continuous batching without speculation: the arm every claim is held against."""

    name = "plain"

    def __init__(self) -> None:
        super().__init__(FixedController(0))


def longest_waiting(views: Iterable[RequestView]) -> list[RequestView]:
    """By priority, then by how long ago they were served, then by arrival."""
    return sorted(views, key=lambda v: (v.rank[0], v.served, v.rank[1]))


def decode_span(view: RequestView, drafts: int, drafter: str | None) -> VerifySpan:
    """The last confirmed token and its drafts; plain decoding is the case of no draft."""
    context = min(view.length_bound, view.max_length) + drafts
    return VerifySpan(
        slot=view.slot,
        rows=drafts + 1,
        drafts=drafts,
        start=None,
        emits=True,
        context=context,
        drafter=drafter if drafts else None,
    )


def prefill_spans(snapshot: Snapshot, room: int) -> list[VerifySpan]:
    """Prompt chunks in order of rank, `prefill_chunk` tokens in all."""
    budget = snapshot.prefill_chunk
    spans = []
    for view in sorted((v for v in snapshot.requests if v.prefill_left), key=lambda v: v.rank)[: max(room, 1)]:
        rows = min(view.prefill_left, budget)
        if not rows:
            break
        budget -= rows
        spans.append(
            VerifySpan(
                slot=view.slot,
                rows=rows,
                drafts=0,
                start=view.chunk_start,
                emits=rows == view.prefill_left,
                context=view.chunk_start + rows,
                prompt_logprobs=view.prompt_logprobs,
            )
        )
    return spans


def make_architecture(name: str, controller: Controller) -> Architecture:
    """The architecture of that name."""
    if name == "plain":
        return Plain()
    if name == "unified":
        return Unified(controller)
    raise ConfigError(f"--arch {name!r} is not known; choose from plain, unified")
