"""Which prompts join a step, and how many of their tokens. Arithmetic over costs and targets; no clock.

Prompts are read in the order of their weight over tokens left, as many tokens as have the greatest value
(`control/value.py`) within bounds: prompts are sure of `PROMPT_SHARE` of a step; a step lasts no longer than `slo_gap`
where a shorter one is possible, unless so many prompts wait that gaps and first tokens are less late together in longer
ones (`_bound`); one that has waited `OVERDUE` times its target goes first; at most one prompt is partly read. Offline,
where answers are read when all are written, prompts go first: batches are fullest so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf, sqrt
from typing import NamedTuple, TypeVar

from verifypd.batch import VerifySpan
from verifypd.buckets import CHUNKS
from verifypd.control.cost import NOTHING, CostModel, Work
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.tuning import OVERDUE, PROMPT_SHARE
from verifypd.control.value import MS, value, weight

COUNTED = 256  # requests without a slot that are looked at, the first by rank: thousands would take a step to count
PRECISION = 128  # of a chunk: one part in so many, but a token at least
PromptKey = tuple[int, bool, float, int]
Asking = TypeVar("Asking")


@dataclass(frozen=True, slots=True)
class Beside:
    """The decode work of the step that prompts join."""

    decode: Work = NOTHING
    draft_seconds: float = 0.0
    worth: float = 0.0  # Σ decoding w · part of its tokens that the step writes
    apart: bool = False  # whether prompts get a pass of their own
    drafting: bool = False  # whether drafts are written, which may be verified later


class Room(NamedTuple):
    """What of prompts a step may take."""

    requests: int  # that get a chunk; one does at any rate
    tokens: int
    joining: int | None = None  # prompts that are finished; the others stop one token short. None: any number


@dataclass(frozen=True, slots=True)
class Chunk:
    """How many prompt tokens join a step, what the step then takes, and their value."""

    tokens: int
    seconds: float
    value: float


def prompt_key(rank: tuple[int, int], left: int, waited: float, slo_ttft: float, slo_gap: float) -> PromptKey:
    """Lower is read first, and admitted first. rank: priority and arrival; waited: s; slo_ttft, slo_gap: ms.

    Of those that are overdue the one with the fewest tokens for the time it has waited: a short one soon, a long one in
    the end.
    """
    priority, arrival = rank
    if waited * MS > OVERDUE * _reachable(slo_ttft, slo_gap):
        return priority, False, left / waited, arrival
    late = waited * MS > slo_ttft
    return priority, True, left * slo_ttft / (2.0 if late else 1.0), arrival


def admissible(
    queue: Sequence[Asking], held: Sequence[Asking], unread: int, prefill_chunk: int, key: Callable[[Asking], PromptKey]
) -> Asking | None:
    """Who of the queue, which is sorted by rank, gets the next free slot: who is read first. None: nobody yet.

    No more prompts hold a slot before they are read than the next passes take: who comes later may be shorter.
    held: these, with `unread` tokens in all.
    """
    first = min(queue[:COUNTED], key=key)
    enough = len(held) >= CHUNKS and unread >= prefill_chunk
    return None if enough and key(first) >= max(map(key, held)) else first


def _reachable(slo_ttft: float, slo_gap: float) -> float:
    """A target for the first token that can be kept: two steps at least, since one may be under way."""
    return max(slo_ttft, 2.0 * slo_gap)


def in_order(snapshot: Snapshot) -> list[RequestView]:
    """The prompts that wait for the verifier, the next to be read first."""
    waiting, gap = [view for view in snapshot.requests if view.prefill_left], snapshot.slo_gap
    return sorted(
        waiting, key=lambda view: prompt_key(view.rank, view.prefill_left, view.since_output, view.slo_ttft, gap)
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt chunks of a step, and what they were chosen over; nothing is weighed while nobody decodes."""

    spans: tuple[VerifySpan, ...] = ()
    chosen: Chunk | None = None
    runner_up: Chunk | None = None

    @property
    def work(self) -> Work:
        """In numbers."""
        rows, square = sum([span.rows for span in self.spans]), sum([span.rows * span.context for span in self.spans])
        return Work(rows, sum([span.context for span in self.spans]), rows, square)

    @property
    def second(self) -> float:
        """What a second of the step is worth, in seconds of it without prompts: 1 or more; inf: nothing was weighed."""
        return 1.0 + max(0.0, self.chosen.value / self.chosen.seconds) if self.chosen else inf


def next_chunks(snapshot: Snapshot, cost: CostModel, beside: Beside, room: Room) -> Reading:
    """The prompt chunks of a step."""
    waiting = in_order(snapshot)
    if not waiting:
        return Reading()
    room = room._replace(requests=max(1, min(room.requests, snapshot.most_chunks)))
    if snapshot.offline or not cost.fitted or not (beside.decode.rows or beside.drafting):
        return Reading(tuple(_spans(waiting, room.tokens, room)))
    ranked = sorted(candidates(waiting, snapshot, cost, beside, room), key=lambda chunk: (-chunk.value, -chunk.tokens))
    return Reading(tuple(_spans(waiting, ranked[0].tokens, room)), *ranked[:2])


def candidates(
    waiting: Sequence[RequestView], snapshot: Snapshot, cost: CostModel, beside: Beside, room: Room
) -> list[Chunk]:
    """Chunks to choose from: prompts' sure share of a step, the end of each prompt within the bound, and the bound."""
    count = room.requests

    @cache
    def chunk(tokens: int) -> Chunk:
        work, read = _read(waiting, tokens, count)
        seconds = _seconds(work, beside, cost)
        rate = beside.worth and beside.worth / alone  # 0: nobody decodes, and seconds cost nothing
        return Chunk(tokens, seconds, value(seconds - alone, read, rate) if rate else inf)

    def largest(limit: float) -> int:
        """Most tokens with which the step keeps within the limit (s)."""
        low, high = 0, min(room.tokens, ends[-1])
        if chunk(high).seconds <= limit:
            return high
        while high - low > 1 + low // PRECISION:
            middle = (low + high) // 2
            low, high = (middle, high) if chunk(middle).seconds <= limit else (low, middle)
        return max(1, low)

    alone, ends = _seconds(NOTHING, beside, cost), list(accumulate(view.prefill_left for view in waiting[:count]))
    least = chunk(1).seconds  # what a step with any prompt takes
    share = least / (1.0 - PROMPT_SHARE)
    sure, most = largest(share), largest(max(share, _bound(least, waiting, snapshot, cost)))
    return [chunk(tokens) for tokens in sorted({sure, most, *(end for end in ends if sure < end < most)})]


def _read(waiting: Sequence[RequestView], tokens: int, count: int) -> tuple[Work, float]:
    """The work of reading so many tokens, and Σ waiting w · part read."""
    total, context, square, parts = 0.0, 0.0, 0.0, 0.0
    for view, rows in _turns(waiting, tokens, count):
        end = view.chunk_start + rows
        total, context, square = total + rows, context + end, square + rows * end
        late = view.since_output * MS > view.slo_ttft
        parts += weight(view.slo_ttft, late) * rows / view.prefill_left
    return Work(total, context, total, square), parts


def _turns(waiting: Sequence[RequestView], budget: int, count: int) -> Iterator[tuple[RequestView, int]]:
    """Prompts in the order in which they get tokens, and how many each may get.

    One that does not fit whole gives way to one of no worse priority that is partly read already.
    """
    left, queue = budget, list(waiting)
    for _ in range(count):
        if not left or not queue:
            return
        view = queue[0]
        if view.prefill_left > left:
            view = next((other for other in queue if other.served and other.rank[0] <= view.rank[0]), view)
        queue.remove(view)
        rows = min(view.prefill_left, left)
        left -= rows
        yield view, rows


def _spans(waiting: Sequence[RequestView], budget: int, room: Room) -> Iterator[VerifySpan]:
    joining = room.joining
    for view, most in _turns(waiting, budget, room.requests):
        full = joining is not None and joining <= 0
        rows = min(most, view.prefill_left - full)
        if not rows:
            continue
        ends = rows == view.prefill_left
        if ends and joining is not None:
            joining -= 1
        start, wanted = view.chunk_start, view.prompt_logprobs
        yield VerifySpan(view.slot, rows, 0, start, emits=ends, context=start + rows, prompt_logprobs=wanted)


def _seconds(chunks: Work, beside: Beside, cost: CostModel) -> float:
    """What the step takes."""
    if beside.apart:
        return beside.draft_seconds + cost.pass_seconds(beside.decode) + cost.pass_seconds(chunks) + cost.overhead
    return beside.draft_seconds + cost.pass_seconds(beside.decode + chunks) + cost.overhead


def _bound(least: float, waiting: Sequence[RequestView], snapshot: Snapshot, cost: CostModel) -> float:
    """Seconds a step may last: the gap target, or more where many prompts wait.

    Steps of T s, `least` with next to no prompt, read what waits, B s, in B · T / (T − least). T / gap + that / ttft,
    how late gaps and first tokens are, is least at what is returned, if that is over the gap target. Each prompt counts
    with its own target. Requests in the queue count as far as slots are free: the others wait for who decodes.
    """
    free = max(0, snapshot.batch_size - len(snapshot.requests) - snapshot.away)
    queued = snapshot.waiting_tokens * min(1.0, free / max(1, snapshot.waiting))
    tokens = sum(view.prefill_left for view in waiting) + queued
    shares = sum(view.prefill_left / _reachable(view.slo_ttft, snapshot.slo_gap) for view in waiting)
    shares += queued / _reachable(snapshot.slo_ttft, snapshot.slo_gap)
    lateness = cost.pass_seconds(Work(tokens, tokens, tokens)) / tokens * shares * MS  # B / ttft
    gap = snapshot.slo_gap / MS
    return max(gap, least + sqrt(least * gap * lateness))
