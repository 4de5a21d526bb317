"""What the processes of lanes that run apart have in common: settings, a model with a paged cache, a life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from verifypd.attention.choose import backend
from verifypd.config import EngineConfig
from verifypd.engine.build import DEFAULT_CPU_KV, pick_device
from verifypd.engine.sizes import GPU_SHARE, available_bytes
from verifypd.errors import MemoryBudgetError, VerifyPDError
from verifypd.kernels.base import Kernels
from verifypd.kernels.choose import select
from verifypd.kernels.weights import FP8, Quantization
from verifypd.kv.blocks import BlockPool
from verifypd.kv.budget import show
from verifypd.kv.pool import block_bytes
from verifypd.models.base import Model
from verifypd.models.config import ModelSource
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables
from verifypd.runtime.peer import Link, hello
from verifypd.runtime.runner import ModelRunner, cache_of

Served = TypeVar("Served")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane's process runs, and the settings of the engine it belongs to."""

    config: EngineConfig
    device: torch.device
    kernels: Kernels
    capacity: int  # tokens a slot holds
    max_len: int

    @staticmethod
    def of(settings: dict[str, Any]) -> Place:
        """As the engine has told it; this process is made ready for it."""
        config = EngineConfig(**settings["config"])
        torch.set_num_threads(settings["threads"])
        device = pick_device(settings["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        kernels = select(device, config.kernels, batch_invariant=config.batch_invariant)
        return Place(config, device, kernels, settings["capacity"], settings["max_len"])

    def load(self, source: ModelSource, quantization: Quantization | None) -> Model:
        """A model in the dtype that the engine has."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return load_model(
            source, dtype=dtype, device=self.device, kernels=self.kernels, load_format=self.config.load_format,
            quantization=quantization, max_model_len=self.max_len,
        )  # fmt: skip

    def paged(self, model: Model, scales: Sequence[float] | None = None) -> tuple[ModelRunner, BlockPool]:
        """Its runner, and who owns the blocks of its cache. scales: of a cache in e4m3, the engine's own."""
        config, fp8 = self.config, scales is not None
        count = self._block_count(model, fp8)
        cache = cache_of(model, count, config.block_size, fp8)
        if cache.scales is not None:
            cache.take_scales(torch.tensor(scales).view(cache.scales.shape))
        tables = BlockTables(config.slots, self.capacity, config.block_size, self.device)
        attention = backend(config.attention, self.device, batch_invariant=config.batch_invariant, fp8=fp8)
        return ModelRunner(model, attention, cache, tables), BlockPool(count, config.block_size, prefix_cache=False)

    def _block_count(self, model: Model, fp8: bool) -> int:
        """Blocks for all slots, or for as many as fit beside the weights."""
        size, shape = self.config.block_size, model.config
        dtype = FP8 if fp8 else model.activation_dtype
        each = block_bytes(shape.layers, size, shape.kv_heads, shape.head_dim, dtype)
        longest = -(-self.capacity // size)
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            room = int(free - (1 - GPU_SHARE) * total)
        else:
            room = min(DEFAULT_CPU_KV, available_bytes() // 2)
        if room < each * (longest + 1):
            raise MemoryBudgetError(
                f"the cache of one request takes {show(each * (longest + 1))} and {self.device} has {show(room)}:"
                " lower --max-model-len"
            )
        return min(self.config.slots * longest, room // each - 1) + 1


def run(make: Callable[[dict[str, Any]], Served], serve: Callable[[Served, Link], None]) -> None:
    """The life of a process that `Peer` has started."""
    logging.basicConfig(level=logging.WARNING)
    settings, ready = hello()
    try:
        made = make(settings)
    except VerifyPDError as error:
        ready(str(error))
        return
    with suppress(ConnectionError):  # the engine is gone
        serve(made, ready(None))
