"""Drafting with a small model that has a paged cache of its own. Knows slots and runners; nothing of scheduling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout, Reader
from verifypd.batch import DraftBatch, DraftSpan
from verifypd.request import Request
from verifypd.runtime.graphs import CAUGHT_UP, ModelGraphs
from verifypd.runtime.inputs import Slots, catch_up_layout, draft_layouts, host_tensor
from verifypd.runtime.runner import HeadRunner, ModelRunner
from verifypd.sampling.sampler import draft_noise, propose
from verifypd.sampling.state import SamplingState


class ModelDrafter:
    """Runs the draft model token by token for all spans at once; the loop costs the longest draft."""

    name = "model"
    has_cache = True
    point_mass = False
    reader: Reader | None = None
    keeps_drafts = True

    def __init__(
        self,
        runner: ModelRunner | HeadRunner,
        slots: Slots,
        sampling: SamplingState,
        draft_q: Tensor,
        vocab_map: Tensor | None = None,
        temperature_scale: Tensor | None = None,
        graphs: ModelGraphs | None = None,
    ) -> None:
        self.graphs = graphs  # draft loops of fixed shape; None: every step is launched as it comes
        self.runner = runner
        self.slots = slots
        self.sampling = sampling
        self.draft_q = draft_q  # [slots, max_draft, vocab of the verifier]
        self.vocab_map = vocab_map  # [draft vocab] -> verifier ids; None: the ids are the same
        self.temperature_scale = temperature_scale  # [slots], the drafter's temperature relative to the request's

    @torch.inference_mode()
    def launch(self, batch: DraftBatch) -> None:
        """Catch up with the confirmed tokens, then draft: each step reads the token the step before wrote."""
        catching = [span for span in batch.spans if span.rows]
        if self.graphs is not None and self.graphs.takes_drafts(catching, self.sampling):
            self._replay(self.graphs, catching)
            return
        layout = catch_up_layout(catching, self.slots, self.runner.tables)
        ids = self.slots.tokens[layout.slots[layout.row_span], layout.positions]
        hidden, carried = self._catch_up(ids, layout)
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
        sampled = self.sampling.needs([span.slot for span in drafting]).rejection
        noise = draft_noise(index, self.slots.lengths, longest, self.sampling) if sampled else None
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
            hidden, carried = self._step(tokens[:count], carried[:count], layout)
            tokens = self._draw(hidden, drafting[:count], layout.slots, depth, noise)

    def _replay(self, graphs: ModelGraphs, catching: Sequence[DraftSpan]) -> None:
        """The same by graphs: who is far behind catches up in a pass before the loop that drafts for all who may."""
        left = graphs.catch_up([span for span in catching if span.rows > CAUGHT_UP or span.rows < span.lag])
        if left:
            layout = catch_up_layout(left, self.slots, self.runner.tables)
            self._catch_up(self.slots.tokens[layout.slots[layout.row_span], layout.positions], layout)
        level = [span for span in catching if span.drafts or span.rows == span.lag <= CAUGHT_UP]
        if level:
            index = host_tensor([span.slot for span in level], self.slots.device)
            self.slots.draft_lens[index] = host_tensor([span.drafts for span in level], self.slots.device)
            graphs.draft(level, self.sampling, self.draft_q, self.vocab_map, self.temperature_scale)

    def _catch_up(self, ids: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Read confirmed tokens: hidden states [N, H] for the logits, and what the next step reads beside its token."""
        assert isinstance(self.runner, ModelRunner)
        hidden = self.runner.forward(ids, layout)
        return hidden, hidden

    def _step(self, ids: Tensor, carried: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Read one drafted token a span; a model needs nothing but the token."""
        assert isinstance(self.runner, ModelRunner)
        hidden = self.runner.forward(ids, layout)
        return hidden, hidden

    def _draw(
        self, hidden: Tensor, spans: Sequence[DraftSpan], index: Tensor, depth: int, noise: Tensor | None
    ) -> Tensor:
        """Draw the token at `depth` for each span, [R], and keep the distribution it was drawn from."""
        proposal = propose(
            self.runner.logits(hidden),
            index,
            tuple(span.slot for span in spans),
            depth,
            self.sampling,
            self.slots.tokens,
            self.slots.lengths,
            self.slots.drafts,
            self.draft_q,
            vocab_map=self.vocab_map,
            temperature_scale=self.temperature_scale,
            noise=None if noise is None else noise[: len(spans), depth],
            context=max(span.context for span in spans),
        )
        return proposal.tokens

    def promise(self, request: Request) -> int:
        """As many as are asked for."""
        return self.draft_q.shape[1]

    def observe(self, request: Request) -> None:
        """Nothing to note: the tokens are on the device."""

    def forget(self, request: Request) -> None:
        """Nothing is kept by request."""
