"""What is judged, and what it comes to: spans of a pass, what the steps of a verdict look at, verdicts. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from verifypd.sampling.logprobs import Logprobs
from verifypd.sampling.rows import Rows
from verifypd.sampling.state import Needs, SamplingState, on_device

SPANS_KEPT = 64  # on a CPU: a single request comes with a few lengths of drafts, and making its spans takes 0.1 ms


class Finish(IntEnum):
    """Why a request ends with a verdict."""

    RUNNING = 0
    STOP = 1  # EOS or a stop id
    LENGTH = 2
    ERROR = 3  # no token has any probability


@dataclass(frozen=True, slots=True)
class Spans:
    """R spans of a pass. Logits lie span after span, depth + 1 rows each, N in all. Make it with `Spans.of`."""

    slot_ids: tuple[int, ...]
    depth: tuple[int, ...]  # draft tokens of each span, an upper bound of what the device holds
    slots: Tensor  # [R] int64
    drafted: Tensor  # [R] int64, depth on the device
    row_span: Tensor  # [N] int64
    row_depth: Tensor  # [N] int64, place of the row in its span
    first_row: Tensor  # [R] int64

    @classmethod
    def of(cls, slot_ids: Sequence[int], depth: Sequence[int], device: torch.device | str) -> Spans:
        """One host-to-device copy, asynchronous; none where the host is the device and such spans were there before."""
        device, key = torch.device(device), (tuple(slot_ids), tuple(depth))
        return _kept(*key) if device.type == "cpu" else cls._made(*key, device)

    @classmethod
    def _made(cls, slot_ids: tuple[int, ...], depth: tuple[int, ...], device: torch.device) -> Spans:
        spans = len(slot_ids)
        first: list[int] = []
        row_span: list[int] = []
        row_depth: list[int] = []
        for span, drafts in enumerate(depth):
            first.append(len(row_span))
            row_span += [span] * (drafts + 1)
            row_depth += range(drafts + 1)
        packed = on_device([*slot_ids, *depth, *first, *row_span, *row_depth], device)
        rows = len(row_span)
        slots, drafted, first_row, of_row, place = torch.split(packed, [spans, spans, spans, rows, rows])
        return cls(slot_ids, depth, slots, drafted, of_row, place, first_row)

    @property
    def widest(self) -> int:
        """Most drafts of any span."""
        return max(self.depth, default=0)

    def part(self, some: Sequence[int]) -> tuple[Spans, Tensor]:
        """Some of the spans, and the rows that are theirs."""
        first = [0, *accumulate(drafts + 1 for drafts in self.depth)]
        rows = [row for r in some for row in range(first[r], first[r + 1])]
        device = self.slots.device
        part = Spans.of([self.slot_ids[r] for r in some], [self.depth[r] for r in some], device)
        return part, on_device(rows, device)


@lru_cache(SPANS_KEPT)
def _kept(slot_ids: tuple[int, ...], depth: tuple[int, ...]) -> Spans:
    return Spans._made(slot_ids, depth, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What R spans came to; device tensors. W = most drafts of any span + 1."""

    tokens: Tensor  # [R, W] int64; the first `counts` of a row are emitted
    counts: Tensor  # [R] int64, 0 for a dead slot or an error
    accepted: Tensor  # [R] int64, draft tokens that stand and are emitted
    drafted: Tensor  # [R] int64, draft tokens that were judged
    finish: Tensor  # [R] int64, a Finish
    stop_token: Tensor  # [R] int64, the id that ended it, or -1
    logprobs: Logprobs | None = None  # [R, W]; rows of requests that asked for none are 0
    whole: Tensor | None = None  # what `packed` gives, where it was made so; its tokens may have more columns

    def packed(self) -> Tensor:
        """int64 [R, W + 5] for one copy to the host: counts, accepted, drafted, finish, stop_token, tokens."""
        if self.whole is not None:
            return self.whole
        columns = (self.counts, self.accepted, self.drafted, self.finish, self.stop_token)
        return torch.cat([torch.stack(columns, dim=1), self.tokens], dim=1)

    @classmethod
    def unpacked(cls, packed: Tensor, width: int) -> Verdicts:
        """From what `packed` gives; its tokens may have more columns than `width`."""
        counts, accepted, drafted, finish, stop_token = packed[:, :5].unbind(1)
        return cls(packed[:, 5 : 5 + width], counts, accepted, drafted, finish, stop_token, whole=packed)


class Outcome(NamedTuple):
    """What the rows of each span come to; [R]."""

    accepted: Tensor  # int64, drafts that stand
    following: Tensor  # int64, the token after them
    hopeless: Tensor  # bool, whether there is none to take


@dataclass(frozen=True, eq=False)
class Case:
    """Everything the steps of a verdict look at. What not every implementation reads is gathered when it is first
    asked for, which must be before the outcome is written."""

    logits: Tensor  # [N, >= vocab] raw
    x: Tensor  # [N, vocab] transformed; raw where every span is synthetic
    spans: Spans
    rows: Rows
    needs: Needs  # of the N rows
    span_needs: Needs  # of the R spans
    state: SamplingState
    lengths: Tensor  # [S]
    drafts: Tensor  # [S, Lmax]
    draft_lens: Tensor  # [S]
    draft_q: Tensor | None  # None: no span has one
    drawn: Tensor | None  # [R] bool, the span's drafts were drawn from draft_q; None: all were

    @cached_property
    def length(self) -> Tensor:
        """[R] confirmed tokens."""
        return self.lengths[self.spans.slots]

    @cached_property
    def drafted(self) -> Tensor:
        """[R] drafts on the device."""
        return torch.minimum(self.draft_lens[self.spans.slots], self.spans.drafted)

    @cached_property
    def row_draft(self) -> Tensor:
        """[N] the draft that the row decides about; meaningless after the last."""
        if not self.spans.widest:
            return self.rows.slots  # not looked at
        place = self.rows.depths.clamp_max(self.drafts.shape[1] - 1)
        return self.drafts[self.rows.slots, place].clamp_(0, self.state.vocab - 1)
