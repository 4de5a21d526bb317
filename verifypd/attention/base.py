"""What every attention backend sees of one model pass.

Knows rows, spans and blocks; nothing of models, requests or who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from verifypd.kernels import build
from verifypd.kv.pool import LayerCache

Rotary = tuple[Tensor, Tensor]  # cos and sin, [T, R / 2] float32, for the first R dimensions of a head


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PassLayout:
    """Where the rows of one model pass sit. Shapes are host-known, positions live on the device.

    A span is a run of consecutive positions of one slot: a prefill chunk, a plain decode token or a verify span. No row
    of a pass writes what lies before a span's start, neither of its own slot nor in a block that slots share.
    """

    span_rows: tuple[int, ...]  # R host ints, rows of each span
    contexts: tuple[int, ...]  # R host ints, upper bound on the context of each span, tokens (its own rows included)
    max_context: int  # host upper bound on the context of any span, tokens
    row_offsets: Tensor  # [R+1] int64, first row of each span
    row_span: Tensor  # [N] int64, span of each row
    slots: Tensor  # [R] int64
    starts: Tensor  # [R] int64, absolute position of a span's first row; may be negative (those rows are void)
    positions: Tensor  # [N] int64, = max(start + j, 0)
    write_index: Tensor  # [N] int64, block * block_size + offset in the pool
    block_table: Tensor  # [S, max_blocks] int32, whole table, indexed by slot
    block_size: int
    first: Tensor | None = None  # [S] int64, by slot: positions before it hold nothing; None: there are none

    @classmethod
    def build(
        cls,
        span_rows: Sequence[int],
        contexts: Sequence[int],
        slots: Tensor,
        starts: Tensor,
        block_table: Tensor,
        block_size: int,
        first: Tensor | None = None,
    ) -> PassLayout:
        """The layout of spans whose slots and starts live on the device; shapes come from host ints, nothing waits.

        Void rows (before position 0, or before what their slot holds) write to the null block, block 0.
        """
        device = starts.device
        if len(span_rows) == 1:  # between two passes caches are cold, and each operation takes tens of us on a CPU
            offsets = torch.tensor((0, span_rows[0]))
            row_span, within = torch.zeros(span_rows[0], dtype=torch.int64), torch.arange(span_rows[0])
        else:
            counts = torch.tensor(span_rows, dtype=torch.int64)
            offsets = torch.zeros(len(span_rows) + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=offsets[1:])
            row_span = torch.repeat_interleave(torch.arange(len(span_rows)), counts)
            within = torch.arange(len(row_span)) - offsets[row_span]
        if device.type != "cpu":
            pinned = (t.pin_memory() if device.type == "cuda" else t for t in (offsets, row_span, within))
            offsets, row_span, within = (t.to(device, non_blocking=True) for t in pinned)
        return cls.from_rows(
            span_rows, contexts, offsets, row_span, within, slots=slots, starts=starts, block_table=block_table,
            block_size=block_size, first=first,
        )  # fmt: skip

    @classmethod
    def from_rows(
        cls,
        span_rows: Sequence[int],
        contexts: Sequence[int],
        row_offsets: Tensor,
        row_span: Tensor,
        within: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        block_table: Tensor,
        block_size: int,
        first: Tensor | None = None,
    ) -> PassLayout:
        """The same where the rows' indices are on the device already; within [N] int64 is the offset in the span.

        `span_rows` may then be bounds, for backends that read `row_offsets` ("triton").
        """
        row_offsets, row_span, within, slots, starts = (
            each.contiguous() for each in (row_offsets, row_span, within, slots, starts)
        )
        positions, write_index = _positions(row_span, within, slots, starts, block_table, block_size, first)
        return cls(
            span_rows=tuple(span_rows),
            contexts=tuple(contexts),
            max_context=max(contexts, default=0),
            row_offsets=row_offsets,
            row_span=row_span,
            slots=slots,
            starts=starts,
            positions=positions,
            write_index=write_index,
            block_table=block_table,
            block_size=block_size,
            first=first,
        )

    @property
    def rows(self) -> int:
        """N, rows of the pass."""
        return int(self.row_span.shape[0])

    @property
    def spans(self) -> int:
        """R, spans of the pass."""
        return len(self.span_rows)


def _positions(
    row_span: Tensor,
    within: Tensor,
    slots: Tensor,
    starts: Tensor,
    block_table: Tensor,
    block_size: int,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`positions` and `write_index` of each row. In one call on a CPU: ten of torch's take 0.2 ms there between
    two passes, which leave the caches cold."""
    compiled = build.loaded() if row_span.device.type == "cpu" else None
    if compiled is None:
        raw, row_slots = starts[row_span] + within, slots[row_span]
        positions = raw.clamp_min(0)
        index = positions // block_size
        write_index = torch.add(positions, block_table[row_slots, index] - index, alpha=block_size)
        return positions, write_index.masked_fill_(raw < (0 if first is None else first[row_slots]), 0)
    positions, write_index = torch.empty_like(row_span), torch.empty_like(row_span)
    beyond = compiled.vpd_positions(
        row_span.data_ptr(), within.data_ptr(), slots.data_ptr(), len(block_table), starts.data_ptr(),
        block_table.shape[1], block_table.data_ptr(), block_table.stride(0), block_size,
        None if first is None else first.data_ptr(), len(row_span), positions.data_ptr(), write_index.data_ptr(),
    )  # fmt: skip
    if beyond:
        raise IndexError("a row of the pass lies outside its slot's block table")
    return positions, write_index


class Reader(Protocol):
    """Somebody who reads what a pass computes on its way."""

    layers: tuple[int, ...]  # behind which it reads the residual stream, in order; -1: before the first, the embedding
    output: bool  # whether it reads the hidden states behind the final norm, too

    def keep(self, streams: Sequence[Tensor], layout: PassLayout) -> None:
        """Those streams [N, H] of a pass, the output last."""
        ...


class WrittenAttention(Protocol):
    """Attention of queries that are rotated, over keys and values that are all in the cache."""

    def attend_written(
        self,
        q: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: Any,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """As AttentionBackend.attend, without its keys and values."""
        ...


class AttentionBackend(Protocol):
    """Attention of ragged spans over a paged cache."""

    name: str
    rotates: bool  # whether `attend` rotates queries and keys itself, by the tables in `rotary`

    @property
    def written(self) -> WrittenAttention | None:
        """Where a kernel of the layer may rotate and write in its place; None: it does so itself."""
        ...

    def prepare(self, layout: PassLayout) -> Any:
        """What all layers of one pass share; called once per pass."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: Any,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]; q and k already rotated, unless there is a `rotary`.

        Writes k and v at write_index, then attends each row to the positions <= its own (> its own - window, and none
        before the first that its slot holds).
        Void rows come out finite and mean nothing.
        """
        ...
