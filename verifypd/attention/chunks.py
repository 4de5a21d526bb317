"""Launches of chunks.cu: attention of prompt chunks, on Hopper. Knows launches, no models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verifypd.attention import arguments
from verifypd.attention.arguments import SHARED_SOURCE, Arguments
from verifypd.attention.base import PassLayout
from verifypd.attention.tiling import CHUNK_TILE, Tiling
from verifypd.kernels import nvrtc, wgmma
from verifypd.kernels.launch import processors, shared_memory
from verifypd.kv.pool import LayerCache

SOURCE = Path(__file__).with_name("chunks.cu")
WIDTH = 128  # of a head
ROW = 64  # numbers in the 128 bytes that the copy engine fetches of a row
KEYS = 128  # of the context, in a step
STAGES = 2  # steps under way
THREADS = 384  # of a block


def suits(
    q: Tensor, cache: LayerCache, layout: PassLayout, cut: Tiling, window: int | None, softcap: float | None
) -> bool:
    """Whether a launch is one of these."""
    return (
        cut.block_m == CHUNK_TILE
        and cut.sorted_tiles > 0
        and cut.pairs > 0
        and q.shape[2] == WIDTH
        and layout.block_size % 8 == 0
        and KEYS % layout.block_size == 0
        and arguments.suits(q, cache, layout, window, softcap)
        and _available(q.device)
    )


@cache
def _available(device: torch.device) -> bool:
    """Whether they run on a device. Without NVRTC attention is Triton's."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == wgmma.CAPABILITY
        and shared_memory(device) >= memory()
        and nvrtc.works(lambda: _function(device, 1, 16, False), "attention kernels of prompt chunks")
    )


def attend(q: Tensor, cache: LayerCache, block_size: int, cut: Tiling, given: Arguments) -> None:
    """One class of spans, for some key heads."""
    shared = q.shape[1] // cache.k.shape[2]
    given.block_n = KEYS
    box = (block_size, ROW)
    maps = (
        nvrtc.tensor_map(q, (cut.block_q, shared, ROW)),
        *(nvrtc.tensor_map(held.view(-1, held.shape[2] * WIDTH), box) for held in (cache.k, cache.v)),
    )
    function = _function(q.device, shared, block_size, q.dtype == torch.float16)
    with torch.cuda.device(q.device):
        blocks = min(given.items, processors(q.device))
        function(blocks, torch.cuda.current_stream().cuda_stream, *maps, given)


def memory() -> int:
    """Bytes of shared memory of a block: queries, steps of keys and of values, and up to an alignment."""
    return 2 * WIDTH * (CHUNK_TILE + 2 * STAGES * KEYS) + 1024


@cache
def _function(device: torch.device, shared: int, block_size: int, float16: bool) -> nvrtc.Function:
    constants = {
        "WIDTH": WIDTH, "SHARED": shared, "BLOCK_SIZE": block_size, "FLOAT16": float16, "TILE": CHUNK_TILE,
        "KEYS": KEYS, "STAGES": STAGES, "THREADS": THREADS,
    }  # fmt: skip
    return nvrtc.loaded(source(float16), SOURCE.name, "attend_chunks", device, constants, THREADS, memory(), "a")


def source(float16: bool) -> bytes:
    """What is compiled."""
    score = wgmma.product("score", KEYS, float16)
    mix = wgmma.product("mix", WIDTH, float16, left_in_registers=True, across=True)
    return wgmma.SOURCE.read_bytes() + SHARED_SOURCE.read_bytes() + score + mix + SOURCE.read_bytes()
