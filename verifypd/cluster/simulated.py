"""A cluster on a manual clock: its replicas, who gets a call, replicas that die, how many there are.

Calls are routed and replicas counted by the rules that the cluster itself has (`prefixes`, `scaling`). Knows no engine,
no Ray, no text.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from verifypd.cluster.config import ClusterConfig
from verifypd.cluster.scaling import ReplicaLoad, wanted
from verifypd.cluster.simulated_replica import Asked, Replica, Stream, World
from verifypd.cluster.simulated_routing import Loads, Names, Sender

LATELY = 60.0  # s, of requests that count for the goodput
TICK = 10.0  # s between two looks of the autoscaler


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
