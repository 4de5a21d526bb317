"""The decode lane: drafting. Launches drafters; knows nothing of verdicts or of scheduling."""

from __future__ import annotations

from verifypd.batch import DraftBatch
from verifypd.drafters.base import Drafter
from verifypd.runtime.inputs import Slots, host_tensor


class DecodeLane:
    """Runs the drafter a batch names. Nothing comes back to the host: the verify lane reads drafts from the slots."""

    name = "decode"

    def __init__(self, drafters: dict[str, Drafter], slots: Slots) -> None:
        self.drafters = drafters
        self.slots = slots
        self._set: dict[int, float] = {}  # slot -> its `draft_temperatures`, where it is not 1

    def launch(self, batch: DraftBatch) -> None:
        """Start drafting."""
        self._set_temperatures(batch)
        others = {span.drafter for span in batch.spans if span.drafter not in (None, batch.drafter)}
        if not others:
            self.drafters[batch.drafter].launch(batch)
            return
        for name in (batch.drafter, *sorted(name for name in others if name)):
            spans = tuple(span for span in batch.spans if (span.drafter or batch.drafter) == name)
            if spans:
                self.drafters[name].launch(DraftBatch(name, spans))

    def _set_temperatures(self, batch: DraftBatch) -> None:
        """Write what differs from the launch before; usually nothing."""
        changed: dict[float, list[int]] = {}
        for span in batch.spans:
            if span.drafts and self._set.get(span.slot, 1.0) != span.temperature:
                changed.setdefault(span.temperature, []).append(span.slot)
                self._set[span.slot] = span.temperature
        for value, slots in changed.items():
            self.slots.draft_temperatures.index_fill_(0, host_tensor(slots, self.slots.device), value)
