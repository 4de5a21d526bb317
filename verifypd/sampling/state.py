"""What each slot's request asks of the sampler: slot-indexed device tensors, and host mirrors that say which work can
be left out.

The device side is read by the kernels; the host side answers `needs` without asking the device. Knows nothing of
models, KV memory or schedules, and does no sampling itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from verifypd.errors import RequestError
from verifypd.kernels.tiles import power_of_two
from verifypd.request import SamplingParams

CACHED_BATCHES = 256  # batches whose needs are remembered
TOP_OFF = 0  # top_k that keeps everything


class Mark(Protocol):
    """A place in the work of a stream."""

    def query(self) -> bool:
        """Whether it has been passed."""


class Mode(IntEnum):
    """How a slot's drafts are judged."""

    GREEDY = 0
    REJECTION = 1
    COUPLED = 2


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 tensor of host values; the copy to an accelerator is asynchronous."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Subset:
    """Some rows of a batch, known on the host. A run of neighbours is a view; others are gathered and put back."""

    __slots__ = ("count", "index", "start")

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.count = len(rows)
        self.start = rows[0] if rows else 0
        run = self.count == 0 or rows[-1] - self.start + 1 == self.count
        self.index = None if run else on_device(rows, device)

    def __bool__(self) -> bool:
        return self.count > 0

    def of(self, x: Tensor) -> Tensor:
        """These rows of x [N, ...]: a view where they are neighbours."""
        if self.index is not None:
            return x.index_select(0, self.index)
        return x if self.count == x.shape[0] else x.narrow(0, self.start, self.count)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Overwrite these rows of x [N, ...]."""
        if self.index is not None:
            x.index_copy_(0, self.index, values)
        else:
            x.narrow(0, self.start, self.count).copy_(values)

    def update(self, x: Tensor, change: Callable[[Tensor], object]) -> None:
        """Apply an in-place change to these rows of x [N, ...]."""
        part = self.of(x)
        change(part)
        if self.index is not None:
            x.index_copy_(0, self.index, part)


@dataclass(frozen=True, slots=True)
class SlotNeeds:
    """Host mirror of one slot. What a greedy request cannot feel (temperature, top_k, top_p, min_p) reads as off."""

    mode: Mode = Mode.GREEDY
    synthetic: bool = False
    bias: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    repetition: bool = False
    counts: bool = False  # presence or frequency penalty
    temperature: bool = False
    min_p: bool = False
    top_k: int = TOP_OFF
    top_p: bool = False
    stop_ids: int = 0
    logprobs: int = -1

    def felt(self) -> SlotNeeds:
        """What is left of it under synthetic acceptance: no transform at all."""
        if not self.synthetic:
            return self
        return SlotNeeds(mode=self.mode, synthetic=True, stop_ids=self.stop_ids, logprobs=self.logprobs)


NO_NEEDS = SlotNeeds()


@lru_cache(maxsize=1024)
def _shared(needs: SlotNeeds) -> SlotNeeds:
    """One object for all that are equal: batches look for those who need the same."""
    return needs


@dataclass(frozen=True, slots=True)
class Needs:
    """Which rows of a batch need what; a Subset is false when none does."""

    rows: int
    # How rows are judged; each row is in exactly one of the four.
    greedy: Subset
    rejection: Subset
    coupled: Subset
    synthetic: Subset
    tried: Subset  # rejection rows that judge a draft: all but the last row of each span
    sampled: Subset  # rejection and coupled
    settled: Subset  # greedy and synthetic: no noise in what is drafted
    # Transforms.
    bias: Subset
    bad_words: Subset
    min_tokens: Subset
    penalties: Subset
    counts: bool  # among the penalties is presence or frequency
    temperature: Subset
    min_p: Subset
    top_k: Subset  # with top_p, where the row has that too
    widest_top_k: int
    top_k_with_top_p: bool
    top_p: Subset  # rows without top_k
    # Finish and report.
    stop_width: int  # columns of stop_ids in use
    logprobs: Subset
    top_logprobs: int  # most alternatives any row wants; -1: no logprobs at all

    @property
    def plain(self) -> bool:
        """Whether no row's likeliest token can change."""
        return not (self.bias or self.bad_words or self.min_tokens or self.penalties)


class SamplingState:
    """Sampling parameters of S slots.

    `vocab` is the number of token ids that may be drawn; logits may be wider (padded), what lies beyond is never looked
    at. Lengths are absolute: prompt and output tokens together.
    """

    def __init__(
        self, slots: int, vocab: int, max_draft: int, device: torch.device | str = "cpu", kernels: str = "torch"
    ) -> None:
        self.kernels = kernels  # what cuts and judges: "torch", "triton" on CUDA or "native", in C
        self.slots, self.vocab, self.max_draft, self.device = slots, vocab, max_draft, torch.device(device)
        self.floats = torch.zeros(slots, 7, device=self.device)
        self.temperature, self.top_p, self.log_min_p, self.presence, self.frequency, self.repetition, self.alpha = (
            self.floats.unbind(1)
        )
        self.integers = torch.zeros(slots, 8, dtype=torch.int64, device=self.device)
        self.top_k, self.seed, self.choice, self.prompt_len, self.min_len, self.max_len, self.bias_row, self.mode = (
            self.integers.unbind(1)
        )
        self.alive = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.stop_ids = self._filled(slots, 2)  # [S, K] ids that end the request, padded with -1
        self.guarded_ids = self._filled(slots, 2)  # [S, K] ids forbidden before min_len: those and EOS
        self.bad_words = self._filled(slots, 0, 0)  # [S, words, tokens], right-aligned, padded with -1
        self._word_tables = {(0, 0): self.bad_words}  # by words and tokens; one that is left is not in use any more
        self.bias = torch.zeros(0, vocab, device=self.device)  # [rows in use, vocab]
        self._bias_rows: dict[int, int] = {}  # slot -> row of `bias`
        self._slots = [NO_NEEDS] * slots  # who needs the same has the same
        self._needs: dict[tuple[tuple[int, ...], tuple[int, ...] | None], Needs] = {}
        self._retired: list[object] = []  # tensors out of use that a pass on another stream may still read
        self._leaving: deque[tuple[Sequence[Mark], list[object]]] = deque()  # those that were, when marks were set

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        max_len: int,
        choice: int = 0,
        eos_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        acceptance: str = "rejection",
        alpha: float = -1.0,
    ) -> None:
        """Give a slot to a request. `seed`, `prompt_len` and `choice` stay the same when a preempted request comes
        back.

        `acceptance` is what holds when the request leaves it open; `alpha` >= 0 is synthetic acceptance.
        """
        self._check(params, bad_words_ids)
        self.release(slot)
        stop = dict.fromkeys([*([] if params.ignore_eos else eos_ids), *(params.stop_token_ids or ())])
        guarded = dict.fromkeys([*eos_ids, *stop])
        needs = _slot_needs(params, self.vocab, acceptance, alpha >= 0, bool(bad_words_ids), len(stop))
        temperature = 1.0 if needs.mode is Mode.GREEDY else params.temperature
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats = (temperature, params.top_p, log_min_p, params.presence_penalty, params.frequency_penalty)
        self._write(self.floats, slot, [*floats, params.repetition_penalty, alpha])
        bias_row = self._assign_bias(slot, params) if needs.bias else -1
        signed_seed = (seed + 2**63) % 2**64 - 2**63
        lengths = (prompt_len, prompt_len + params.min_tokens, max_len)
        self._write(self.integers, slot, [needs.top_k, signed_seed, choice, *lengths, bias_row, needs.mode])
        self.stop_ids = self._padded(self.stop_ids, slot, list(stop))
        self.guarded_ids = self._padded(self.guarded_ids, slot, list(guarded))
        if bad_words_ids:
            self._assign_bad_words(slot, bad_words_ids)
        self._slots[slot] = _shared(needs)
        self.alive[slot].fill_(True)

    def release(self, slot: int) -> None:
        """Take a slot back. Passes in flight see it as dead."""
        self.alive[slot].fill_(False)
        had_words, self._slots[slot] = self._slots[slot].bad_words, NO_NEEDS
        if had_words:
            self.bad_words[slot].fill_(-1)
            if not any(needs.bad_words for needs in self._slots):
                self.bad_words = self._word_tables[0, 0]  # the next ones may be few and short
        self._bias_rows.pop(slot, None)
        self._drop_needs()

    @property
    def version(self) -> tuple[tuple[int, ...], ...]:
        """Which tensors hold what requests of any number may grow: a captured pass reads the ones of its time."""
        return tuple((t.data_ptr(), *t.shape) for t in (self.bias, self.bad_words, self.guarded_ids))

    def settle(self, marks: Callable[[], Sequence[Mark]] = tuple) -> None:
        """Let go of what was replaced, once no pass reads it. marks: behind what each other stream has to do now."""
        if self._retired:
            self._leaving.append((marks(), self._retired))
            self._retired = []
        while self._leaving and all(mark.query() for mark in self._leaving[0][0]):
            self._leaving.popleft()

    def _drop_needs(self) -> None:
        self._retired.append(tuple(self._needs.values()))
        self._needs.clear()

    def set_alpha(self, slots: Sequence[int], values: Sequence[float]) -> None:
        """Synthetic acceptance of some slots; a negative value turns it off. Takes effect with the next pass."""
        for slot, value in zip(slots, values, strict=True):
            self.alpha[slot].fill_(value)
            before = self._slots[slot]
            if before.synthetic != (value >= 0):
                self._slots[slot] = _shared(replace(before, synthetic=value >= 0))
                self._drop_needs()

    def needs(self, slot_ids: Sequence[int], depth: Sequence[int] | None = None) -> Needs:
        """Row i belongs to slot_ids[i]; with `depth`, slot_ids[i] has a span of depth[i] + 1 rows."""
        key = (tuple(slot_ids), None if depth is None else tuple(depth))
        found = self._needs.get(key)
        if found is None:
            if len(self._needs) >= CACHED_BATCHES:
                self._drop_needs()
            found = self._needs[key] = self._find_needs(*key)
        return found

    def _find_needs(self, slot_ids: tuple[int, ...], depth: tuple[int, ...] | None) -> Needs:
        placed: dict[int, tuple[SlotNeeds, list[int]]] = {}  # id of some needs -> what is felt of them, and their rows
        count, last = 0, set[int]()
        for slot, drafts in zip(slot_ids, depth or (0,) * len(slot_ids), strict=True):
            own = self._slots[slot]
            if id(own) not in placed:
                placed[id(own)] = own.felt(), []
            placed[id(own)][1].extend(range(count, count + drafts + 1))
            count += drafts + 1
            last.add(count - 1)
        rows = [own for own, _ in placed.values()]

        def where(wanted: Callable[[SlotNeeds], bool]) -> Sequence[int]:
            some = [places for own, places in placed.values() if wanted(own)]
            return range(count) if len(some) == len(placed) else sorted(chain(*some))

        def subset(wanted: Callable[[SlotNeeds], bool]) -> Subset:
            return Subset(where(wanted), self.device)

        def judged(mode: Mode) -> Subset:
            return subset(lambda row: row.mode is mode and not row.synthetic)

        rejected = where(lambda row: row.mode is Mode.REJECTION and not row.synthetic)
        return Needs(
            rows=count,
            greedy=judged(Mode.GREEDY),
            rejection=judged(Mode.REJECTION),
            coupled=judged(Mode.COUPLED),
            synthetic=subset(lambda row: row.synthetic),
            tried=Subset([row for row in rejected if row not in last], self.device),
            sampled=subset(lambda row: row.mode is not Mode.GREEDY and not row.synthetic),
            settled=subset(lambda row: row.mode is Mode.GREEDY or row.synthetic),
            bias=subset(lambda row: row.bias),
            bad_words=subset(lambda row: row.bad_words),
            min_tokens=subset(lambda row: row.min_tokens),
            penalties=subset(lambda row: row.repetition or row.counts),
            counts=any(row.counts for row in rows),
            temperature=subset(lambda row: row.temperature),
            min_p=subset(lambda row: row.min_p),
            top_k=subset(lambda row: row.top_k > 0),
            widest_top_k=max((row.top_k for row in rows), default=0),
            top_k_with_top_p=any(row.top_k > 0 and row.top_p for row in rows),
            top_p=subset(lambda row: row.top_p and row.top_k == TOP_OFF),
            stop_width=max((row.stop_ids for row in rows), default=0),
            logprobs=subset(lambda row: row.logprobs >= 0),
            top_logprobs=max((row.logprobs for row in rows), default=-1),
        )

    def _check(self, params: SamplingParams, bad_words_ids: Sequence[Sequence[int]]) -> None:
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [token for word in bad_words_ids for token in word]),
        ):
            wrong = [token for token in ids if not 0 <= token < self.vocab]
            if wrong:
                raise RequestError(f"{name}: token id {wrong[0]} is not in 0..{self.vocab - 1}", param=name)

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int64, device=self.device)

    def _write(self, table: Tensor, slot: int, values: Sequence[float]) -> None:
        host = torch.tensor(values, dtype=table.dtype, pin_memory=self.device.type == "cuda")
        table[slot].copy_(host, non_blocking=True)

    def _padded(self, table: Tensor, slot: int, ids: list[int]) -> Tensor:
        """Write ids into a row of a [S, K] table, padded with -1; the table grows to hold them."""
        width = table.shape[1]
        if len(ids) > width:
            self._retired.append(table)
            table = torch.cat([table, self._filled(self.slots, 2 * len(ids) - width)], dim=1)
        self._write(table, slot, ids + [-1] * (table.shape[1] - len(ids)))
        return table

    def _assign_bias(self, slot: int, params: SamplingParams) -> int:
        taken = set(self._bias_rows.values())
        row = next(i for i in range(len(taken) + 1) if i not in taken)
        if row >= self.bias.shape[0]:
            more = torch.zeros(max(1, self.bias.shape[0]), self.vocab, device=self.device)
            self._retired.append(self.bias)
            self.bias = torch.cat([self.bias, more])
        values = torch.zeros(self.vocab, pin_memory=self.device.type == "cuda")
        if params.allowed_token_ids is not None:
            values.fill_(-torch.inf)
            values[list(params.allowed_token_ids)] = 0.0
        for token, bias in (params.logit_bias or {}).items():
            values[token] += bias
        self.bias[row].copy_(values, non_blocking=True)
        self._bias_rows[slot] = row
        return row

    def _assign_bad_words(self, slot: int, words: Sequence[Sequence[int]]) -> None:
        count = max(power_of_two(len(words)), self.bad_words.shape[1])  # few shapes: loops are captured for each
        width = max(power_of_two(max(map(len, words))), self.bad_words.shape[2])
        if (count, width) != tuple(self.bad_words.shape[1:]):
            grown = self._word_tables.get((count, width))  # the same one again: captured passes read it
            grown = self._filled(self.slots, count, width) if grown is None else grown.fill_(-1)
            self._word_tables[count, width] = grown
            grown[:, : self.bad_words.shape[1], width - self.bad_words.shape[2] :] = self.bad_words
            self.bad_words = grown
        table = [[-1] * (width - len(word)) + list(word) for word in words]
        table += [[-1] * width for _ in range(count - len(words))]
        host = torch.tensor(table, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.bad_words[slot].copy_(host, non_blocking=True)


def _slot_needs(
    params: SamplingParams, vocab: int, acceptance: str, synthetic: bool, bad_words: bool, stop_ids: int
) -> SlotNeeds:
    chosen = params.acceptance or ("coupled" if params.seed is not None else acceptance)
    mode = Mode.GREEDY if params.greedy else Mode[chosen.upper()]
    sampled = mode is not Mode.GREEDY
    return SlotNeeds(
        mode=mode,
        synthetic=synthetic,
        bias=bool(params.logit_bias) or params.allowed_token_ids is not None,
        bad_words=bad_words,
        min_tokens=params.min_tokens > 0,
        repetition=params.repetition_penalty != 1.0,
        counts=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
        temperature=sampled and params.temperature != 1.0,
        min_p=sampled and params.min_p > 0.0,
        top_k=params.top_k if sampled and 0 < params.top_k < vocab else TOP_OFF,
        top_p=sampled and params.top_p < 1.0,
        stop_ids=stop_ids,
        logprobs=-1 if params.logprobs is None else params.logprobs,
    )
