"""Passes of fixed shape: buckets, padding, and inputs that stay in place. Knows slots and rows; nothing of models.

A pass is padded to a key, ragged inside. What pads is *void*: spans that begin before the text does, so their rows
write to the null block and nobody reads what comes of them; they need no slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.buckets import CHUNKS, bucket, chunk_bucket, row_bucket, span_bucket
from verifypd.runtime.inputs import Staging

VOID = 1 << 30  # tokens before its slot's end that a void span begins: before any text


class PassKey(NamedTuple):
    """The shape of a padded pass: short spans of at most `widest` rows, then prompt chunks and a void span."""

    spans: int  # short ones
    rows: int  # of the whole pass
    widest: int
    chunks: int = 0

    @property
    def all_spans(self) -> int:
        """Short spans, chunks and, behind chunks, one void span that takes the rows left over."""
        return self.spans + (self.chunks + 1 if self.chunks else 0)


def pass_key(short: Sequence[int], widest: int, chunks: Sequence[int] = ()) -> PassKey:
    """The bucket of a pass of `short` spans and chunks, given by their rows; there are spans enough for void rows."""
    total = sum(short) + sum(chunks)
    if chunks:
        return PassKey(span_bucket(len(short)), chunk_bucket(total), widest, CHUNKS)
    rows = row_bucket(total)
    return PassKey(bucket(len(short) + -(-(rows - total) // widest)), rows, widest)


def padding(short: Sequence[int], key: PassKey, chunks: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """Rows of the void spans that follow the short ones, and of those that follow the chunks; some have none."""
    missing = key.rows - sum(short) - sum(chunks)
    spare, behind = key.spans - len(short), key.chunks - len(chunks)
    void: list[int] = []
    if not key.chunks:
        for _ in range(spare):
            void.append(min(missing, key.widest))
            missing -= void[-1]
    if spare < 0 or behind < 0 or missing < 0 or (missing and not key.chunks):
        raise ValueError(f"{list(short)} and chunks of {list(chunks)} do not fit {key}")
    return (void, []) if not key.chunks else ([0] * spare, [0] * behind + [missing])


def reachable(spans: int, widest: int, chunk_rows: int) -> list[PassKey]:
    """Keys of every pass of up to `spans` short spans, with up to `chunk_rows` rows of chunks or none; largest first.

    Captured in this order, the memory of the first serves the others.
    """
    found = {key for count in range(1, spans + 1) for key in _plain(count, widest)}
    for beside in sorted({span_bucket(count) for count in range(spans + 1)}) if chunk_rows else ():
        rows, most = 0, chunk_bucket(chunk_rows + min(beside, spans) * widest)
        while rows < most:
            rows = chunk_bucket(rows + 1)
            found.add(PassKey(beside, rows, widest, CHUNKS))
    return sorted(found, key=lambda key: (-key.rows, -key.spans, key.chunks))


def _plain(count: int, widest: int) -> Iterator[PassKey]:
    """Keys of passes of `count` short spans and nothing else."""
    below, rows = count - 1, row_bucket(count)
    while True:
        fewest, most = max(count, below + 1), min(count * widest, rows)
        for void in range(-(-(rows - most) // widest), -(-(rows - fewest) // widest) + 1):
            yield PassKey(bucket(count + void), rows, widest)
        if rows >= count * widest:
            return
        below, rows = rows, row_bucket(rows + 1)


class ModelInputs(NamedTuple):
    """What a model reads of a pass."""

    ids: Tensor  # [N] int64
    layout: PassLayout


class PassInputs:
    """What a padded pass reads, in one int64 tensor that one copy fills."""

    def __init__(self, key: PassKey, device: torch.device) -> None:
        self.key = key
        spans, rows = key.all_spans, key.rows
        sizes = [spans, spans, spans, spans, key.spans, spans + 1, rows, rows, rows]
        self.data = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._staging = Staging(self.data)
        self.slots, self.own, self.back, self.given, self.drafts, *rest = self.data.split(sizes)
        self.offsets, self.row_span, self.within, self.depth = rest
        self.each = torch.arange(key.spans + 1, device=device)  # offsets and, but the last, spans of one row each

    @property
    def bounds(self) -> tuple[int, ...]:
        """Most rows of each span."""
        key = self.key
        return (key.widest,) * key.spans + (key.rows,) * (key.all_spans - key.spans)

    def fill(
        self,
        short: Sequence[int],
        slots: Sequence[int],
        back: Sequence[int],
        drafted: bool,
        chunks: Sequence[int] = (),
        starts: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> None:
        """Spans that begin `back` tokens before the end of their slots; drafted: rows after the first are drafts.

        `slots` and `back` are those of the short spans, then of the chunks. A chunk with a `starts` >= 0 begins there.
        drafts: tokens that short spans draft, where rows are no drafts.
        """
        void, behind = padding(short, self.key, chunks)
        rows = np.array([*short, *void, *chunks, *behind], dtype=np.int64)
        ends = np.cumsum(rows)
        row_span = np.repeat(np.arange(len(rows)), rows)
        within = np.arange(self.key.rows) - (ends - rows)[row_span]
        many, skipped, left = len(short), [0] * len(void), [0] * len(behind)
        own = [*slots[:many], *[-1] * len(void), *slots[many:], *[-1] * len(behind)]
        begins = [*back[:many], *[VOID] * len(void), *back[many:], *[VOID] * len(behind)]
        given = [-1] * (many + len(void)) + [*(starts or [-1] * len(chunks)), *[-1] * len(behind)]
        named = [*slots[:many], *skipped, *slots[many:], *left]
        lengths = [count - 1 for count in short] if drafted else drafts or [0] * many
        depth = within * (row_span < many) if drafted else np.zeros_like(within)
        self._staging.send([named, own, begins, given, lengths, skipped, [0], ends, row_span, within, depth])

    def layout(
        self, lengths: Tensor, table: Tensor, block_size: int, context: int, first: Tensor | None = None
    ) -> PassLayout:
        """The pass: each span from its start on. `model_inputs` does the same in one launch, and is tested by this."""
        starts = torch.where(self.given < 0, lengths[self.slots] - self.back, self.given)
        return PassLayout.from_rows(
            self.bounds, (context,) * self.key.all_spans, self.offsets, self.row_span, self.within,
            slots=self.slots, starts=starts, block_table=table, block_size=block_size, first=first,
        )  # fmt: skip

    def step(
        self, depth: int, lengths: Tensor, table: Tensor, block_size: int, context: int, first: Tensor | None = None
    ) -> PassLayout:
        """One row a span: the token drafted at `depth` − 1. As `layout`, for tests of `model_inputs`."""
        spans, each = self.key.spans, self.each
        starts = torch.where(self.own < 0, -1, lengths[self.slots] - 1 + depth)
        return PassLayout.from_rows(
            (1,) * spans, (context,) * spans, each, each[:-1], torch.zeros_like(each[:-1]),
            slots=self.slots, starts=starts, block_table=table, block_size=block_size, first=first,
        )  # fmt: skip

    def ids(self, layout: PassLayout, tokens: Tensor, drafts: Tensor) -> Tensor:
        """Token ids [N] of the pass: confirmed ones, or drafts. For tests, too."""
        row_slots = layout.slots[layout.row_span]
        drafted = drafts[row_slots, (self.depth - 1).clamp(0, drafts.shape[1] - 1)]
        return torch.where(self.depth > 0, drafted, tokens[row_slots, layout.positions])
