"""Slot-indexed device tensors and the layouts of model passes built from them. Knows slots; nothing of requests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.batch import DraftSpan, VerifySpan
from verifypd.kernels import build
from verifypd.runtime.streams import stream_of

SHAPES_KEPT = 64  # of passes on a CPU: a single request comes with a few lengths of drafts


class Slots:
    """What the lanes hand each other of a running request, a row each, on the device: its text and its drafts."""

    def __init__(self, slots: int, capacity: int, max_draft: int, device: torch.device, drawn: int = 0) -> None:
        """drawn: token ids that a drafter draws from; 0: none draws."""
        self.device = device
        self.capacity = capacity  # tokens a row holds
        self.tokens = torch.zeros(slots, capacity, dtype=torch.int64, device=device)  # confirmed, prompt and output
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)  # how many of them count
        self.drafts = torch.zeros(slots, max(max_draft, 1), dtype=torch.int64, device=device)
        self.draft_lens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.draft_q = torch.zeros(slots, max_draft, drawn, device=device) if drawn else None  # their distributions
        self.draft_temperatures = torch.ones(slots, device=device)  # of the drafter, relative to the request's own

    def assign(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a request in `slot` with the tokens the host knows."""
        self.tokens[slot, : len(tokens)] = host_tensor(tokens, self.device)
        self.lengths[slot].fill_(len(tokens))  # an assignment would wait for the device
        self.draft_lens[slot].fill_(0)


class BlockTables:
    """Which block holds which tokens of a slot, for one pool: [slots, blocks a row], int32.

    Changes are kept on the host until `flush` brings them over, all in one copy: before the launch that reads them.
    """

    def __init__(
        self, slots: int, capacity: int, block_size: int, device: torch.device, first: int | None = None
    ) -> None:
        """first: position of a slot's first row, where slots may begin late; None: they never do."""
        self.block_size = block_size
        self.first = None if first is None else torch.full((slots,), first, dtype=torch.int64, device=device)
        self.width = -(-capacity // block_size)
        self.data = torch.zeros(slots, self.width, dtype=torch.int32, device=device)
        self._rows: list[list[int]] = [[] for _ in range(slots)]  # what `data` holds once it is flushed
        self._flat = self.data.view(-1)
        self._here = self._flat.numpy() if self.data.device.type == "cpu" else None  # the same memory
        self._changed: dict[int, int] = {}  # index in `_flat` -> block

    def write(self, slot: int, blocks: Sequence[int]) -> None:
        """Set the row of `slot`; entries past its blocks point at the null block."""
        row, first = self._rows[slot], slot * self.width
        same = 0
        if len(blocks) < len(row) or list(blocks[: len(row)]) != row:
            self._changed.update((first + i, 0) for i in range(len(row)))
        else:
            same = len(row)
        self._changed.update((first + i, blocks[i]) for i in range(same, len(blocks)))
        self._rows[slot] = list(blocks)

    def extend(self, slot: int, blocks: Sequence[int]) -> None:
        """More blocks behind those of `slot`."""
        row = self._rows[slot]
        self._changed.update(enumerate(blocks, slot * self.width + len(row)))
        row += blocks

    def begin(self, slot: int, position: int) -> None:
        """What lies before `position` of a slot holds nothing."""
        if self.first is not None:
            self.first[slot].fill_(position)  # an assignment would wait for the device

    def begin_at(self, slots: Sequence[int], lengths: Tensor) -> None:
        """What these slots have confirmed up to now, lengths [S] on the device, holds nothing."""
        if self.first is not None and slots:
            index = host_tensor(slots, self.first.device)
            self.first.index_copy_(0, index, lengths[index])

    def flush(self) -> None:
        """Bring what has changed to the device, without waiting for it."""
        if self._changed and self._here is not None:
            self._here[list(self._changed)] = list(self._changed.values())
            self._changed.clear()
        elif self._changed:
            changed = host_tensor([*self._changed, *self._changed.values()], self.data.device)
            index, blocks = changed.view(2, -1).unbind(0)
            self._flat.index_copy_(0, index, blocks.to(torch.int32))
            self._changed.clear()


def host_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Host integers on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class Staging:
    """Pinned host memory that copies to a tensor are made from, used again once they have been made.

    There are two buffers, and as many as copies were ever under way at once. On a CPU the tensor itself is written.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        for _ in range(2 if target.is_cuda else 0):  # now: to get pinned memory may wait for the device
            self._more()

    def send(self, parts: Sequence[Any]) -> None:
        """Fill the target with these parts, one after the other, without waiting for the device."""
        if not self.target.is_cuda:
            np.concatenate(parts, out=self.target.numpy(), casting="unsafe")  # an empty list counts as floats
            return
        buffer, sent = next((each for each in self._buffers if each[1].query()), None) or self._more()
        np.concatenate(parts, out=buffer.numpy(), casting="unsafe")
        self.target.copy_(buffer, non_blocking=True)
        sent.record(stream_of(self.target.device))

    def _more(self) -> tuple[Tensor, torch.cuda.Event]:
        self._buffers.append((torch.empty_like(self.target, device="cpu", pin_memory=True), torch.cuda.Event()))
        return self._buffers[-1]


def verify_layout(spans: Sequence[VerifySpan], slots: Slots, tables: BlockTables) -> PassLayout:
    """Rows of a verifier pass: chunks start where the host says, decode spans at the last confirmed token."""
    compiled = _compiled(spans, slots)
    if compiled is not None:
        return _decode_layout(compiled, spans, slots, tables)
    index = host_tensor([span.slot for span in spans], slots.device)
    given = host_tensor([-1 if span.start is None else span.start for span in spans], slots.device)
    starts = torch.where(given < 0, slots.lengths[index] - 1, given)
    return PassLayout.build(
        [span.rows for span in spans], [span.context for span in spans], index, starts, tables.data, tables.block_size,
        tables.first,
    )  # fmt: skip


def verify_ids(spans: Sequence[VerifySpan], layout: PassLayout, slots: Slots) -> Tensor:
    """Token ids of a verifier pass [N]: confirmed tokens, and drafts in the rows after a span's first."""
    compiled = _compiled(spans, slots)
    if compiled is not None:
        ids = torch.empty_like(layout.positions)
        tokens, drafts = slots.tokens, slots.drafts
        if compiled.vpd_ids(
            layout.row_span.data_ptr(), layout.slots.data_ptr(), layout.starts.data_ptr(), layout.positions.data_ptr(),
            tokens.data_ptr(), tokens.stride(0), drafts.data_ptr(), drafts.stride(0), len(ids), ids.data_ptr(),
        ):  # fmt: skip
            raise IndexError("a row of the pass lies behind the tokens and drafts of its slot")
        return ids
    row_slots = layout.slots[layout.row_span]
    ids = slots.tokens[row_slots, layout.positions]
    if not any(span.drafts for span in spans):
        return ids
    depth = host_tensor([j if span.drafts else 0 for span in spans for j in range(span.rows)], slots.device)
    return torch.where(depth > 0, slots.drafts[row_slots, (depth - 1).clamp_min(0)], ids)


def _compiled(spans: Sequence[VerifySpan], slots: Slots) -> ctypes.CDLL | None:
    """The kernels in C, where they lay out a pass: on a CPU, of decode spans alone."""
    decodes = slots.device.type == "cpu" and all(span.start is None for span in spans)
    return build.loaded() if decodes else None


class _Shape(NamedTuple):
    """What layouts of decode spans with the same slots and rows have in common."""

    slots: Tensor  # [R]
    offsets: Tensor  # [R+1]
    row_span: Tensor  # [N]
    within: Tensor  # [N], offset in the span


@lru_cache(SHAPES_KEPT)
def _decode_shape(spans: tuple[tuple[int, int], ...]) -> _Shape:
    """spans: slot and rows of each."""
    rows = [count for _, count in spans]
    row_span = [span for span, count in enumerate(rows) for _ in range(count)]
    within = [offset for count in rows for offset in range(count)]
    return _Shape(
        *map(torch.tensor, ([slot for slot, _ in spans], list(accumulate(rows, initial=0)), row_span, within))
    )


def _decode_layout(compiled: ctypes.CDLL, spans: Sequence[VerifySpan], slots: Slots, tables: BlockTables) -> PassLayout:
    """`verify_layout` in one call, for between two passes caches are cold: each of torch's takes tens of us."""
    shape = _decode_shape(tuple((span.slot, span.rows) for span in spans))
    rows = len(shape.row_span)
    starts, positions, write_index = torch.empty(len(spans) + 2 * rows, dtype=torch.int64).split(
        [len(spans), rows, rows]
    )
    table, first = tables.data, tables.first
    if compiled.vpd_decode_positions(
        shape.row_span.data_ptr(), shape.within.data_ptr(), shape.slots.data_ptr(), len(table),
        slots.lengths.data_ptr(), len(spans), table.shape[1], table.data_ptr(), table.stride(0), tables.block_size,
        None if first is None else first.data_ptr(), rows, starts.data_ptr(), positions.data_ptr(),
        write_index.data_ptr(),
    ):  # fmt: skip
        raise IndexError("a row of the pass lies outside its slot's block table")
    contexts = tuple(span.context for span in spans)
    return PassLayout(
        span_rows=tuple(span.rows for span in spans),
        contexts=contexts,
        max_context=max(contexts, default=0),
        row_offsets=shape.offsets,
        row_span=shape.row_span,
        slots=shape.slots,
        starts=starts,
        positions=positions,
        write_index=write_index,
        block_table=table,
        block_size=tables.block_size,
        first=first,
    )


def catch_up_layout(spans: Sequence[DraftSpan], slots: Slots, tables: BlockTables) -> PassLayout:
    """Rows of a draft model's first pass: from where the host says, or from `lag` tokens before the end on."""
    index = host_tensor([span.slot for span in spans], slots.device)
    starts = slots.lengths[index] - host_tensor([span.lag for span in spans], slots.device)
    if any(span.start is not None for span in spans):
        given = host_tensor([-1 if span.start is None else span.start for span in spans], slots.device)
        starts = torch.where(given < 0, starts, given)
    return PassLayout.build(
        [span.rows for span in spans],
        [span.context for span in spans],
        index,
        starts,
        tables.data,
        tables.block_size,
        tables.first,
    )


def draft_layouts(spans: Sequence[DraftSpan], index: Tensor, slots: Slots, tables: BlockTables) -> list[PassLayout]:
    """The passes of a draft loop after its first, made at once: pass d reads the draft token at depth d.

    One row for each span that has more than d + 1 drafts, in the position after the confirmed tokens and earlier
    drafts. Spans, and their slots in `index`, come longest draft first.
    """
    size, passes = tables.block_size, spans[0].drafts - 1
    starts = slots.lengths[index] + torch.arange(passes, device=slots.device)[:, None]  # [passes, R]
    block = starts // size
    write_index = torch.add(starts, tables.data[index, block] - block, alpha=size)
    offsets = torch.arange(len(spans) + 1, device=slots.device)
    layouts = []
    for depth, (at, written) in enumerate(zip(starts.unbind(0), write_index.unbind(0), strict=True)):
        count = sum(span.drafts > depth + 1 for span in spans)
        contexts = tuple(span.context for span in spans[:count])
        layouts.append(
            PassLayout(
                span_rows=(1,) * count,
                contexts=contexts,
                max_context=max(contexts),
                row_offsets=offsets[: count + 1],
                row_span=offsets[:count],
                slots=index[:count],
                starts=at[:count],
                positions=at[:count],
                write_index=written[:count],
                block_table=tables.data,
                block_size=size,
                first=tables.first,
            )
        )
    return layouts
