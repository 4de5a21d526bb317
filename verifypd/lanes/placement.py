"""Where a lane executes, and how long it took there. Knows streams and events; nothing of batches or of scheduling.

`fused`: on the engine's own stream, one lane after the other. `stream`: on a CUDA stream of the lane's own, ordered by
the slots that launches share. `partition`: the same, kept to some of the device's multiprocessors by a green context;
the other lanes may use them too. On a CPU there are no streams, and all are the same. What has a process of its own is
asked from the engine's stream: see `drafters/remote.py` and `hand_over.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from verifypd.runtime.streams import stream_of

PARTITION = 48  # multiprocessors, where the setting does not say
STREAM_PRIORITY = {"prefill": 0, "verify": -1, "decode": -2}  # lower goes first


class LaneTimer:
    """Start and length of one launch. On a CPU a launch is the work; on CUDA events mark it."""

    def __init__(self, stream: torch.cuda.Stream | None, clock: Callable[[], float]) -> None:
        """stream: where it runs; None on a CPU."""
        self.started = clock()  # s of the engine's clock, when the host launched it
        self._clock = clock
        self._ended = self.started
        self._stream = stream
        self._seconds: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if stream is not None:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record(stream)

    def stop(self) -> None:
        """The launch is complete on the host."""
        self._ended = self._clock()
        if self._events:
            self._events[1].record(self._stream)

    def ready(self) -> bool:
        """Whether `seconds` is known; never waits."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """How long it ran."""
        if self._events is None:
            return self._ended - self.started
        if self._seconds is None:
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._seconds

    @property
    def ended(self) -> float | None:
        """s of the engine's clock when the work was done; None on CUDA, where only the device knows."""
        return None if self._events else self._ended


class Placements:
    """Runs launches where their lanes belong, each after the launches that touched its slots."""

    def __init__(
        self, chosen: Mapping[str, str], device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.chosen = dict(chosen)
        here = device.type == "cuda" and device.index is None
        self.device = torch.device("cuda", torch.cuda.current_device()) if here else device
        self.clock = clock
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._contexts: list[Any] = []  # green contexts; a stream of one ends with it
        self._last: dict[int, torch.cuda.Event] = {}  # slot -> end of the launch that last touched it
        for lane, where in chosen.items() if device.type == "cuda" else ():
            kind, _, processors = where.partition(":")
            if kind == "stream":
                self._streams[lane] = torch.cuda.Stream(device, priority=STREAM_PRIORITY[lane])
            elif kind == "partition":
                self._streams[lane] = self._partition(int(processors or PARTITION))

    def _partition(self, processors: int) -> torch.cuda.Stream:
        from torch.cuda.green_contexts import GreenContext

        context: Any = GreenContext.create(num_sms=processors, device_id=self.device.index or 0)
        self._contexts.append(context)
        stream: torch.cuda.Stream = context.Stream()
        return stream

    def apart(self, lane: str) -> bool:
        """Whether the lane's launches run beside the others': prompts may take long, and nobody is to wait for them."""
        return lane == "prefill" and self.chosen.get(lane, "fused") != "fused"

    @contextmanager
    def run(self, lane: str, slots: Iterable[int]) -> Iterator[LaneTimer]:
        """Launch what follows on the lane's stream; it starts when earlier work on these slots has ended."""
        if not self._streams:
            timer = LaneTimer(stream_of(self.device) if self.device.type == "cuda" else None, self.clock)
            yield timer
            timer.stop()
            return
        own = stream_of(self.device)  # carries new slots and block tables
        stream = self._streams.get(lane, own)
        touched = list(slots)
        if stream is not own:
            stream.wait_stream(own)
        for event in {id(e): e for e in map(self._last.get, touched) if e is not None}.values():
            stream.wait_event(event)
        done = torch.cuda.Event()
        try:
            with torch.cuda.stream(stream):
                timer = LaneTimer(stream, self.clock)
                yield timer
                timer.stop()
        finally:  # a launch that broke off has queued a part of its work: whoever gets its blocks comes after it
            done.record(stream)
            self._last.update(dict.fromkeys(touched, done))

    def marks(self) -> list[torch.cuda.Event]:
        """An event on every stream of a lane, behind what it has to do now."""
        return [stream.record_event() for stream in self._streams.values()]

    def settle(self, slot: int) -> None:
        """Order what was launched for a slot before what comes next: it and its blocks are about to change hands."""
        event = self._last.pop(slot, None)
        if event is not None:
            stream_of(self.device).wait_event(event)
