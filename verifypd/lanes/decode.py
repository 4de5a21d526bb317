"""The decode lane: drafting. Launches drafters; knows nothing of verdicts or of scheduling."""

from __future__ import annotations

from verifypd.batch import DraftBatch
from verifypd.drafters.base import Drafter


class DecodeLane:
    """Runs the drafter a batch names. Nothing comes back to the host: the verify lane reads drafts from the slots."""

    name = "decode"

    def __init__(self, drafters: dict[str, Drafter]) -> None:
        self.drafters = drafters

    def launch(self, batch: DraftBatch) -> None:
        """Start drafting."""
        self.drafters[batch.drafter].launch(batch)
