"""Collectives between the ranks of a model, and what rank 0 tells the others. Knows torch.distributed; no process.

A group is an object and nothing of it is global to its process: several models, or a program's own groups, may stand
beside it. Ranks are processes of one machine; NCCL joins CUDA devices, gloo (over the loopback interface) CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.kernels.weights import Quantization
from verifypd.models.config import ModelSource
from verifypd.models.shards import Shard

PATIENCE = 60.0  # s that a rank waits for the others within a pass, and when they first meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is started with."""

    shard: Shard
    source: ModelSource
    dtype: torch.dtype
    device: torch.device
    kernels: str
    attention: str
    batch_invariant: bool
    load_format: str
    quantization: Quantization | None
    max_model_len: int
    block_size: int
    fp8_kv: bool = False
    folder: str = ""  # where ranks find each other


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass to come: what the host knows of it. Tensors follow, over the group."""

    span_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    width: int  # blocks of the longest context

    @classmethod
    def of(cls, layout: PassLayout) -> Pass:
        """The pass of a verifier's layout."""
        assert layout.first is None, "a verifier's slots hold everything from position 0 on"
        width = min(layout.block_table.shape[1], -(-layout.max_context // layout.block_size))
        return cls(layout.span_rows, layout.contexts, max(1, width))

    @property
    def numbers(self) -> int:
        """Of the first tensor: where each span starts, and its blocks."""
        return len(self.span_rows) * (1 + self.width)


class Group:
    """The ranks of one model."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.device = device
        self._backend: Any = None  # a dist.Backend: torch declares neither constructor

    def join(self, folder: str) -> None:
        """Meet the others in `folder`, which this user alone can enter."""
        patience = timedelta(seconds=PATIENCE)
        store = dist.FileStore(str(Path(folder) / "ranks"), self.shard.size)  # type: ignore[attr-defined]  # not listed
        store.set_timeout(patience)
        kind: Any = dist.ProcessGroupNCCL if self.device.type == "cuda" else dist.ProcessGroupGloo
        options = kind.Options() if self.device.type == "cuda" else kind._Options()
        options._timeout = patience
        if self.device.type == "cpu":
            options._devices = [kind.create_device(hostname="127.0.0.1")]
        self._backend = kind(store, self.shard.rank, self.shard.size, options)
        if self.device.type == "cuda":  # gloo has met the others by now; NCCL does so when it is first used
            self.sum(torch.zeros(1, device=self.device))

    def leave(self) -> None:
        """Let go of the others, who may be gone already. NCCL would wait for them when this process ends."""
        backend, self._backend = self._backend, None
        if backend is not None and self.device.type == "cuda":
            backend.abort()

    def sum(self, part: Tensor) -> Tensor:
        """`part` with those of all other ranks added to it, in place."""
        self._backend.allreduce([part]).wait()
        return part

    def spread(self, tensor: Tensor) -> Tensor:
        """What rank 0 has, written into `tensor`."""
        self._backend.broadcast(tensor, 0).wait()
        return tensor


def send_layout(group: Group, told: Pass, layout: PassLayout) -> None:
    """Rank 0's side of `receive_layout`."""
    blocks = layout.block_table[:, : told.width][layout.slots]
    group.spread(torch.cat([layout.starts, blocks.flatten().to(torch.int64)]))


def receive_layout(group: Group, told: Pass, block_size: int) -> PassLayout:
    """The layout of a pass as rank 0 has it; the slots are numbered anew, in the order of the spans."""
    spans = len(told.span_rows)
    numbers = group.spread(torch.empty(told.numbers, dtype=torch.int64, device=group.device))
    slots = torch.arange(spans, device=group.device)
    table = numbers[spans:].view(spans, told.width).to(torch.int32)
    return PassLayout.build(told.span_rows, told.contexts, slots, numbers[:spans].contiguous(), table, block_size)
