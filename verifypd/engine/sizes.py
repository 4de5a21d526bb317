"""What a model will take, from configs alone: too much is refused in seconds, before anything is allocated.

Counts weights and KV blocks; the whole budget, with every workspace, is made when the models are loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from verifypd.config import EngineConfig, parse_bytes
from verifypd.engine.quantized import kept_in, verifier_quantization
from verifypd.errors import MemoryBudgetError
from verifypd.kernels.weights import FP8, Quantization
from verifypd.kv.budget import show
from verifypd.kv.pool import block_bytes
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.loader import weight_bytes
from verifypd.models.shards import Shard

DEFAULT_MAX_LEN = 8192
GPU_SHARE = 0.9  # of the device's memory
CGROUP = Path("/sys/fs/cgroup")


def check_memory(
    config: EngineConfig,
    source: ModelSource,
    draft: ModelSource | None,
    device: torch.device,
    *,
    weights: torch.dtype | None = None,
    values: torch.dtype | None = None,
    draft_quantization: str | None = None,
) -> None:
    """Refuse models and KV blocks that cannot fit.

    weights, values: dtypes of weights and of KV blocks. draft_quantization: what is chosen of its settings. What is not
    known yet is taken as the least it may be.
    """
    weights = weights or (torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype))
    chosen = draft_quantization or config.draft_quantization
    size = config.tensor_parallel_size
    shape, together = Shard(0, size).config(source.config, source.name), 1
    if device.type == "cpu":  # all ranks are in one memory
        shape, together = source.config, size
    asked = None if config.kv_memory is None else parse_bytes(config.kv_memory, "kv_memory") * together
    free = free_bytes(device, GPU_SHARE if asked is None else 1.0)
    if asked is not None and asked > free:
        raise MemoryBudgetError(
            f"--kv-memory {config.kv_memory} is more than the {show(free)} that are free here: ask for less"
        )
    form = kept_in(shape, verifier_quantization(config), device)
    own = weight_bytes(shape, weights, form)
    if own > free:
        other: Quantization = "int8" if shape.fp8 is None else "fp8"
        smaller = weight_bytes(shape, weights, other)
        fits = form is None and smaller <= free
        also = f", or --quantization {other}, which takes {show(smaller)}" if fits else ""
        raise MemoryBudgetError(
            f"{source.name} needs {show(own)} for its weights and {device} has {show(free)} free: choose a smaller"
            f" model{also}"
        )
    beside = 0
    if draft is not None:
        asked_for: Quantization | None = None if chosen == "none" else "fp8" if chosen == "fp8" else "int8"
        beside = weight_bytes(draft.config, weights, kept_in(draft.config, asked_for, device))
    if draft is not None and own + beside > free:
        raise MemoryBudgetError(
            f"{draft.name} needs {show(beside)} beside the {show(own)} of {source.name}, and {device} has {show(free)}"
            " free: choose a smaller draft, or --draft ngram"
        )
    shapes = [shape] if draft is None else [shape, draft.config]
    kv = kv_bytes(config, shapes, values or weights, asked)
    if own + beside + kv > free:
        left = show(free - own - beside)
        advice = "lower --max-model-len" if asked is None else f"give --kv-memory {left} or less"
        raise MemoryBudgetError(
            f"{show(kv)} of KV blocks do not fit beside {show(own + beside)} of weights: {device} has {show(free)}"
            f" free, which leaves {left}; {advice}, or choose a smaller model"
        )


def kv_bytes(config: EngineConfig, shapes: list[ModelConfig], dtype: torch.dtype, asked: int | None) -> int:
    """Bytes of KV blocks that will be allocated at least: what was asked for, or one request of the longest kind."""
    size = config.block_size
    each = 0
    for index, shape in enumerate(shapes):  # the verifier, and its draft
        kind = FP8 if index == 0 and config.kv_cache_dtype == "fp8" else dtype
        each += block_bytes(shape.layers, size, shape.kv_heads, shape.head_dim, kind)
    each += sum(size * shape.hidden_size * dtype.itemsize for shape in shapes if shape.is_head)  # its features
    tokens = min(config.max_model_len or DEFAULT_MAX_LEN, shapes[0].max_position) + config.max_draft + 2
    if asked is None:
        return each * (-(-tokens // size) + 1)
    return min(asked, each * (config.slots * -(-tokens // size) + 1))  # more than all slots can use is not allocated


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """Bytes that the device can still give; of a GPU's memory no more than `share` is used."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - share) * total)
    return available_bytes()


def process_bytes() -> int:
    """Resident bytes of this process now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Bytes this machine, or the container this process runs in, can still give."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *_container_bytes()])


def _container_bytes() -> list[int]:
    """Bytes left below the limit of the control group, in its second or its first version; none without a limit."""
    found = []
    for limit, used in (
        (CGROUP / "memory.max", CGROUP / "memory.current"),
        (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = limit.read_text().strip(), int(used.read_text())
            stat = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # given back under pressure
            found.append(max(0, int(most) - now + cached))
    return found
