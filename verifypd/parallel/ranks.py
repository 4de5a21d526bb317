"""Rank 0's hold on the others: starts them, tells them of every pass, notices when one is gone. Knows processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout, Reader
from verifypd.errors import EngineError, ModelError
from verifypd.models.shards import Shard
from verifypd.parallel.group import Group, Job, Pass, send_layout
from verifypd.runtime.runner import ModelRunner

LAST_WORDS = 5.0  # s a rank gets to end by itself
NOTICE = 0.5  # s after a broken pass in which the rank that broke it may be seen to have ended

Process = subprocess.Popen[bytes]


class Ranks:
    """The other ranks of a model. They end when this is closed, when nobody holds it any more, or with this process."""

    def __init__(self, job: Job) -> None:
        """job: of rank 0; those of the others differ in shard and device. They begin to load at once.

        On a CPU every rank, this process among them, gets its share of the threads.
        """
        self.group = Group(job.shard, job.device)
        self._folder = tempfile.mkdtemp(prefix="verifypd-")  # only this user can enter it
        self._lines: list[Connection] = []
        self.processes: list[Process] = []
        threads = torch.get_num_threads()
        self.close = weakref.finalize(self, _end, self.group, self._lines, self.processes, self._folder, threads)
        share = max(1, threads // job.shard.size)
        if job.device.type == "cpu":
            torch.set_num_threads(share)
        for rank in range(1, job.shard.size):
            index = (job.device.index or 0) + rank
            device = torch.device("cuda", index) if job.device.type == "cuda" else job.device
            self._start(replace(job, shard=Shard(rank, job.shard.size), device=device, folder=self._folder), share)

    def _start(self, job: Job, threads: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "verifypd.parallel.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._lines.append(ours)
        self.processes.append(process)
        ours.send(job)

    def await_weights(self) -> None:
        """Wait until every rank has its weights."""
        self._await_all("its weights")

    def begin(self, blocks: int) -> None:
        """Have every rank make room for so many KV blocks, and meet them."""
        for line in self._lines:
            with suppress(OSError):  # who is gone does not answer either
                line.send(blocks)
        self._await_all("its KV blocks")
        try:
            self.group.join(self._folder)
        except RuntimeError as error:
            raise EngineError(f"{self._ended()}, before the ranks had met ({_short(error)})") from error

    def _await_all(self, what: str) -> None:
        for rank, line in enumerate(self._lines, 1):
            try:
                problem = line.recv()
            except (EOFError, OSError):
                raise EngineError(f"{self._ended()}, before rank {rank} had {what}: see its messages") from None
            if problem is not None:
                raise ModelError(f"tensor-parallel rank {rank}: {problem}")

    @contextmanager
    def passing(self, layout: PassLayout, hidden: Tensor) -> Iterator[None]:
        """A pass of all ranks over embedded rows [N, H]; it runs within. What breaks it off ends all ranks."""
        if not self.close.alive:
            raise EngineError("the ranks of this engine have ended: start it again")
        told = Pass.of(layout)
        try:
            for line in self._lines:
                line.send(told)
            send_layout(self.group, told, layout)
            self.group.spread(hidden)
            yield
        except BaseException as error:  # they no longer agree on what comes next
            ended = self._ended()
            self.close()
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"{ended}, the engine cannot go on ({_short(error)})") from error

    def _ended(self) -> str:
        """Which ranks are gone, in words: one that ends takes others along."""
        gone = []
        for rank, process in enumerate(self.processes, 1):
            with suppress(subprocess.TimeoutExpired):
                gone.append(f"rank {rank} has ended with status {process.wait(NOTICE)}")
        return f"tensor-parallel {', '.join(gone)}" if gone else "a pass of the tensor-parallel ranks broke off"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _end(group: Group, lines: list[Connection], processes: list[Process], folder: str, threads: int) -> None:
    """Hang up and wait; who does not end is killed."""
    for line in lines:
        line.close()
    for process in processes:
        try:
            process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    group.leave()
    shutil.rmtree(folder, ignore_errors=True)
    torch.set_num_threads(threads)


class ParallelRunner(ModelRunner):
    """Runs passes of rank 0's shard while the others run theirs."""

    def __init__(self, ranks: Ranks, own: ModelRunner) -> None:
        """own: of rank 0's shard."""
        super().__init__(own.model, own.attention, own.cache, own.tables)
        self.ranks = ranks

    @torch.inference_mode()
    def forward(self, ids: Tensor, layout: PassLayout, prepared: Any = None, reader: Reader | None = None) -> Tensor:
        """See ModelRunner.forward. Residual streams are whole on every rank, so readers miss nothing."""
        hidden = self.model.embed(ids)
        if prepared is None:
            prepared = self.attention.prepare(layout)
        capture = reader.layers if reader is not None else ()
        with self.ranks.passing(layout, hidden):
            return self.model.through_layers(hidden, layout, self.attention, prepared, self.cache, capture, reader)[0]

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()
