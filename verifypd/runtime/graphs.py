"""CUDA graphs of anything, by key. Knows nothing of what it captures.

Eager is the same call: without CUDA the work runs as it would be captured. Captured work runs twice when its key first
comes (once to warm it up), so it must be fit to: all it writes is where the pass itself says.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from verifypd.kv.budget import show
from verifypd.metrics.pauses import CAPTURED, WATCH
from verifypd.progress import bar

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Graphs:
    """Captured work by key."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: set[Hashable] = set()  # run so far
        self.bytes = 0  # of device memory that captures have taken
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None
        self._aside: Any = None  # where work is warmed up: one stream, for what kernels keep of a stream stays

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """The result of `work`; where it is a replay, in tensors that the next replay of the key overwrites."""
        if (captured := self._captured.get(key)) is None:
            self.keys.add(key)
            if self.device.type != "cuda":
                return work()
            with WATCH.timed(CAPTURED, str(key)):
                captured = self._captured[key] = self._capture(work)
        graph, result = captured
        graph.replay()
        return result

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop what was captured for these keys; later captures take its memory."""
        for key in keys:
            self._captured.pop(key, None)
            self.keys.discard(key)

    def _capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        before = torch.cuda.mem_get_info(self.device)[0]
        own = torch.cuda.current_stream(self.device)
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)
        self._aside.wait_stream(own)
        with torch.cuda.stream(self._aside):
            work()
        own.wait_stream(self._aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self.bytes += before - torch.cuda.mem_get_info(self.device)[0]
        return graph, result


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is collected within: graphs of an engine that is gone, freed during a capture, would break it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def capture(graphs: Graphs, work: Sequence[Callable[[], object]]) -> None:
    """Run each piece once, so that it is captured; the largest come first and lend their memory to the others."""
    for each in bar(work, desc="capturing graphs", unit="graphs"):
        each()
    log.info("captured %d graphs: %s", len(graphs), show(graphs.bytes))
