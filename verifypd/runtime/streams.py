"""Tickets: launched work whose result is not on the host yet. The only module that waits for the device.

`block` lets the driver put the thread to sleep until the copy has arrived; `spin` asks again and again, which hears of
it sooner and keeps a core busy. On a CPU a launch is the work, so there is nothing to wait for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

PAUSE = 1e-3  # s that the host rests at a time while it has nothing to launch
CYCLES = 2e9  # a second, of a GPU's clock: about
PINNED = [1 << power for power in range(21)]  # bytes: sizes that the allocator of pinned memory rounds up to
COPIES = 8  # of one size that may be under way at once, at least
SENT = 2  # pieces of one size that an admission sends
RESERVED = 1 << 22  # bytes of one size, at most, where there are enough copies


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that carries what is launched now. By number: a device's name is looked up for long."""
    return torch.cuda.current_stream(device.index)


def reserve_pinned(requests: int) -> None:
    """Have pinned memory of every size at hand: to get more of it from the driver may wait until the device is idle.

    A piece is free again when its copy has been made, which is behind the passes that are under way. There are enough
    for so many requests that are admitted at once, with prompts of some 500 tokens; of longer ones fewer.
    """
    held = [
        torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in PINNED for _ in range(copies(size, requests))
    ]
    del held  # PyTorch keeps it for the next to ask


def copies(size: int, requests: int) -> int:
    """Pieces of pinned memory of a size that are kept for so many requests."""
    return max(COPIES, min(COPIES + SENT * requests, RESERVED // size))


def taken(device: torch.device) -> dict[str, int]:
    """How often torch has got device memory and pinned memory from the driver, given the device's back, and tried again
    for want of it. Each may wait for the device."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    names = {"allocated": "num_device_alloc", "freed": "num_device_free", "retried": "num_alloc_retries"}
    pinned = int(torch.cuda.host_memory_stats_as_nested_dict().get("num_host_alloc", 0))
    return {name: int(stats.get(key, 0)) for name, key in names.items()} | {"pinned": pinned}


class HostCopy:
    """Tensors on their way to the host, started without waiting. `wait` says how they are waited for in the end."""

    def __init__(self, tensors: dict[str, Tensor], wait: str = "block") -> None:
        self._spin = wait == "spin"
        self._ready: torch.cuda.Event | None = None
        if not any(t.is_cuda for t in tensors.values()):
            self._host = tensors
            return
        self._host = {
            name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for name, t in tensors.items()
        }
        self._ready = torch.cuda.Event(blocking=not self._spin)
        self._ready.record(stream_of(next(t.device for t in tensors.values() if t.is_cuda)))

    def done(self) -> bool:
        """Whether the copy has arrived; never waits."""
        return self._ready is None or self._ready.query()

    def wait(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays, once they are here."""
        if self._ready is not None and not self._spin:
            self._ready.synchronize()
        while self._ready is not None and self._spin and not self._ready.query():
            pass
        return {name: t.numpy() for name, t in self._host.items()}


class Arriving(Protocol):
    """Arrays on their way to the host."""

    def done(self) -> bool:
        """Whether they are here; never waits."""
        ...

    def wait(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays, once they are here."""
        ...


@dataclass(slots=True)
class Ticket:
    """One launched batch. `read` turns the arrived arrays into whatever the lane promises."""

    batch: Any
    copy: Arriving
    read: Callable[[dict[str, np.ndarray[Any, Any]]], Any]
    launched: float = 0.0  # seconds of the engine's clock
    slots: frozenset[int] = frozenset()  # whose state the batch changes
    apart: bool = False  # launched beside the others: nobody waits for it

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.copy.done()

    def result(self) -> Any:
        """What came of the batch; waits if it must."""
        return self.read(self.copy.wait())


class Inflight:
    """Tickets in launch order. Keeps at most `limit` out: the host plans one step behind the device, not more.

    Tickets of work that runs beside the rest come when they come; those of one slot never overtake each other.
    """

    def __init__(self, limit: int = 2, delay: int = 0) -> None:
        self.limit = limit
        self.delay = delay  # rounds a finished ticket is held back, for tests of the asynchronous contract
        self._round = 0
        self._tickets: deque[tuple[int, Ticket]] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def away(self) -> set[int]:
        """Slots whose work runs beside the rest."""
        return {slot for _, ticket in self._tickets if ticket.apart for slot in ticket.slots}

    def add(self, ticket: Ticket) -> None:
        """Count a launched ticket in."""
        self._tickets.append((self._round, ticket))

    def finished(self) -> list[Ticket]:
        """Tickets to absorb now, oldest first: those that are done, and as many more as exceed the limit."""
        self._round += 1
        return self._take(self.limit)

    def put_back(self, tickets: Sequence[Ticket]) -> None:
        """These were taken and not absorbed; they come first again."""
        self._tickets.extendleft((self._round, ticket) for ticket in reversed(tickets))

    def pause(self, wait: str) -> None:
        """There is nothing to launch: wait for the oldest ticket, but not for long; somebody may have arrived."""
        if not self._tickets:
            return
        until = time.monotonic() + PAUSE
        while not self._tickets[0][1].done() and time.monotonic() < until:
            if wait != "spin":
                time.sleep(PAUSE / 20)

    def arrived(self) -> list[Ticket]:
        """Tickets whose result is here already, right after their launch: on a CPU all of them, unless held back."""
        return [] if self.delay else self._take(None)

    def _take(self, limit: int | None) -> list[Ticket]:
        """What may be absorbed; the oldest in line is waited for where `limit` are out."""
        ready: list[Ticket] = []
        kept: deque[tuple[int, Ticket]] = deque()
        held: set[int] = set()  # slots of tickets that stay
        in_line = sum(not ticket.apart for _, ticket in self._tickets)
        stopped = False  # one in line stays, and so do those behind it
        for launched, ticket in self._tickets:
            early = limit is not None and self._round - launched <= self.delay
            due = limit is not None and not ticket.apart and in_line >= limit
            behind = (stopped and not ticket.apart) or bool(ticket.slots & held)
            if early or behind or not (due or ticket.done()):
                kept.append((launched, ticket))
                held |= ticket.slots
                stopped = stopped or not ticket.apart
                continue
            ready.append(ticket)
            in_line -= not ticket.apart
        self._tickets = kept
        return ready

    def drain(self) -> list[Ticket]:
        """Every ticket that is out, whatever it takes."""
        tickets = [ticket for _, ticket in self._tickets]
        self._tickets.clear()
        return tickets


def synchronize(device: torch.device) -> None:
    """Wait for everything launched on `device` (benchmarks and shutdown only)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_busy(device: torch.device, seconds: float) -> None:
    """Give a CUDA device nothing to do for so long, about, before what is launched next (measurements only).

    The host launches meanwhile; else the time it takes to would pass for the device's.
    """
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES))
