"""CUDA graphs of padded passes, by key. Knows slots and runners; nothing of scheduling.

Eager is the same call: without CUDA the work runs as it would be captured. Captured work runs twice when its key first
comes (once to warm it up), so it must be fit to: all it writes is where the pass itself says.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from verifypd.batch import DraftSpan, VerifySpan
from verifypd.errors import ConfigError
from verifypd.kv.budget import show
from verifypd.runtime.inputs import Slots
from verifypd.runtime.passes import CHUNKS, PassInputs, PassKey, bucket, pass_key, reachable
from verifypd.runtime.runner import ModelRunner
from verifypd.sampling.sampler import widen
from verifypd.sampling.state import SamplingState
from verifypd.sampling.transforms import clean

log = logging.getLogger(__name__)

CAUGHT_UP = 2  # rows of a span in a draft loop: after a draft, its cache lacks that many tokens at most

Result = TypeVar("Result")


class Graphs:
    """Captured work by key."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: set[Hashable] = set()  # run so far
        self.bytes = 0  # of device memory that captures have taken
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """The result of `work`; where it is a replay, in tensors that the next replay of the key overwrites."""
        self.keys.add(key)
        if self.device.type != "cuda":
            return work()
        if key not in self._captured:
            self._captured[key] = self._capture(work)
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        before = torch.cuda.mem_get_info(self.device)[0]
        own = torch.cuda.current_stream(self.device)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(own)
        with torch.cuda.stream(aside):
            work()
        own.wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self.bytes += before - torch.cuda.mem_get_info(self.device)[0]
        return graph, result


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is collected within: graphs of an engine that is gone, freed during a capture, would break it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class ModelGraphs:
    """Padded passes of one model: verify passes, catching up, and whole draft loops."""

    def __init__(self, graphs: Graphs, runner: ModelRunner, slots: Slots, widest: int, most_rows: int) -> None:
        if runner.attention.name != "triton":
            raise ConfigError("--graphs needs --attention triton: other backends read the shape of a pass on the host")
        self.graphs = graphs
        self.runner = runner
        self.slots = slots
        self.widest = widest  # most rows of a decode span
        self.most_rows = most_rows  # of a pass with prompt chunks
        self._inputs: dict[Hashable, PassInputs] = {}
        self._prepared: dict[Hashable, Any] = {}
        self._hidden: Tensor | None = None  # [rows, H], where verify passes leave their states

    def takes(self, spans: Sequence[VerifySpan]) -> bool:
        """Whether a verify pass has a bucket."""
        chunks = [span for span in spans if span.start is not None]
        short = all(span.rows <= self.widest for span in spans if span.start is None)
        return short and (not chunks or self._fits(len(chunks), sum(span.rows for span in spans)))

    def _fits(self, chunks: int, rows: int) -> bool:
        return chunks <= CHUNKS and rows <= self.most_rows

    @torch.inference_mode()
    def verify(self, spans: Sequence[VerifySpan]) -> Tensor:
        """Hidden states [rows of the spans, H]; chunks come last."""
        short = [span for span in spans if span.start is None]
        chunks = spans[len(short) :]
        if any(span.start is None for span in chunks):
            raise ValueError("prompt chunks come after decode spans")
        key = pass_key([span.rows for span in short], self.widest, [span.rows for span in chunks])
        inputs = self._of("verify", key)
        starts = [span.start for span in chunks if span.start is not None]
        rows = [span.rows for span in chunks]
        slots = [span.slot for span in spans]
        inputs.fill([span.rows for span in short], slots, [1] * len(spans), True, rows, starts)
        return self._verify(inputs)[: sum(span.rows for span in spans)]

    def takes_drafts(self, spans: Sequence[DraftSpan], sampling: SamplingState) -> bool:
        """Whether draft loops have a bucket: their tokens are drawn with nothing but cuts."""
        drafting = [span.slot for span in spans if span.drafts]
        return sampling.kernels == "triton" and sampling.needs(drafting).plain

    @torch.inference_mode()
    def catch_up(self, spans: Sequence[DraftSpan]) -> list[DraftSpan]:
        """Read confirmed tokens and draft nothing, a few spans a pass. Returns those that are too long for a bucket."""
        left: list[DraftSpan] = []
        for first in range(0, len(spans), CHUNKS):
            some = spans[first : first + CHUNKS]
            rows = [span.rows for span in some]
            if not self._fits(len(some), sum(rows)):
                left += some
                continue
            inputs = self._of("catch up", pass_key([], self.widest, rows))
            inputs.fill([], [span.slot for span in some], [span.lag for span in some], False, rows)
            self._catch_up(inputs)
        return left

    @torch.inference_mode()
    def draft(
        self,
        spans: Sequence[DraftSpan],
        sampling: SamplingState,
        draft_q: Tensor,
        vocab_map: Tensor | None,
        temperatures: Tensor | None,
    ) -> None:
        """Draft as many tokens as the longest span asks for; what others have beyond theirs is unread.

        Every span reads its last two tokens: what its cache lacks, or has already and then gets again.
        """
        count, longest = len(spans), max(span.drafts for span in spans)
        inputs = self._of("draft", _loop_key(count))
        inputs.fill([CAUGHT_UP] * count, [span.slot for span in spans], [CAUGHT_UP] * count, False)
        self._draft(inputs, longest, sampling, draft_q, vocab_map, temperatures)

    # -- capture before anybody waits for it --------------------------------------------------------------------------

    def verify_work(self, spans: int, chunk_rows: int) -> list[Callable[[], object]]:
        """One call for every verify pass there may be, on void rows."""
        return [partial(self._verify_void, key) for key in reachable(spans, self.widest, chunk_rows)]

    def draft_work(self, spans: int, chunk_rows: int, most: int, *drawing: Any) -> list[Callable[[], object]]:
        """The same for catching up and for draft loops of up to `most` tokens; `drawing`: what `_draft` takes."""
        counts = sorted({bucket(n) for n in range(1, spans + 1)}, reverse=True)
        loops = [(_loop_key(count), length) for count in counts for length in range(most, 0, -1)]
        return [
            *(partial(self._catch_up_void, key) for key in reachable(0, self.widest, chunk_rows)),
            *(partial(self._draft_void, key, length, *drawing) for key, length in loops),
        ]

    def _void(self, kind: str, key: PassKey) -> PassInputs:
        inputs = self._of(kind, key)
        inputs.fill([], [], [], False)
        return inputs

    @torch.inference_mode()
    def _verify_void(self, key: PassKey) -> None:
        self._verify(self._void("verify", key))

    @torch.inference_mode()
    def _catch_up_void(self, key: PassKey) -> None:
        self._catch_up(self._void("catch up", key))

    @torch.inference_mode()
    def _draft_void(self, key: PassKey, longest: int, *drawing: Any) -> None:
        self._draft(self._void("draft", key), longest, *drawing)

    # -- the work -----------------------------------------------------------------------------------------------------

    def _of(self, kind: str, key: PassKey) -> PassInputs:
        """The inputs of a key, and what attention prepares for it outside the capture."""
        inputs = self._inputs.get((kind, key))
        if inputs is None:
            inputs = self._inputs[kind, key] = PassInputs(key, self.slots.device)
            self._prepared[kind, key] = self.runner.attention.prepare(inputs.layout(*self._where))
        return inputs

    @property
    def _where(self) -> tuple[Tensor, Tensor, int, int]:
        tables = self.runner.tables
        return self.slots.lengths, tables.data, tables.block_size, self.slots.capacity

    def _verify(self, inputs: PassInputs) -> Tensor:
        key = inputs.key
        if self._hidden is None or self._hidden.shape[0] < key.rows:
            model = self.runner.model
            shape = (max(key.rows, self.most_rows), model.config.hidden_size)
            self._hidden = torch.empty(shape, dtype=model.activation_dtype, device=self.slots.device)
        out = self._hidden[: key.rows]

        def work() -> Tensor:
            slots, layout = self.slots, inputs.layout(*self._where)
            row_slots = layout.slots[layout.row_span]
            drafted = slots.drafts[row_slots, (inputs.depth - 1).clamp(0, slots.drafts.shape[1] - 1)]
            ids = torch.where(inputs.depth > 0, drafted, slots.tokens[row_slots, layout.positions])
            return out.copy_(self.runner.forward(ids, layout, self._prepared["verify", key]))

        return self.graphs.run((id(self), "verify", key), work)

    def _catch_up(self, inputs: PassInputs) -> None:
        def work() -> None:
            layout = inputs.layout(*self._where)
            ids = self.slots.tokens[layout.slots[layout.row_span], layout.positions]
            self.runner.forward(ids, layout, self._prepared["catch up", inputs.key])

        self.graphs.run((id(self), "catch up", inputs.key), work)

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

        def work() -> None:
            slots, layout = self.slots, inputs.layout(*self._where)
            ids = slots.tokens[layout.slots[layout.row_span], layout.positions]
            hidden = self.runner.forward(ids, layout, self._prepared["draft", inputs.key])[CAUGHT_UP - 1 :: CAUGHT_UP]
            scale = None if temperatures is None else temperatures[inputs.slots]
            for depth in range(longest):
                if depth:
                    layout = inputs.step(depth, *self._where)
                    hidden = self.runner.forward(slots.drafts[inputs.slots, depth - 1], layout)
                x = clean(widen(self.runner.logits(hidden), vocab_map, sampling.vocab), sampling.vocab)
                cut_(x, inputs.own, sampling, scale)
                propose_(x, inputs.own, depth, sampling, slots.lengths, slots.drafts, draft_q)

        self.graphs.run((id(self), "draft", inputs.key, longest), work)


def _loop_key(spans: int) -> PassKey:
    return PassKey(bucket(spans), CAUGHT_UP * bucket(spans), CAUGHT_UP)


def capture(graphs: Graphs, work: Sequence[Callable[[], object]]) -> None:
    """Run each piece once, so that it is captured; the largest come first and lend their memory to the others."""
    for each in tqdm(work, desc="capturing graphs", disable=None):
        each()
    log.info("captured %d graphs: %s", len(graphs), show(graphs.bytes))
