"""Drafting with a head that reads the verifier's states. Knows slots and the head's runner; nothing of scheduling.

Confirmed tokens are read with what the verifier made of the position before them, drafted ones with the head's own
output in its place. So what the cache holds of a drafted token is second best: once the verdict is in, those rows are
read again, with the verifier's features.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifypd.batch import DraftBatch, DraftSpan
from verifypd.drafters.model import ModelDrafter
from verifypd.runtime.inputs import Slots
from verifypd.runtime.padded import DraftLoops, Drawing
from verifypd.runtime.runner import HeadRunner


class HeadDrafter(ModelDrafter):
    """The draft loop of a model, with features beside the tokens."""

    name = "head"
    keeps_drafts = False
    follows = True

    def __init__(self, runner: HeadRunner, slots: Slots, drawing: Drawing, loops: DraftLoops | None = None) -> None:
        super().__init__(runner, slots, drawing, loops)
        self.routine = slots.drafts.shape[1] + 1  # all drafts and the verdict's next token are read again
        self.reader = runner.features  # keeps every row: confirmed ones are read later, rejected ones written over
        # a whole loop in one call
        self.native = runner.native_loop(slots, drawing.sampling) if loops is None else None

    def launch(self, batch: DraftBatch) -> None:
        """See ModelDrafter.launch. In one call on a CPU, unless penalties or the like shape the drafts."""
        spans = [span for span in batch.spans if span.rows]
        if self.native is None or not self._plain(spans) or not self.native.takes(sum(span.rows for span in spans)):
            super().launch(batch)
            return
        spans.sort(key=lambda span: -span.drafts)
        self.native.run([(s.slot, s.rows, s.drafts, -s.lag if s.start is None else s.start) for s in spans])

    def _plain(self, spans: Sequence[DraftSpan]) -> bool:
        """Whether somebody drafts, and C draws every token from scores as the head has them."""
        drafting = [span.slot for span in spans if span.drafts]
        sampling = self.drawing.sampling
        needs = sampling.needs(drafting)
        drawn = sampling.kernels == "native" and (self.slots.draft_q is not None or not needs.rejection)
        return bool(drafting) and needs.plain and (drawn or not needs.sampled)
