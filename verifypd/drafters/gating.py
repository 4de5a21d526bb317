"""Follows gated drafts through a draft loop: who goes on, and how much of each is kept. Numbers of the host only."""

from __future__ import annotations

from collections.abc import Sequence

from verifypd.batch import Drafted, DraftSpan


class Gating:
    """The spans of one draft loop, told token by token how sure the drafter was."""

    def __init__(self, spans: Sequence[DraftSpan]) -> None:
        self._alive = {span.slot: 1.0 for span in spans}  # chance that all drafted so far stand
        self._kept = {span.slot: 0 for span in spans}
        self._peaks: dict[int, list[float]] = {span.slot: [] for span in spans}
        self._steps = 0

    def look(self, spans: Sequence[DraftSpan], peaks: Sequence[float]) -> list[int]:
        """Each of these has one token more, with this peak. Returns the places of those that draft another."""
        self._steps += 1
        on = []
        for place, (span, peak) in enumerate(zip(spans, peaks, strict=True)):
            slot, gate, mine = span.slot, span.gate, self._peaks[span.slot]
            mine.append(peak)
            alive, enough = 1.0, 0.0
            if gate is not None:
                alive = self._alive[slot] = self._alive[slot] * gate.chance(peak)
                enough = gate.worth if len(mine) < gate.free else gate.enough
                if alive <= gate.floor and len(mine) > gate.free:
                    continue
            self._kept[slot] += 1
            if alive > enough and len(mine) < span.drafts:
                on.append(place)
        return on

    def drafted(self) -> Drafted:
        """What came of it."""
        return Drafted(self._steps, self._kept, {slot: tuple(peaks) for slot, peaks in self._peaks.items()})
