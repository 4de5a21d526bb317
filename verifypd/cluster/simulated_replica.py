"""One replica on a manual clock, and what comes to it. It steps as its `Pace` says, all requests that decode at once.

That is what makes thousands of replicas cheap. Knows no engine, no other replica, no text.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifypd.control.prompts import prompt_key
from verifypd.simulate.pace import Pace


@dataclass(frozen=True, slots=True)
class Beginning:
    """A part of prompts that others begin with too."""

    name: bytes
    tokens: int  # from the start of the prompt to its end


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it comes to the cluster."""

    at: float  # s
    prompt: int  # tokens
    output: int  # tokens
    beginnings: tuple[Beginning, ...] = ()  # the longest last


@dataclass(frozen=True, slots=True)
class World:
    """What a cluster is made of, beside its settings."""

    pace: Pace
    cache_tokens: int = 1 << 62  # that a replica has room for
    ingress_seconds: float = 0.0  # from the arrival of a request until a replica has it
    line_seconds: float = 0.0  # from the end of a step until its tokens are with the client
    notice_seconds: float = 1.0  # from the death of a replica until its calls are sent again
    start_seconds: float = 60.0  # that a new replica takes to be up
    fail_every: float = math.inf  # mean s between two deaths, of all replicas
    fail_at: float = math.inf  # s, when one dies in any case
    retries: int = 2
    slo_ttft: float = 500.0  # ms
    slo_tpot: float = 15.0  # ms
    seed: int = 0


class Stream:
    """A request under way."""

    __slots__ = (
        *("asked", "order", "written", "unread", "base", "first", "ended", "tries", "moves", "fell", "pause"),
        *("cached", "lost", "noise", "here"),
    )

    def __init__(self, order: int, asked: Asked, noise: float = 0.0) -> None:
        self.order = order
        self.noise = noise  # how lucky it is with its drafts
        self.asked = asked
        self.written = 0  # tokens, in replicas that died
        self.unread = asked.prompt  # tokens of prompt, and of output where it was moved
        self.base = 0.0  # what its replica had written for everybody when it began to decode
        self.first: float | None = None  # s, when its first token came
        self.ended: float | None = None
        self.tries = 0  # since it last got a token
        self.here = math.inf  # s, when its first token of this replica comes
        self.moves = 0
        self.fell = 0.0  # s, when its replica died
        self.pause = 0.0  # s, the longest that a death cost
        self.cached = 0
        self.lost = False

    @property
    def left(self) -> int:
        """Tokens to write."""
        return self.asked.output - self.written

    @property
    def tpot(self) -> float:
        """s a token after the first."""
        if self.first is None or self.ended is None or self.asked.output < 2:
            return 0.0
        return (self.ended - self.first) / (self.asked.output - 1)

    def met(self, world: World) -> bool:
        """Whether it ended within both targets."""
        if self.first is None or self.ended is None:
            return False
        return (self.first - self.asked.at) * 1e3 <= world.slo_ttft and self.tpot * 1e3 <= world.slo_tpot


class Cache:
    """What a replica has read; what was used longest ago makes room."""

    def __init__(self, tokens: int) -> None:
        self.most = tokens
        self.total = 0
        self._held: OrderedDict[bytes | int, int] = OrderedDict()

    def find(self, beginnings: Sequence[Beginning]) -> int:
        """Tokens of a prompt that need not be read."""
        for each in reversed(beginnings):
            if each.name in self._held:
                return each.tokens
        return 0

    def keep(self, stream: Stream) -> None:
        """A prompt was read, and its output will be."""
        start = 0
        for each in stream.asked.beginnings:
            self._put(each.name, each.tokens - start)
            start = each.tokens
        self._put(stream.order, stream.asked.prompt + stream.asked.output - start)

    def _put(self, name: bytes | int, tokens: int) -> None:
        self.total += tokens - self._held.pop(name, 0)
        self._held[name] = tokens
        while self.total > self.most:
            self.total -= self._held.popitem(last=False)[1]


class Replica:
    """One engine, all of whose decoding requests advance together."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.world = world
        self.life = 0  # how often it was started
        self.up = False
        self.draining = False
        self.begin()

    def begin(self) -> None:
        """It is up, and empty."""
        self.waiting: list[Stream] = []
        self.reading: list[Stream] = []
        self.decoding: list[tuple[float, int, Stream]] = []  # heap: what will have been written when it ends
        self.leaving: deque[tuple[float, Stream]] = deque()  # when the last token is out
        self.unread = 0
        self.written = 0.0  # tokens for everybody who was there all the time
        self.free = 0.0  # s, when the device has run what was launched
        self.stepping = False
        self.cache = Cache(self.world.cache_tokens)
        self.verdicts: deque[tuple[float, bool]] = deque()
        self.looks: deque[tuple[int, int]] = deque()  # running and waiting, at the autoscaler's looks

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self.reading) + len(self.decoding) + len(self.leaving)

    def step(self, now: float, end: Callable[[Replica, Stream], None]) -> float | None:
        """One step; returns when the next is due, None: there is nothing to do. `end` is told who has all tokens."""
        while self.leaving and self.leaving[0][0] <= now:
            end(self, self.leaving.popleft()[1])
        if self.waiting:
            self._admit(now)
        if not self.decoding and not self.reading:
            return self.leaving[0][0] if self.leaving else None
        pace = self.world.pace
        seconds, written, read = pace.step(len(self.decoding) + len(self.leaving), self.unread)
        start = max(now, self.free)
        self.free = start + seconds
        self.written += written
        while self.decoding and self.decoding[0][0] <= self.written:
            self.leaving.append((self.free, heapq.heappop(self.decoding)[2]))
        if self.reading:
            self._read(now, max(1, round(read)))
        if not pace.late:
            return self.free
        return start if start > now else now + pace.host_seconds

    def _admit(self, now: float) -> None:
        while self.waiting and self.running < self.world.pace.slots:
            stream = min(self.waiting, key=lambda stream: self._key(stream, now))
            self.waiting.remove(stream)
            stream.here = math.inf
            stream.cached = self.cache.find(stream.asked.beginnings)
            stream.unread = max(1, stream.asked.prompt + stream.written - stream.cached)
            self.reading.append(stream)
            self.unread += stream.unread

    def _key(self, stream: Stream, now: float) -> tuple[int, bool, float, int]:
        return prompt_key((0, stream.order), stream.unread, now - stream.asked.at, self.world.slo_ttft, slo_gap=0.0)

    def _read(self, now: float, tokens: int) -> None:
        """Prompts in the engine's own order; who is read whole has its first token when the step ends."""
        for stream in sorted(self.reading, key=lambda stream: self._key(stream, now)):
            part = min(tokens, stream.unread)
            tokens -= part
            stream.unread -= part
            self.unread -= part
            if stream.unread:
                return
            self.reading.remove(stream)
            self.cache.keep(stream)
            if stream.first is None:
                stream.first = self.free
            if stream.moves:
                stream.pause = max(stream.pause, self.free - stream.fell)
            stream.here, stream.base = self.free, self.written
            if stream.left <= 1:
                self.leaving.append((self.free, stream))
            else:
                until = self.written + self.world.pace.luck(stream.left - 1, stream.noise)
                heapq.heappush(self.decoding, (until, stream.order, stream))

    def die(self, now: float) -> list[Stream]:
        """Its requests, each with the tokens it had. Who got any here may lose as many replicas again."""
        found = [*self.waiting, *self.reading, *(s for _, _, s in self.decoding), *(s for _, s in self.leaving)]
        for stream in found:
            if stream.here <= now:
                stream.written += min(stream.left - 1, 1 + int(self.written - stream.base))
                stream.tries = 0
            if stream.first is not None and stream.first > now:  # it was on its way
                stream.first = None
            stream.unread = stream.asked.prompt + stream.written
            stream.here = math.inf
        self.up = False
        self.life += 1
        return found
