"""A cluster on a manual clock: replicas, who gets a call, replicas that die, how many there are.

Replicas step as their `Pace` says, all requests that decode at once: that is what makes thousands of them cheap. Calls
are routed and replicas counted by the rules that the cluster itself has (`prefixes`, `scaling`). Knows no engine, no
Ray, no text.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from verifypd.cluster.config import ClusterConfig
from verifypd.cluster.prefixes import BLOCK, LONGEST, PrefixMap, goes_home
from verifypd.cluster.scaling import ReplicaLoad, wanted
from verifypd.control.prompts import prompt_key
from verifypd.simulate.pace import Pace

LATELY = 60.0  # s, of requests that count for the goodput
TICK = 10.0  # s between two looks of the autoscaler
BEHIND = 1 << 32  # a call more weighs as much as so many beginnings that are held
AWAY = 1 << 28  # calls of a replica that takes none, as it seems


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
        return prompt_key((0, stream.order), stream.unread, now - stream.asked.at, self.world.slo_ttft)

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


class _Held(Counter[int]):
    """Beginnings of each replica, kept in an array too."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.array = np.zeros(most, dtype=np.int64)

    def __setitem__(self, replica: int, value: int) -> None:
        self.array[replica] = value
        super().__setitem__(replica, value)

    def __delitem__(self, replica: Any) -> None:
        self.array[replica] = 0
        super().__delitem__(replica)


class Loads:
    """Calls of every replica, and who takes any."""

    def __init__(self, most: int) -> None:
        self.alive: dict[int, None] = {}
        self.calls = np.full(most, AWAY, dtype=np.int64)

    def welcome(self, replica: int, takes: bool) -> None:
        """Whether a replica takes calls from now on."""
        if takes and replica not in self.alive:
            self.alive[replica] = None
            self.calls[replica] -= AWAY
        elif not takes and replica in self.alive:
            del self.alive[replica]
            self.calls[replica] += AWAY


class Sender:
    """An ingress: chooses as `prefixes.choose` does, without looking at the replicas one by one."""

    def __init__(self, routing: str, slack: int, loads: Loads) -> None:
        self.routing, self.slack, self.loads = routing, slack, loads
        self.prefixes: PrefixMap[int] = PrefixMap()
        self.prefixes.held = self._held = _Held(len(loads.calls))
        self._turns = count()

    def choose(self, prefix: Sequence[bytes]) -> int | None:
        """The replica that a call goes to; None: there is none."""
        alive, calls = self.loads.alive, self.loads.calls
        if not alive:
            return None
        if self.routing == "round-robin":
            ordered = list(alive)
            return ordered[next(self._turns) % len(ordered)]
        if self.routing == "load":
            return int(np.argmin(calls))
        idlest = int(np.argmin(calls * BEHIND + self._held.array))
        home = self.prefixes.home(prefix, alive)
        chosen = home if home is not None and goes_home(int(calls[home]), int(calls[idlest]), self.slack) else idlest
        self.prefixes.sent(prefix, chosen)
        return chosen


class Names:
    """Names of the beginnings of prompts, as `prefixes.digests` has them, from no tokens."""

    def __init__(self) -> None:
        self._known: dict[Beginning, list[bytes]] = {}

    def of(self, stream: Stream) -> list[bytes]:
        """The longest last."""
        asked = stream.asked
        shared: list[bytes] = []
        for each in asked.beginnings:
            if each not in self._known:
                blocks = range(len(shared), each.tokens // BLOCK)
                self._known[each] = [*shared, *(each.name + block.to_bytes(2) for block in blocks)]
            shared = self._known[each]
        own = range(len(shared), min(LONGEST, (asked.prompt - 1) // BLOCK))
        name = b"own" + stream.order.to_bytes(8)
        return shared[:LONGEST] + [name + block.to_bytes(2) for block in own]


@dataclass
class Result:
    """What came of it."""

    streams: list[Stream]
    seconds: float
    deaths: int = 0
    steps: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)  # s, and how many replicas there were from then on


class Cluster:
    """Plays requests through replicas."""

    def __init__(self, config: ClusterConfig, world: World) -> None:
        self.config, self.world = config, world
        self.now = 0.0
        self.replicas = [Replica(number, world) for number in range(config.most)]
        self.loads = Loads(config.most)
        self.senders = [
            Sender(config.routing, config.routing_slack, self.loads) for _ in range(config.ingress_replicas)
        ]
        self.names = Names()
        self.parked: list[Stream] = []  # there was no replica
        self.target = config.replicas
        self.deaths = self.steps = self.open = 0
        self.coming = True  # whether there are requests that have not come yet
        self.sizes: list[tuple[float, int]] = []
        self._direction = 0  # whether more or fewer are wanted
        self._due = 0.0  # s, since when
        self._rng = random.Random(f"cluster/{world.seed}")
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, what: Callable[..., None], *given: Any) -> None:
        """Do something later."""
        heapq.heappush(self._events, (when, next(self._numbers), what, given))

    def play(self, requests: Iterable[Asked]) -> Result:
        """All requests, in the order in which they come, until the last has ended."""
        for replica in self.replicas[: self.config.replicas]:
            self._start(replica, replica.life)
        if self.world.fail_every < math.inf:
            self.at(self._rng.expovariate(1 / self.world.fail_every), self._fail)
        if self.world.fail_at < math.inf:
            self.at(self.world.fail_at, self._kill)
        if self.config.most > self.config.replicas:
            self.at(TICK, self._scale)
        streams: list[Stream] = []
        for asked in requests:
            due = asked.at + self.world.ingress_seconds
            self._until(due)
            self.now = due
            stream = Stream(len(streams), asked, self._rng.gauss())
            streams.append(stream)
            self.open += 1
            self._send(stream)
        self.coming = False
        while self.open:
            self._until(self._events[0][0])
        return Result(streams, self.now, self.deaths, self.steps, self.sizes)

    def _until(self, when: float) -> None:
        events = self._events
        while events and events[0][0] <= when:
            self.now, _, what, given = heapq.heappop(events)
            what(*given)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _send(self, stream: Stream) -> None:
        """To the replica that the stream's ingress chooses."""
        stream.tries += 1
        if stream.tries > self.world.retries + 1:
            stream.lost = True
            self.open -= 1
            return
        sender = self.senders[stream.order % len(self.senders)]
        chosen = sender.choose(self.names.of(stream) if self.config.routing == "prefix" else ())
        if chosen is None:
            self.parked.append(stream)
            return
        replica = self.replicas[chosen]
        replica.waiting.append(stream)
        self.loads.calls[chosen] += 1
        if not replica.stepping:
            replica.stepping = True
            self._step(replica, replica.life)

    def _step(self, replica: Replica, life: int) -> None:
        if life != replica.life:
            return
        self.steps += 1
        due = replica.step(self.now, self._end)
        if due is None:
            replica.stepping = False
            if replica.draining:
                self._retire(replica)
        else:
            self.at(due, self._step, replica, life)

    def _end(self, replica: Replica, stream: Stream) -> None:
        line = self.world.line_seconds
        stream.ended = self.now + line
        stream.first = (stream.first or self.now) + line
        self.open -= 1
        self.loads.calls[replica.number] -= 1
        if not stream.moves:
            replica.verdicts.append((self.now, stream.met(self.world)))

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _start(self, replica: Replica, life: int) -> None:
        if life != replica.life or replica.up:
            return
        replica.begin()
        replica.up, replica.draining = True, False
        self.loads.welcome(replica.number, True)
        self._note_size()
        parked, self.parked = self.parked, []
        for stream in parked:
            stream.tries -= 1
            self._send(stream)

    def _note_size(self) -> None:
        self.sizes.append((self.now, sum(each.up and not each.draining for each in self.replicas)))

    def _close(self, replica: Replica) -> None:
        self.loads.welcome(replica.number, False)
        self._note_size()

    def _retire(self, replica: Replica) -> None:
        replica.up = replica.draining = False
        replica.life += 1

    def _fail(self) -> None:
        """A replica dies, and at some time another."""
        if self.open or self.coming:
            self.at(self.now + self._rng.expovariate(1 / self.world.fail_every), self._fail)
        self._kill()

    def _kill(self) -> None:
        """A replica dies. Its calls go on elsewhere once that is noticed, and another is started in its place."""
        alive = [each for each in self.replicas if each.up]
        if not alive:
            return
        self.deaths += 1
        victim = self._rng.choice(alive)
        again = not victim.draining
        moved = victim.die(self.now)
        self._close(victim)
        self.loads.calls[victim.number] -= len(moved)
        for stream in moved:
            stream.fell = self.now
            stream.moves += 1
        self.at(self.now + self.world.notice_seconds, self._move, moved)
        if again:
            self.at(self.now + self.world.start_seconds, self._start, victim, victim.life)

    def _move(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self._send(stream)

    # -- how many -----------------------------------------------------------------------------------------------------

    def _scale(self) -> None:
        """The autoscaler's look: as many as are wanted, once they have been wanted for long enough."""
        if self.open or self.coming:
            self.at(self.now + TICK, self._scale)
        config = self.config
        number = min(config.most, max(config.replicas, wanted(self._loads(), config.goodput_goal)))
        direction = (number > self.target) - (number < self.target)
        if direction != self._direction:
            self._direction, self._due = direction, self.now
        delay = config.upscale_delay if direction > 0 else config.downscale_delay
        if direction and self.now - self._due >= delay:
            self._resize(number)

    def _loads(self) -> list[ReplicaLoad]:
        found = []
        looks = max(1, round(self.config.look_back / TICK))
        for replica in self.replicas:
            if not replica.up or replica.draining:
                continue
            replica.looks.append((replica.running, len(replica.waiting)))
            while len(replica.looks) > looks:
                replica.looks.popleft()
            while replica.verdicts and replica.verdicts[0][0] < self.now - LATELY:
                replica.verdicts.popleft()
            running, waiting = (sum(each) / len(replica.looks) for each in zip(*replica.looks, strict=True))
            good = [met for _, met in replica.verdicts]
            share = sum(good) / len(good) if good else 1.0
            found.append(ReplicaLoad(running, waiting, self.world.pace.slots, share))
        return found

    def _resize(self, number: int) -> None:
        """Start replicas that are missing, or have the idlest finish what they have."""
        alive = [each for each in self.replicas if each.up and not each.draining]
        if number > self.target:
            idle = [each for each in self.replicas if not each.up]
            for replica in idle[: number - self.target]:
                self.at(self.now + self.world.start_seconds, self._start, replica, replica.life)
        else:
            for replica in sorted(alive, key=lambda each: each.running + len(each.waiting))[: self.target - number]:
                replica.draining = True
                self._close(replica)
                if not replica.stepping:
                    self._retire(replica)
        self.target, self._direction = number, 0
