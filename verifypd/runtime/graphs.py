"""Passes of fixed shape: buckets, padding, inputs that stay in place, and CUDA graphs of them by key.

A pass is padded to a bucket of spans and rows, ragged inside. Padding spans are *void*: they begin before the text
does, so their rows write to the null block and nobody reads what comes of them; they need no slot. Eager is the same
call: without CUDA the work runs as it would be captured. Knows slots and runners; nothing of scheduling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.batch import DraftSpan, VerifySpan
from verifypd.errors import ConfigError
from verifypd.runtime.inputs import Slots
from verifypd.runtime.runner import ModelRunner
from verifypd.sampling.sampler import widen
from verifypd.sampling.state import SamplingState
from verifypd.sampling.transforms import clean

log = logging.getLogger(__name__)

VOID = 1 << 30  # tokens before its slot's end that a void span begins: before any text

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PassKey:
    """The shape of a padded pass. `widest` is the most rows a span may have."""

    spans: int
    rows: int
    widest: int


def bucket(n: int) -> int:
    """The smallest bucket that holds n: powers of two, and from 8 on the middle between two of them."""
    power = 1 << max(n - 1, 0).bit_length()
    return power // 4 * 3 if power >= 16 and n <= power // 4 * 3 else power


def pass_key(span_rows: Sequence[int], widest: int) -> PassKey:
    """The bucket of a pass; with spans enough to hold the rows that are missing."""
    rows = bucket(sum(span_rows))
    missing = rows - sum(span_rows)
    return PassKey(bucket(len(span_rows) + -(-missing // widest)), rows, widest)


def padding(span_rows: Sequence[int], key: PassKey) -> list[int]:
    """Rows of the void spans that fill a pass up to its key; some have none."""
    missing, rows = key.rows - sum(span_rows), []
    for _ in range(key.spans - len(span_rows)):
        rows.append(min(missing, key.widest))
        missing -= rows[-1]
    if missing:
        raise ValueError(f"{list(span_rows)} does not fit {key}")
    return rows


class PassInputs:
    """What a captured pass reads, in one int64 tensor that one copy fills."""

    def __init__(self, key: PassKey, device: torch.device) -> None:
        self.key = key
        spans, rows = key.spans, key.rows
        sizes = [spans, spans, spans, spans + 1, rows, rows, rows]
        self.data = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.slots, self.own, self.back, self.offsets, self.row_span, self.within, self.depth = self.data.split(sizes)

    def fill(self, span_rows: Sequence[int], slots: Sequence[int], back: Sequence[int], drafted: bool) -> None:
        """Spans that begin `back` tokens before the end of their slots; drafted: rows after the first are drafts."""
        void = padding(span_rows, self.key)
        rows = [*span_rows, *void]
        offsets = [0]
        row_span: list[int] = []
        within: list[int] = []
        for span, count in enumerate(rows):
            offsets.append(offsets[-1] + count)
            row_span += [span] * count
            within += range(count)
        none = [0] * len(void)
        values = [*slots, *none, *slots, *[-1] * len(void), *back, *[VOID] * len(void), *offsets, *row_span, *within]
        values += within if drafted else [0] * len(within)
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self.data.is_cuda)
        self.data.copy_(host, non_blocking=True)

    def layout(self, lengths: Tensor, table: Tensor, block_size: int, context: int) -> PassLayout:
        """The pass from `back` tokens before the end of each slot on."""
        key = self.key
        starts = lengths[self.slots] - self.back
        return PassLayout.placed(
            (key.widest,) * key.spans, (context,) * key.spans, self.offsets, self.row_span, self.within,
            slots=self.slots, starts=starts, block_table=table, block_size=block_size,
        )  # fmt: skip

    def step(self, depth: int, lengths: Tensor, table: Tensor, block_size: int, context: int) -> PassLayout:
        """One row a span: the token drafted at `depth` − 1."""
        spans, device = self.key.spans, self.data.device
        starts = torch.where(self.own < 0, -1, lengths[self.slots] - 1 + depth)
        each = torch.arange(spans + 1, device=device)
        return PassLayout.placed(
            (1,) * spans, (context,) * spans, each, each[:-1], torch.zeros_like(each[:-1]),
            slots=self.slots, starts=starts, block_table=table, block_size=block_size,
        )  # fmt: skip


class Graphs:
    """Captured work by key. What is captured must be fit to run twice: it is run once before, to warm it up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: set[Hashable] = set()  # run so far
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """The result of `work`; where it is a replay, in tensors that the next replay of the key overwrites."""
        self.keys.add(key)
        if self.device.type != "cuda":
            return work()
        if key not in self._captured:
            self._captured[key] = self._capture(key, work)
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(self, key: Hashable, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        before = torch.cuda.memory_reserved(self.device)
        own = torch.cuda.current_stream(self.device)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(own)
        with torch.cuda.stream(aside):
            work()
        own.wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        grown = (torch.cuda.memory_reserved(self.device) - before) / 2**20
        log.info("captured %s, graph %d: %.0f MiB more", key, len(self._captured) + 1, grown)
        return graph, result


class ModelGraphs:
    """Padded passes of one model: verify passes, and whole draft loops."""

    def __init__(self, graphs: Graphs, runner: ModelRunner, slots: Slots, widest: int) -> None:
        if runner.attention.name != "triton":
            raise ConfigError("--graphs needs --attention triton: other backends read the shape of a pass on the host")
        self.graphs = graphs
        self.runner = runner
        self.slots = slots
        self.widest = widest
        self._inputs: dict[Hashable, PassInputs] = {}

    def takes(self, spans: Sequence[VerifySpan]) -> bool:
        """Whether a verify pass has a bucket: it carries no prompt chunk."""
        return all(span.start is None and span.rows <= self.widest for span in spans)

    @torch.inference_mode()
    def verify(self, spans: Sequence[VerifySpan]) -> Tensor:
        """Hidden states [rows of the spans, H]."""
        rows = [span.rows for span in spans]
        inputs = self._filled("verify", rows, [span.slot for span in spans], [1] * len(spans), drafted=True)
        hidden = self.graphs.run((id(self), "verify", inputs.key), lambda: self._verify(inputs))
        return hidden[: sum(rows)]

    def takes_drafts(self, spans: Sequence[DraftSpan], sampling: SamplingState) -> bool:
        """Whether a draft loop has a bucket: every span drafts, after few rows, with nothing but cuts."""
        if sampling.kernels != "triton" or not all(0 < s.rows <= self.widest and s.drafts for s in spans):
            return False
        return sampling.needs([span.slot for span in spans]).plain

    @torch.inference_mode()
    def draft(
        self,
        spans: Sequence[DraftSpan],
        sampling: SamplingState,
        draft_q: Tensor,
        vocab_map: Tensor | None,
        temperatures: Tensor | None,
    ) -> None:
        """Catch up and draft as many tokens as the longest span asks for; what others have beyond theirs is unread."""
        rows, lag = [span.rows for span in spans], [span.lag for span in spans]
        longest = max(span.drafts for span in spans)
        inputs = self._filled("draft", rows, [span.slot for span in spans], lag, drafted=False)
        self.graphs.run(
            (id(self), "draft", inputs.key, longest),
            lambda: self._draft(inputs, longest, sampling, draft_q, vocab_map, temperatures),
        )

    def _filled(
        self, kind: str, rows: Sequence[int], slots: Sequence[int], back: Sequence[int], drafted: bool
    ) -> PassInputs:
        key = pass_key(rows, self.widest)
        inputs = self._inputs.get((kind, key))
        if inputs is None:
            inputs = self._inputs[kind, key] = PassInputs(key, self.slots.device)
        inputs.fill(rows, slots, back, drafted)
        return inputs

    def _verify(self, inputs: PassInputs) -> Tensor:
        slots, tables = self.slots, self.runner.tables
        layout = inputs.layout(slots.lengths, tables.data, tables.block_size, slots.capacity)
        row_slots = layout.slots[layout.row_span]
        drafted = slots.drafts[row_slots, (inputs.depth - 1).clamp(0, slots.drafts.shape[1] - 1)]
        ids = torch.where(inputs.depth > 0, drafted, slots.tokens[row_slots, layout.positions])
        return self.runner.forward(ids, layout)

    def _draft(
        self,
        inputs: PassInputs,
        longest: int,
        sampling: SamplingState,
        draft_q: Tensor,
        vocab_map: Tensor | None,
        temperatures: Tensor | None,
    ) -> None:
        from verifypd.sampling.triton import cut_, propose_

        slots, tables = self.slots, self.runner.tables
        where = (slots.lengths, tables.data, tables.block_size, slots.capacity)
        layout = inputs.layout(*where)
        hidden = self.runner.forward(slots.tokens[layout.slots[layout.row_span], layout.positions], layout)
        hidden = hidden[(inputs.offsets[1:] - 1).clamp_min(0)]
        scale = None if temperatures is None else temperatures[inputs.slots]
        for depth in range(longest):
            if depth:
                layout = inputs.step(depth, *where)
                hidden = self.runner.forward(slots.drafts[inputs.slots, depth - 1], layout)
            x = clean(widen(self.runner.logits(hidden), vocab_map, sampling.vocab), sampling.vocab)
            cut_(x, inputs.own, sampling, scale)
            propose_(x, inputs.own, depth, sampling, slots.lengths, slots.drafts, draft_q)
