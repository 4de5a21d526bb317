"""Sends a workload to an arm and notes when outputs come. Knows requests and a clock; nothing of how an arm answers.

An arm is what is measured: a server at some address, or an engine of some settings in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from verifypd.bench.figures import Outcome, Record
from verifypd.bench.workload import Arrival, Workload
from verifypd.errors import VerifyPDError
from verifypd.metrics.pauses import frozen_heap

WARM_REQUESTS = 32
WARM_OUTPUT = 16  # tokens
COUNTING = 3.0  # s that a server may take to count what it sent
TICK = 1.0  # s between two looks at a run that goes on


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of drafts, counted since an arm started."""

    spans: int = 0  # drafts that were judged
    tokens: int = 0  # their tokens
    accepted: tuple[int, ...] = ()  # by place: drafts whose first, second, … token stood
    emitted: int | None = None  # tokens of all outputs; None: it does not say
    drafted: tuple[int, ...] = ()  # by place: drafts that had a first, second, … token; empty: it does not say

    def since(self, before: Drafts) -> Drafts | None:
        """What was counted after `before`; None where the count began anew, as that of an engine that died."""
        accepted, drafted = (
            tuple(now - then for now, then in itertools.zip_longest(mine, theirs, fillvalue=0))
            for mine, theirs in ((self.accepted, before.accepted), (self.drafted, before.drafted))
        )
        spans, tokens = self.spans - before.spans, self.tokens - before.tokens
        whole = min(spans, tokens, *accepted, *drafted) >= 0
        return Drafts(spans, tokens, accepted, drafted=drafted) if whole else None

    def plus(self, spans: int, drafted: Sequence[int], accepted: Sequence[int]) -> Drafts:
        """With so many more drafts, whose places are counted."""
        both = (
            tuple(one + two for one, two in itertools.zip_longest(mine, more, fillvalue=0))
            for mine, more in ((self.accepted, accepted), (self.drafted, drafted))
        )
        stood, had = both
        return Drafts(self.spans + spans, self.tokens + sum(drafted), stood, drafted=had)

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        own = {"spans": self.spans, "tokens": self.tokens, "accepted": list(self.accepted)}
        return own | ({"drafted": list(self.drafted)} if self.drafted else {})

    @classmethod
    def unpacked(cls, data: dict[str, Any] | None) -> Drafts | None:
        """What `packed` made."""
        if data is None:
            return None
        return cls(data["spans"], data["tokens"], tuple(data["accepted"]), drafted=tuple(data.get("drafted", ())))


class Answer(Protocol):
    """Where an arm says what came."""

    def came(self, tokens: int) -> None:
        """An output, now; tokens: how many it has, 0 where nobody says."""
        ...

    def ended(self, tokens: int, prompt_tokens: int) -> None:
        """It is whole; the tokens of all outputs, and of the prompt where it is known."""
        ...


class Arm(Protocol):
    """Something that answers requests."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def spec(self) -> dict[str, Any]:
        """What tells it from another arm; no secrets."""
        ...

    async def start(self) -> dict[str, Any]:
        """Be ready; returns what a reader of its figures may want to know."""
        ...

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Answer one request. seed: of its random tokens, where its prompt is made of those."""
        ...

    async def drafts(self) -> Drafts | None:
        """What became of drafts since it started; None: it does not say."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


@runtime_checkable
class Tunable(Protocol):
    """An arm that takes other settings from one scenario to the next."""

    async def prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Be ready to run under these; returns what a reader of its figures may want to know."""
        ...


@runtime_checkable
class Pausing(Protocol):
    """An arm that may say what held up its steps besides their work."""

    async def pauses(self) -> dict[str, float] | None:
        """Kernels compiled, graphs captured, garbage collected, memory got from the driver, since it started: how
        often, and ms. None: it does not say."""
        ...


@runtime_checkable
class Player(Protocol):
    """An arm that plays a whole workload by itself, in a time of its own."""

    async def play(self, workload: Workload, seconds: float) -> Outcome:
        """What came of it; stopped after `seconds`."""
        ...


@dataclass(slots=True)
class Call:
    """One request on its way, s from the start of the run."""

    arrival: Arrival
    seed: int
    clock: Callable[[], float]
    due: float
    sent: float | None = None
    outputs: list[float] = field(default_factory=list)
    tokens: int = 0
    first: int = 0
    told: int = 0  # tokens as its outputs say
    prompt_tokens: int = 0
    whole: bool = False
    mute: bool = False  # it ended without having shown a token
    stopped: float | None = None
    error: str = ""

    def came(self, tokens: int) -> None:
        """As `Answer` says."""
        self.first = self.first or max(1, tokens)
        self.tokens += max(1, tokens)
        self.told = self.tokens
        self.outputs.append(self.clock())

    def ended(self, tokens: int, prompt_tokens: int) -> None:
        """As `Answer` says."""
        if tokens and not self.outputs:  # tokens without text
            self.mute = True
            self.came(tokens)
        self.tokens = tokens or self.tokens
        self.prompt_tokens = prompt_tokens
        self.whole = True

    @property
    def going(self) -> bool:
        """Whether it was sent, and has not ended."""
        return self.sent is not None and not (self.whole or self.error or self.stopped is not None)

    def record(self) -> Record:
        """What became of it."""
        sent = self.due if self.sent is None else self.sent
        ended = self.whole and not self.error
        outputs = tuple(self.outputs)
        return Record(
            self.due, sent, outputs, self.tokens, self.first, ended, self.stopped, self.error, self.prompt_tokens
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop, and how much at once."""

    seconds: float = 600.0  # of a run; what is under way then is stopped
    each: float = 300.0  # s of a request
    at_once: int | None = None  # requests under way at most, in an open loop


async def play(
    arm: Arm,
    workload: Workload,
    limits: Limits,
    watch: Callable[[Call], None] = lambda _: None,
    tick: Callable[[Sequence[Call]], None] = lambda _: None,
) -> Outcome:
    """Send it all. Nothing is lost: what fails is in the outcome.

    watch: told of each request that has ended. tick: once a second of those that are under way.

    The heap is frozen meanwhile: a full garbage collection here would look like a pause of the arm.
    """
    if isinstance(arm, Player):
        return await arm.play(workload, limits.seconds)
    with frozen_heap():
        return await _play(arm, workload, limits, watch, tick)


async def _play(
    arm: Arm,
    workload: Workload,
    limits: Limits,
    watch: Callable[[Call], None],
    tick: Callable[[Sequence[Call]], None],
) -> Outcome:
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    calls = [Call(each, workload.seed + i, clock, each.at) for i, each in enumerate(workload.arrivals)]
    gate = asyncio.Semaphore(limits.at_once or len(calls))
    if workload.clients is not None:
        queue = iter(calls)
        running = [_client(arm, queue, limits, watch) for _ in range(min(workload.clients, len(calls)))]
    else:
        running = [_due(arm, call, gate, limits, watch) for call in calls]
    tasks = [asyncio.ensure_future(each) for each in running]
    ticker = asyncio.ensure_future(_ticks(calls, tick))
    try:
        _, late = await asyncio.wait(tasks, timeout=limits.seconds)
        over = clock()
    finally:
        for task in (*tasks, ticker):
            task.cancel()
        results = await asyncio.gather(*tasks, ticker, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    begun = [call for call in calls if call.sent is not None or (workload.clients is None and call.due <= over)]
    if not late:
        over = max((call.outputs[-1] for call in begun if call.outputs), default=over)
    estimate_cut(begun)
    return Outcome(tuple(call.record() for call in begun), len(calls), over)


def estimate_cut(calls: Sequence[Call]) -> None:
    """Give answers that were cut off as many tokens an output as whole ones had: a server counts only those, and an
    output of it may bring several."""
    whole = [call for call in calls if call.whole]
    told = sum(call.told - call.first for call in whole)
    each = sum(call.tokens - call.first for call in whole) / told if told else 1.0
    for call in calls:
        if not call.whole:
            call.tokens = call.first + round(each * (call.told - call.first))


async def _ticks(calls: Sequence[Call], tick: Callable[[Sequence[Call]], None]) -> None:
    while True:
        await asyncio.sleep(TICK)
        tick([call for call in calls if call.going])


async def _client(arm: Arm, queue: Iterator[Call], limits: Limits, watch: Callable[[Call], None]) -> None:
    for call in queue:
        call.due = call.clock()
        await serve(arm, call, limits, watch)


async def _due(arm: Arm, call: Call, gate: asyncio.Semaphore, limits: Limits, watch: Callable[[Call], None]) -> None:
    await asyncio.sleep(max(0.0, call.due - call.clock()))
    async with gate:
        await serve(arm, call, limits, watch)


async def serve(arm: Arm, call: Call, limits: Limits, watch: Callable[[Call], None]) -> None:
    """One request; a time-out and an error are noted, and the run goes on."""
    call.sent = call.clock()
    try:
        async with asyncio.timeout(limits.each):
            await arm.ask(call.arrival, call.seed, call)
        if not call.whole:
            call.error = "the answer broke off"
    except TimeoutError:
        call.stopped = call.clock()
    except (VerifyPDError, OSError) as error:
        call.error = " ".join(str(error).split())[:300] or type(error).__name__
    watch(call)


async def counted(arm: Arm, before: Drafts | None, tokens: int) -> Drafts | None:
    """What an arm has counted, once it has counted `tokens` more than before: a server may report late."""
    until = time.perf_counter() + COUNTING
    while True:
        now = await arm.drafts()
        if now is None or before is None or now.emitted is None or before.emitted is None:
            return now
        if now.emitted - before.emitted >= tokens or time.perf_counter() > until:
            return now
        await asyncio.sleep(0.05)


async def warm_up(arm: Arm, workload: Workload, limits: Limits) -> int:
    """The workload in short: as many requests at once as it will have, up to 32, with short outputs.

    An arm that answers none of them is refused: its figures would all be of failures. So is one whose answers
    have no text: its first tokens could not be timed. Returns the tokens that came.
    """
    if isinstance(arm, Player):
        return 0
    count = min(WARM_REQUESTS, workload.clients or 8, len(workload.arrivals))
    few = workload.marked("warm").scaled(1, count)
    arrivals = [
        Arrival(0.0, a.prompt_tokens, min(a.output_tokens, WARM_OUTPUT), a.prompt, a.messages) for a in few.arrivals
    ]
    calls: list[Call] = []
    outcome = await play(arm, Workload("warm-up", 0.0, tuple(arrivals), None, few.seed), limits, calls.append)
    refuse_unanswered(arm, outcome)
    whole = [call for call in calls if call.whole and not call.error]
    if whole and all(call.mute for call in whole):
        raise VerifyPDError(
            f"{arm.name} sends tokens without text; where its model has no tokenizer give --field return_token_ids=true"
        )
    return sum(record.tokens for record in outcome.records)


def refuse_unanswered(arm: Arm, outcome: Outcome) -> None:
    """Raise where every request failed, as of a server that has died: there is nothing to measure."""
    if outcome.records and all(record.error for record in outcome.records):
        raise VerifyPDError(f"{arm.name} answers no request: {outcome.records[0].error}")
