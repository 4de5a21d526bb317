"""What the engine keeps in mind of a draft head: from where on it has features of a request, and which prompt chunks it
has still to read. Knows requests and memory; nothing of tensors or plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from verifypd.batch import DraftSpan, VerifySpan
from verifypd.engine.memory import RequestMemory
from verifypd.request import Request


class HeadBooks:
    """The books of one engine; without a head nothing is ever in them."""

    def __init__(self, memory: RequestMemory, longest: int) -> None:
        """longest: tokens of a prompt that are read at once, or as many as its chunk has."""
        self.memory = memory
        self.longest = longest
        self._chunks: list[tuple[Request, VerifySpan]] = []  # whose passes are launched and which are not read yet

    def begin(self, requests: Sequence[Request], spans: Sequence[VerifySpan], lengths: Tensor) -> None:
        """Requests of which some features were not kept: from the next pass on they are, and a head reads from there.

        lengths: [S] on the device, where those who decode begin.
        """
        if self.memory.head_origin is None:
            return
        decoding = []
        for request, span in zip(requests, spans, strict=True):
            if not request.unread:
                continue
            request.unread = False
            if span.start is not None:
                request.begun(len(request.tokens) - self.memory.begin_head(request, span.slot, span.start))
            else:
                request.begun(0)
                request.late_features = True
                decoding.append(span.slot)
        self.memory.begin_heads_at(decoding, lengths)

    def add(self, requests: Sequence[Request], spans: Sequence[VerifySpan]) -> None:
        """The prompt chunks of a pass that was launched: they are read in the next step, and no first token waits."""
        for request, span in zip(requests, spans, strict=True):
            if span.start is not None and request.params.speculation and request.params.max_draft != 0:
                self._chunks.append((request, span))

    def due(self) -> list[DraftSpan]:
        """What is to be read now, of requests that are still there; it counts as read."""
        found = []
        for request, span in self._chunks:
            if request.slot != span.slot or request.finished or request.preempting:
                continue
            begin = request.length_bound - request.draft_lag
            rows = min(request.computed - begin, max(span.rows, self.longest))
            if rows > 0:
                request.followed(rows)
                found.append(DraftSpan(span.slot, 0, rows, 0, begin + rows, start=begin))
        self._chunks.clear()
        return found
