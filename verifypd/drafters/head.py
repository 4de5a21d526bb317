"""Drafting with a head that reads the verifier's states. Knows slots and the head's runner; nothing of scheduling.

Confirmed tokens are read with what the verifier made of the position before them, drafted ones with the head's own
output in its place. So what the cache holds of a drafted token is second best: once the verdict is in, those rows are
read again, with the verifier's features.
"""

from __future__ import annotations

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
