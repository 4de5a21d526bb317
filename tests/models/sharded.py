"""Runs a divided model: rank 0 here, the others in threads or in one process that serves many models."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.checkpoints import PagedRun, layout_for
from verifypd.attention import AttentionBackend
from verifypd.attention.choose import backend
from verifypd.models.base import Model
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.shards import Shard
from verifypd.parallel.group import Group, Job, Pass, send_layout
from verifypd.parallel.worker import follow, load
from verifypd.runtime.runner import cache_of


def job_of(source: ModelSource, shard: Shard, folder: Path, **options: Any) -> Job:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "kernels": "torch",
        "attention": "torch",
        "batch_invariant": False,
        "load_format": "auto",
        "quantization": None,
        "max_model_len": 128,
        "block_size": 4,
    }
    return Job(shard=shard, source=source, folder=str(folder), **(settings | options))


def source_of(folder: Path) -> ModelSource:
    return ModelSource(str(folder), ModelConfig.from_folder(folder), folder=folder)


class Divided(PagedRun):
    """A PagedRun of rank 0 that takes the other ranks along."""

    def __init__(self, model: Model, group: Group, tell: Callable[[Pass], object], attention: AttentionBackend) -> None:
        super().__init__(model, attention=attention)
        self.group = group
        self.tell = tell

    @torch.inference_mode()
    def hidden(self, spans: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        layout = layout_for([(s, start, len(ids)) for s, start, ids in spans], self.block_table, self.cache.block_size)
        hidden = self.model.embed(torch.tensor([token for _, _, ids in spans for token in ids]))
        told = Pass.of(layout)
        self.tell(told)
        send_layout(self.group, told, layout)
        self.group.spread(hidden)
        prepared = self.attention.prepare(layout)
        return self.model.through_layers(hidden, layout, self.attention, prepared, self.cache)[0]


def take_part(job: Job, receive: Callable[[], Any]) -> None:
    """The life of another rank with one model; the first message is the number of blocks."""
    group = Group(job.shard, job.device)
    model = load(job, group)
    cache = cache_of(model, receive(), job.block_size)
    group.join(job.folder)
    follow(model, backend(job.attention), cache, group, receive)


def serve_ranks(line: Connection) -> None:
    """The process of a second rank: one model after another, until there are no more."""
    while (job := line.recv()) is not None:
        take_part(job, line.recv)


@contextmanager
def in_process(source: ModelSource, line: Connection, folder: Path, **options: Any) -> Iterator[Divided]:
    """Two ranks, the second in the process at the other end of the line."""
    line.send(job_of(source, Shard(1, 2), folder, **options))
    yield from _rank_0(job_of(source, Shard(0, 2), folder, **options), line.send)


@contextmanager
def in_threads(source: ModelSource, size: int, folder: Path, **options: Any) -> Iterator[Divided]:
    """So many ranks in this process."""
    mail = [queue.SimpleQueue[Any]() for _ in range(1, size)]
    jobs = [job_of(source, Shard(rank, size), folder, **options) for rank in range(size)]
    others = zip(jobs[1:], mail, strict=True)
    threads = [threading.Thread(target=take_part, args=(job, box.get), daemon=True) for job, box in others]
    for thread in threads:
        thread.start()
    yield from _rank_0(jobs[0], lambda message: [box.put(message) for box in mail])
    for thread in threads:
        thread.join(30)


def _rank_0(job: Job, tell: Callable[[Any], object]) -> Iterator[Divided]:
    group = Group(job.shard, job.device)
    run = Divided(load(job, group), group, tell, backend(job.attention))
    tell(run.cache.blocks)
    group.join(job.folder)
    try:
        yield run
    finally:
        tell(None)
