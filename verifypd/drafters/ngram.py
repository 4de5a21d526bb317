"""Prompt look-up: if the last tokens have occurred before, propose what followed then. No model, no cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from verifypd.attention.base import Reader
from verifypd.batch import DraftBatch, DraftSpan
from verifypd.kernels import build
from verifypd.request import Request
from verifypd.runtime.inputs import Slots, host_tensor

FIRST_DRAFT = 4  # tokens, before anything is known of a request


class NgramDrafter:
    """Proposes the continuation of the latest earlier occurrence of the longest matching suffix.

    A draft that runs past the end of the text goes on with itself, so a repetition of any period is drafted whole.
    """

    name = "ngram"
    has_cache = False
    point_mass = True
    reader: Reader | None = None
    keeps_drafts = True
    routine = 0
    one_pass = False
    follows = False

    def __init__(self, slots: Slots, shortest: int, longest: int, max_draft: int, always: bool = False) -> None:
        """`always`: propose whole drafts even where nothing matches, for runs with synthetic acceptance."""
        self.slots = slots
        self.shortest = shortest
        self.longest = longest
        self.max_draft = max_draft
        self.always = always
        self._indexes: dict[int, NgramIndex] = {}  # request order -> index

    def launch(self, batch: DraftBatch) -> None:
        """Look up on the device, so that a draft may start from a verdict the host has not seen."""
        spans = [span for span in batch.spans if span.drafts]
        if not spans:
            return
        compiled = build.loaded() if self.slots.device.type == "cpu" else None
        if compiled is not None:
            self._look_up(compiled, spans)
            return
        index = host_tensor([span.slot for span in spans], self.slots.device)
        wanted = host_tensor([span.drafts for span in spans], self.slots.device)
        width = min(max(span.context for span in spans), self.slots.capacity)
        depth = max(span.drafts for span in spans)
        drafts, found = look_up(
            self.slots.tokens[index, :width], self.slots.lengths[index], self.shortest, self.longest, depth
        )
        self.slots.drafts[index, :depth] = drafts
        self.slots.draft_lens[index] = wanted if self.always else torch.where(found, wanted, 0)

    def _look_up(self, compiled: ctypes.CDLL, spans: Sequence[DraftSpan]) -> None:
        """The same in one call of C: some thirty of torch's take 1 ms between two passes, which leave caches cold."""
        slots = self.slots
        wanted = (ctypes.c_int64 * (2 * len(spans)))(*[number for s in spans for number in (s.slot, s.drafts)])
        compiled.vpd_look_up(
            slots.tokens.data_ptr(), slots.tokens.stride(0), min(max(s.context for s in spans), slots.capacity),
            slots.lengths.data_ptr(), wanted, len(spans), self.shortest, self.longest, max(s.drafts for s in spans),
            self.always, slots.drafts.data_ptr(), slots.drafts.stride(0), slots.draft_lens.data_ptr(),
        )  # fmt: skip

    def follow(self, spans: Sequence[DraftSpan]) -> None:
        """Nothing to read: there is no cache."""

    def admitted(self, request: Request) -> None:
        """Nothing to note: a launch finds all it needs."""

    def expected(self, request: Request) -> int:
        """Nothing where the suffix is new, else as much as copying has lately been worth: twice the last draft if all
        of it stood, one more than stood if not."""
        if self.always:
            return self.max_draft
        index = self._indexes.get(request.order)
        if index is None or not index.matches:
            return 0
        drafted, accepted = request.last_draft
        if not drafted:
            return min(FIRST_DRAFT, self.max_draft)
        return min(2 * drafted if accepted == drafted else accepted + 1, self.max_draft)

    def observe(self, requests: Sequence[Request]) -> None:
        """Index newly confirmed tokens."""
        for request in () if self.always else requests:
            index = self._indexes.get(request.order)
            if index is None:
                index = self._indexes[request.order] = NgramIndex(self.shortest)
            index.extend(request.tokens)

    def forget(self, request: Request) -> None:
        """Drop its index."""
        self._indexes.pop(request.order, None)

    def close(self) -> None:
        """Nothing to end."""


class NgramIndex:
    """The n-grams of one growing token list; `matches` says whether its end has occurred before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.matches = False
        self._seen: set[tuple[int, ...]] = set()
        self._length = 0

    def extend(self, tokens: list[int]) -> None:
        """Take in what was appended to `tokens` since the last call."""
        for end in range(max(self._length + 1, self.size), len(tokens) + 1):
            gram = tuple(tokens[end - self.size : end])
            self.matches = gram in self._seen
            self._seen.add(gram)
        self._length = len(tokens)


def look_up(tokens: Tensor, lengths: Tensor, shortest: int, longest: int, depth: int) -> tuple[Tensor, Tensor]:
    """Continuations [R, depth] of the longest, then latest earlier match of each suffix, and whether there is one.

    tokens [R, W], lengths [R]. A match of n tokens ends at position e < length − 1.
    """
    rows, width = tokens.shape
    ends = torch.arange(width, device=tokens.device)
    last = lengths[:, None] - 1
    matching = torch.ones(rows, width, dtype=torch.bool, device=tokens.device)
    size = torch.zeros(rows, width, dtype=torch.int64, device=tokens.device)
    for back in range(longest):
        suffix = tokens.gather(1, (last - back).clamp_min(0))  # [R, 1]
        shifted = tokens if not back else torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :width]
        matching = matching & (shifted == suffix) & (last - back >= 0)
        size = size + matching
    usable = (size >= shortest) & (ends < last)
    score = torch.where(usable, size * width + ends, -1)
    best, _ = score.max(1, keepdim=True)
    found = best >= 0
    start = best.clamp_min(0) % width + 1  # first token of the continuation
    period = (lengths[:, None] - start).clamp_min(1)
    offsets = torch.arange(depth, device=tokens.device) % period
    drafts = tokens.gather(1, (start + offsets).clamp_max(width - 1))
    return drafts, found[:, 0]
