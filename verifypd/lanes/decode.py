"""The decode lane: drafting. Launches drafters; knows nothing of verdicts or of scheduling."""

from __future__ import annotations

from torch import Tensor

from verifypd.batch import DraftBatch
from verifypd.drafters.base import Drafter
from verifypd.runtime.inputs import host_tensor


class DecodeLane:
    """Runs the drafter a batch names. Nothing comes back to the host: the verify lane reads drafts from the slots."""

    name = "decode"

    def __init__(self, drafters: dict[str, Drafter], temperatures: Tensor | None = None) -> None:
        self.drafters = drafters
        self.temperatures = temperatures  # fp32 [slots], the drafter's relative to the request's; None: no such drafter
        self._set: dict[int, float] = {}  # slot -> what `temperatures` holds, where it is not 1

    def launch(self, batch: DraftBatch) -> None:
        """Start drafting."""
        if self.temperatures is not None:
            self._set_temperatures(batch, self.temperatures)
        others = {span.drafter for span in batch.spans if span.drafter not in (None, batch.drafter)}
        if not others:
            self.drafters[batch.drafter].launch(batch)
            return
        for name in (batch.drafter, *sorted(name for name in others if name)):
            spans = tuple(span for span in batch.spans if (span.drafter or batch.drafter) == name)
            if spans:
                self.drafters[name].launch(DraftBatch(name, spans))

    def _set_temperatures(self, batch: DraftBatch, temperatures: Tensor) -> None:
        """Write what differs from the launch before; usually nothing."""
        changed: dict[float, list[int]] = {}
        for span in batch.spans:
            if span.drafts and self._set.get(span.slot, 1.0) != span.temperature:
                changed.setdefault(span.temperature, []).append(span.slot)
                self._set[span.slot] = span.temperature
        for value, slots in changed.items():
            temperatures.index_fill_(0, host_tensor(slots, temperatures.device), value)
