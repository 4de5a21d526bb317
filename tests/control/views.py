"""A request and a snapshot for tests of policies to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verifypd.control.snapshot import RequestView, Snapshot

VIEW = RequestView(
    slot=0,
    rank=(0, 0),
    served=0,
    chunk_start=0,
    prefill_left=0,
    length_floor=512,
    length_bound=512,
    max_length=100_000,
    draft_limit=8,
    draft_lag=2,
    expected=8,
    prompt_logprobs=-1,
    slo_tpot=1e6,
)


def view(slot: int, **changes: Any) -> RequestView:
    return VIEW._replace(slot=slot, request_id=slot, rank=(0, slot), **changes)


def snapshot(views: Sequence[RequestView], **changes: Any) -> Snapshot:
    base = Snapshot(
        step=1,
        requests=tuple(views),
        batch_size=256,
        prefill_chunk=256,
        draft_chunk=256,
        drafter="model",
        drafter_has_cache=True,
    )
    return replace(base, **changes)


def prompt(slot: int, left: int, *, read: int = 0, priority: int = 0, **changes: Any) -> RequestView:
    """A prompt with so many tokens left; `read` of it are read."""
    begun = {"chunk_start": read, "served": int(read > 0)}
    return view(slot, prefill_left=left, **begun, **changes)._replace(rank=(priority, slot))
