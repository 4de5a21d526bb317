"""Padded passes of fixed shape, which graphs replay: verify passes, catching up, whole draft loops. Knows slots and
runners; nothing of scheduling.

What pads is void (see `passes`). All that a pass reads beside the slots is written to its inputs before it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import Reader
from verifypd.batch import DraftSpan, VerifySpan
from verifypd.buckets import CHUNKS, bucket
from verifypd.errors import ConfigError
from verifypd.runtime.graphs import Graphs
from verifypd.runtime.inputs import Slots
from verifypd.runtime.passes import ModelInputs, PassInputs, PassKey, pass_key, reachable
from verifypd.runtime.runner import HeadRunner, ModelRunner
from verifypd.sampling.case import Spans
from verifypd.sampling.rows import DraftVocabulary, Rows, clean
from verifypd.sampling.sampler import widen
from verifypd.sampling.state import SamplingState
from verifypd.sampling.transforms import shape_

VERSIONS = 4  # of the tensors that such loops read: as they grow, what was captured for the oldest is dropped
SHORT_TEXT = 512  # tokens of the shortest text that loops with penalties look through


class PaddedPasses:
    """Passes of one model, by their keys."""

    def __init__(
        self, graphs: Graphs, runner: ModelRunner | HeadRunner, slots: Slots, widest: int, most_rows: int
    ) -> None:
        if runner.attention.name != "triton":
            raise ConfigError("--graphs needs --attention triton: other backends read the shape of a pass on the host")
        self.graphs = graphs
        self.slots = slots
        self.widest = widest  # most rows of a decode span
        self.most_rows = most_rows  # of a pass with prompt chunks
        self._attention, self.tables = runner.attention, runner.tables
        self._inputs: dict[Hashable, PassInputs] = {}
        self._prepared: dict[Hashable, Any] = {}

    def fits(self, chunks: int, rows: int) -> bool:
        """Whether a pass with prompt chunks has a bucket."""
        return chunks <= CHUNKS and rows <= self.most_rows

    def inputs(self, kind: str, key: PassKey) -> PassInputs:
        """The inputs of a key; made with them is what attention prepares for it outside the capture."""
        inputs = self._inputs.get((kind, key))
        if inputs is None:
            inputs = self._inputs[kind, key] = PassInputs(key, self.slots.device)
            self._prepared[kind, key] = self._attention.prepare(self.model_inputs(inputs).layout)
        return inputs

    def prepared(self, kind: str, inputs: PassInputs) -> Any:
        """What attention has prepared for these inputs."""
        return self._prepared[kind, inputs.key]

    def void(self, kind: str, key: PassKey) -> PassInputs:
        """The inputs of a key with nothing but void rows."""
        inputs = self.inputs(kind, key)
        inputs.fill([], [], [], False)
        return inputs

    def model_inputs(self, inputs: PassInputs, depth: int = 0) -> ModelInputs:
        """See `model_inputs.model_inputs`."""
        from verifypd.runtime.model_inputs import model_inputs

        return model_inputs(inputs, self.slots, self.tables, depth)


class VerifyPasses(PaddedPasses):
    """Passes of the verifier, and of whoever reads its states."""

    def __init__(
        self, graphs: Graphs, runner: ModelRunner, slots: Slots, widest: int, most_rows: int, reader: Reader | None
    ) -> None:
        super().__init__(graphs, runner, slots, widest, most_rows)
        self.runner = runner
        self.reader = reader  # gets the states of every pass: one graph does, whether they count or not
        self._hidden: Tensor | None = None  # [rows, H], where passes leave their states
        self._last: tuple[Sequence[VerifySpan], PassInputs] | None = None  # that ran

    def takes(self, spans: Sequence[VerifySpan]) -> bool:
        """Whether a pass has a bucket."""
        chunks = [span for span in spans if span.start is not None]
        short = all(span.rows <= self.widest for span in spans if span.start is None)
        return short and (not chunks or self.fits(len(chunks), sum(span.rows for span in spans)))

    @torch.inference_mode()
    def run(self, spans: Sequence[VerifySpan]) -> Tensor:
        """Hidden states [rows of the spans, H]; chunks come last."""
        short = [span for span in spans if span.start is None]
        chunks = spans[len(short) :]
        if any(span.start is None for span in chunks):
            raise ValueError("prompt chunks come after decode spans")
        key = pass_key([span.rows for span in short], self.widest, [span.rows for span in chunks])
        inputs = self.inputs("verify", key)
        starts = [span.start for span in chunks if span.start is not None]
        rows = [span.rows for span in chunks]
        slots = [span.slot for span in spans]
        inputs.fill([span.rows for span in short], slots, [1] * len(spans), True, rows, starts)
        self._last = None if chunks else (spans, inputs)
        return self._run(inputs)[: sum(span.rows for span in spans)]

    def judged(self, spans: Sequence[VerifySpan]) -> Spans | None:
        """The spans of the pass that ran last as a verdict reads them, from its inputs; None where it was another, or
        had chunks. They hold until such a pass is filled again, on the same stream."""
        if self._last is None or self._last[0] is not spans:
            return None
        inputs, depth = self._last[1], tuple([span.drafts for span in spans])
        count, rows = len(depth), len(depth) + sum(depth)
        return Spans(
            slot_ids=tuple([span.slot for span in spans]),
            depth=depth,
            slots=inputs.slots[:count],
            drafted=inputs.drafts[:count],
            row_span=inputs.row_span[:rows],
            row_depth=inputs.within[:rows],
            first_row=inputs.offsets[:count],
        )

    def work(self, spans: int, chunk_rows: int) -> list[Callable[[], object]]:
        """One call for every pass there may be, on void rows: run them, and they are captured."""
        return [partial(self._run_void, key) for key in reachable(spans, self.widest, chunk_rows)]

    @torch.inference_mode()
    def _run_void(self, key: PassKey) -> None:
        self._run(self.void("verify", key))

    def _run(self, inputs: PassInputs) -> Tensor:
        key = inputs.key
        if self._hidden is None or self._hidden.shape[0] < key.rows:
            model = self.runner.model
            shape = (max(key.rows, self.most_rows), model.config.hidden_size)
            self._hidden = torch.empty(shape, dtype=model.activation_dtype, device=self.slots.device)
        out = self._hidden[: key.rows]

        def work() -> Tensor:
            ids, layout = self.model_inputs(inputs)
            return out.copy_(self.runner.forward(ids, layout, self.prepared("verify", inputs), self.reader))

        return self.graphs.run((id(self), "verify", key), work)


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """What a draft loop draws with."""

    sampling: SamplingState
    vocab_map: Tensor | None


class DraftLoops(PaddedPasses):
    """Catching up and draft loops of a draft model or a head. Callers hold torch.inference_mode()."""

    def __init__(
        self,
        graphs: Graphs,
        runner: ModelRunner | HeadRunner,
        slots: Slots,
        widest: int,
        most_rows: int,
        routine: int,
        drawing: Drawing,
    ) -> None:
        super().__init__(graphs, runner, slots, widest, most_rows)
        self.runner = runner
        self.routine = routine  # rows a span reads before it drafts: what its cache lacks after a verdict, at most
        self.drawing = drawing
        known, vocab = drawing.vocab_map, drawing.sampling.vocab
        self._vocabulary = None if known is None else DraftVocabulary.of(known, vocab)
        self._shaped: dict[Hashable, set[Hashable]] = {}  # by version of the tensors read, the latest last: keys

    def catch_up(self, spans: Sequence[DraftSpan]) -> list[DraftSpan]:
        """Read confirmed tokens and draft nothing, a few spans a pass. Returns those that are too long for a bucket."""
        some: list[DraftSpan] = []
        for span in [span for span in spans if self.fits(1, span.rows)]:
            if not self.fits(len(some) + 1, sum(each.rows for each in some) + span.rows):
                self._catch_up_with(some)
                some = []
            some.append(span)
        if some:
            self._catch_up_with(some)
        return [span for span in spans if not self.fits(1, span.rows)]

    def _catch_up_with(self, spans: Sequence[DraftSpan]) -> None:
        """In one pass."""
        rows = [span.rows for span in spans]
        inputs = self.inputs("catch up", pass_key([], self.widest, rows))
        starts = [-1 if span.start is None else span.start for span in spans]
        inputs.fill([], [span.slot for span in spans], [span.lag for span in spans], False, rows, starts)
        self._catch_up(inputs)

    @property
    def whole(self) -> bool:
        """Whether loops that draft may be replayed too."""
        return self.drawing.sampling.kernels == "triton"

    def draft(self, spans: Sequence[DraftSpan]) -> None:
        """Draft as many tokens as the longest span asks for; what others have beyond theirs is unread.

        Every span reads its last `routine` tokens: what its cache lacks, or has already and then gets again.
        """
        count, longest = len(spans), max(span.drafts for span in spans)
        needs = self.drawing.sampling.needs([span.slot for span in spans if span.drafts])
        inputs = self.inputs("draft", self._key(count))
        routine, lengths = [self.routine] * count, [span.drafts for span in spans]
        inputs.fill(routine, [span.slot for span in spans], routine, False, drafts=lengths)
        self.slots.draft_lens.index_copy_(0, inputs.slots[:count], inputs.drafts[:count])
        self._draft(inputs, longest, 0 if needs.plain else self._text(max(span.context for span in spans)))

    def work(self, spans: int, chunk_rows: int) -> list[Callable[[], object]]:
        """One call for every pass and loop there may be, on void rows; loops with penalties come when they come."""
        counts = sorted({bucket(n) for n in range(1, spans + 1)}, reverse=True)
        most = self.slots.drafts.shape[1]
        loops = [(self._key(count), length) for count in counts for length in range(most, 0, -1)]
        found: list[Callable[[], object]] = [
            partial(self._catch_up_void, key) for key in reachable(0, self.widest, chunk_rows)
        ]
        if self.drawing.sampling.kernels == "triton":
            found += [partial(self._draft_void, key, length) for key, length in loops]
            found.append(self._draw_shaped_void)
        return found

    def _key(self, spans: int) -> PassKey:
        return PassKey(bucket(spans), self.routine * bucket(spans), self.routine)

    def _text(self, context: int) -> int:
        """Tokens of a text that penalties look through: a bucket."""
        found = SHORT_TEXT
        while found < context:
            found *= 4
        return min(found, self.slots.capacity)

    @torch.inference_mode()
    def _catch_up_void(self, key: PassKey) -> None:
        self._catch_up(self.void("catch up", key))

    @torch.inference_mode()
    def _draft_void(self, key: PassKey, longest: int) -> None:
        self._draft(self.void("draft", key), longest, 0)

    @torch.inference_mode()
    def _draw_shaped_void(self) -> None:
        """Compile what loops with penalties draw with: other logits than those of the others may have another type."""
        sampling = self.drawing.sampling
        inputs = self.void("draft", self._key(1))
        self._draw(torch.zeros(1, sampling.vocab, device=self.slots.device), None, inputs, 0)

    def _draw(self, logits: Tensor, vocabulary: DraftVocabulary | None, inputs: PassInputs, depth: int) -> None:
        """Draft the token at `depth` of each span."""
        from verifypd.sampling.triton import draft_

        slots = self.slots
        assert slots.draft_q is not None, "a drafter that draws has room for what it draws from"
        draft_(
            logits, vocabulary, inputs.own, depth, self.drawing.sampling, slots.lengths, slots.drafts, slots.draft_q,
            slots.draft_temperatures,
        )  # fmt: skip

    def _catch_up(self, inputs: PassInputs) -> None:
        def work() -> None:
            ids, layout = self.model_inputs(inputs)
            self.runner.catch_up(ids, layout, self.prepared("catch up", inputs))

        self.graphs.run((id(self), "catch up", inputs.key), work)

    def _draft(self, inputs: PassInputs, longest: int, text: int) -> None:
        """text: tokens that penalties look through; 0: no request has any, nor anything else that shapes logits."""
        sampling, vocab_map = self.drawing.sampling, self.drawing.vocab_map

        def work() -> None:
            slots, last = self.slots, slice(self.routine - 1, None, self.routine)
            ids, layout = self.model_inputs(inputs)
            hidden, carried = self.runner.catch_up(ids, layout, self.prepared("draft", inputs))
            hidden, carried = hidden[last], carried[last]
            for depth in range(longest):
                if depth:
                    ids, layout = self.model_inputs(inputs, depth)
                    hidden, carried = self.runner.draft(ids, carried, layout)
                logits, vocabulary = self.runner.raw_logits(hidden), self._vocabulary
                if text:
                    logits, vocabulary = clean(widen(logits.float(), vocab_map, sampling.vocab), sampling.vocab), None
                    rows = Rows(inputs.slots, torch.full_like(inputs.slots, depth), slots.lengths[inputs.slots])
                    shape_(logits, rows, sampling, slots.tokens[:, :text], slots.drafts)
                self._draw(logits, vocabulary, inputs, depth)

        if not text:
            self.graphs.run((id(self), "draft", inputs.key, longest), work)
            return
        version = sampling.version
        keys = self._shaped[version] = self._shaped.pop(version, set())
        if len(self._shaped) > VERSIONS:
            self.graphs.forget(self._shaped.pop(next(iter(self._shaped))))
        keys.add(key := (id(self), "shaped draft", inputs.key, longest, text, version))
        self.graphs.run(key, work)
