"""Drafting with a small model that has a paged cache of its own. Knows slots and runners; nothing of scheduling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verifypd.attention.base import Reader
from verifypd.batch import DraftBatch, DraftSpan
from verifypd.inflight import CAUGHT_UP
from verifypd.request import Request
from verifypd.runtime.inputs import Slots, catch_up_layout, draft_layouts, host_tensor
from verifypd.runtime.padded import DraftLoops, Drawing
from verifypd.runtime.runner import HeadRunner, ModelRunner
from verifypd.sampling.sampler import draft_noise, propose


class ModelDrafter:
    """Runs the draft model token by token for all spans at once; the loop costs the longest draft."""

    name = "model"
    has_cache = True
    point_mass = False
    reader: Reader | None = None
    keeps_drafts = True
    routine = CAUGHT_UP
    one_pass = False
    follows = False

    def __init__(
        self,
        runner: ModelRunner | HeadRunner,
        slots: Slots,
        drawing: Drawing,
        loops: DraftLoops | None = None,
    ) -> None:
        self.loops = loops  # of fixed shape; None: every step is launched as it comes
        self.runner = runner
        self.slots = slots
        self.drawing = drawing

    @torch.inference_mode()
    def launch(self, batch: DraftBatch) -> None:
        """Catch up with the confirmed tokens, then draft: each step reads the token the step before wrote."""
        catching = [span for span in batch.spans if span.rows]
        if self.loops is not None and self.loops.whole:
            self._replay(self.loops, catching)
            return
        hidden, carried = self._catch_up(catching)
        drafting = [span for span in catching if span.drafts]
        if not drafting:
            return
        ends, end = {}, -1  # slot -> its last row
        for span in catching:
            end += span.rows
            ends[span.slot] = end
        drafting.sort(key=lambda span: -span.drafts)  # those still drafting are always the first ones
        index = host_tensor([span.slot for span in drafting], self.slots.device)
        self.slots.draft_lens[index] = host_tensor([span.drafts for span in drafting], self.slots.device)
        longest = drafting[0].drafts
        sampling = self.drawing.sampling
        given = sampling.kernels == "torch" and bool(sampling.needs([span.slot for span in drafting]).rejection)
        noise = draft_noise(index, self.slots.lengths, longest, sampling) if given else None  # others make their own
        if len(catching) == 1:
            hidden, carried = hidden[-1:], carried[-1:]
        else:
            last = host_tensor([ends[span.slot] for span in drafting], self.slots.device)
            hidden, carried = hidden[last], carried[last]
        tokens = self._draw(hidden, drafting, index, 0, noise)
        if longest == 1:
            return
        for depth, layout in enumerate(draft_layouts(drafting, index, self.slots, self.runner.tables), 1):
            count = layout.spans
            hidden, carried = self.runner.draft(tokens[:count], carried[:count], layout)
            tokens = self._draw(hidden, drafting[:count], layout.slots, depth, noise)

    def _replay(self, loops: DraftLoops, catching: Sequence[DraftSpan]) -> None:
        """The same by graphs: who is far behind catches up in a pass before the loop that drafts for all who may."""
        behind = [span for span in catching if span.rows > loops.routine or span.rows < span.lag]
        level = [span for span in catching if span.drafts or span.rows == span.lag <= loops.routine]
        drafting = any(span.drafts for span in level)
        if left := loops.catch_up(behind if drafting else catching):
            self._catch_up(left)
        if drafting:
            loops.draft(level)

    def _catch_up(self, spans: Sequence[DraftSpan]) -> tuple[Tensor, Tensor]:
        """Read confirmed tokens: hidden states [N, H] for the logits, and what the next step reads beside its token."""
        layout = catch_up_layout(spans, self.slots, self.runner.tables)
        return self.runner.catch_up(self.slots.tokens[layout.slots[layout.row_span], layout.positions], layout)

    @torch.inference_mode()
    def follow(self, spans: Sequence[DraftSpan]) -> None:
        """Read prompt chunks whose verifier pass has been launched."""
        if left := spans if self.loops is None else self.loops.catch_up(spans):
            self._catch_up(left)

    def _draw(
        self, hidden: Tensor, spans: Sequence[DraftSpan], index: Tensor, depth: int, noise: Tensor | None
    ) -> Tensor:
        """Draw the token at `depth` for each span, [R], and keep the distribution it was drawn from."""
        return propose(
            self.runner.logits(hidden),
            index,
            tuple(span.slot for span in spans),
            depth,
            self.drawing.sampling,
            self.slots.tokens,
            self.slots.lengths,
            self.slots.drafts,
            self.slots.draft_q,
            vocab_map=self.drawing.vocab_map,
            temperature_scale=self.slots.draft_temperatures,
            noise=None if noise is None else noise[: len(spans), depth],
            context=max(span.context for span in spans),
        )

    def admitted(self, request: Request) -> None:
        """Nothing to note: a launch finds all it needs."""

    def expected(self, request: Request) -> int:
        """As many as are asked for."""
        return self.slots.drafts.shape[1]

    def observe(self, requests: Sequence[Request]) -> None:
        """Nothing to note: the tokens are on the device."""

    def forget(self, request: Request) -> None:
        """Nothing is kept by request."""

    def close(self) -> None:
        """Nothing to end."""
