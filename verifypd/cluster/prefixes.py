"""Who has which prompts cached, as far as the sender knows: it remembers where it sent them. Pure; knows no Ray."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from verifypd.kv.prefix import PrefixDigests

BLOCK = 16  # tokens between two places at which a prompt may part from another
LONGEST = 256  # blocks of a prompt that are looked at
REMEMBERED = 1 << 16  # blocks

Replica = TypeVar("Replica", bound=Hashable)


def digests(prompt: Sequence[int]) -> list[bytes]:
    """A name for each beginning of a prompt, the longest last. Its last token is always computed, so it is left out."""
    return PrefixDigests(BLOCK).upto(prompt, min(LONGEST, (len(prompt) - 1) // BLOCK))


class PrefixMap(Generic[Replica]):
    """Beginnings of prompts, and the replica that read each last."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._homes: OrderedDict[bytes, Replica] = OrderedDict()  # the one used last comes last
        self.held: Counter[Replica] = Counter()  # beginnings of each replica

    def sent(self, prefix: Sequence[bytes], replica: Replica) -> None:
        """A prompt went to a replica."""
        homes, lost = self._homes, []
        for digest in reversed(prefix):  # the longest are forgotten first
            before = homes.pop(digest, None)
            homes[digest] = replica
            if before is not None:
                lost.append(before)
        lost += [homes.popitem(last=False)[1] for _ in range(len(homes) - self._most)]
        self.held[replica] += len(prefix)
        for each, number in Counter(lost).items():
            self.held[each] -= number
            if not self.held[each]:
                del self.held[each]

    def home(self, prefix: Sequence[bytes], alive: Mapping[Replica, object]) -> Replica | None:
        """The replica that has the longest beginning of this prompt."""
        for digest in reversed(prefix):
            replica = self._homes.get(digest)
            if replica is not None and replica in alive:
                return replica
        return None


def goes_home(load: int, least: int, slack: int) -> bool:
    """Whether a call goes to the replica that has its prompt: it has no more than `slack` calls over the idlest."""
    return load - least <= slack


def choose(
    home: Replica | None, loads: Mapping[Replica, int], held: Mapping[Replica, int], slack: int
) -> list[Replica]:
    """Replicas in the order in which they are to be tried.

    Home comes first, where the call goes there. Then come those with least to do, and among these the ones that hold
    least.
    """
    order = sorted(loads, key=lambda replica: (loads[replica], held.get(replica, 0)))
    if home is not None and home in loads and goes_home(loads[home], loads[order[0]], slack):
        order.remove(home)
        order.insert(0, home)
    return order
