"""Who gets a call of a simulated cluster: the rules of `prefixes`, over as many replicas as there are, at once.

Knows replicas by number and prompts by their beginnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from verifypd.cluster.prefixes import BLOCK, LONGEST, PrefixMap, goes_home
from verifypd.cluster.simulated_replica import Beginning, Stream

BEHIND = 1 << 32  # a call more weighs as much as so many beginnings that are held
AWAY = 1 << 28  # calls of a replica that takes none, as it seems


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
