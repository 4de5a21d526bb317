"""Launches of short.cu: attention of few rows, from Hopper on. Knows launches, no models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verifypd.attention import arguments
from verifypd.attention.arguments import SHARED_SOURCE, Arguments
from verifypd.attention.base import PassLayout
from verifypd.attention.tiling import LEAST_ROWS, Tiling
from verifypd.kernels import nvrtc
from verifypd.kernels.launch import dependent, shared_memory
from verifypd.kv.pool import LayerCache

SOURCE = Path(__file__).with_name("short.cu")
WIDTHS = (64, 128)
WARPS = 4  # of a block
KEYS = 16  # of the context, that a warp takes at a time
UNDER_WAY = 64 * 1024  # bytes of shared memory for keys and values: skinny.cu leaves as much beside the product before


def suits(
    q: Tensor, cache: LayerCache, layout: PassLayout, cut: Tiling, window: int | None, softcap: float | None
) -> bool:
    """Whether a launch is one of these.

    What lies before the first row of a tile was written by earlier passes, and is read before the kernel before is
    done: a span of few rows has one tile, and see `PassLayout`.
    """
    return (
        cut.few and q.shape[2] in WIDTHS and arguments.suits(q, cache, layout, window, softcap) and _available(q.device)
    )


@cache
def _available(device: torch.device) -> bool:
    """Whether they run on a device. Without NVRTC attention is Triton's."""
    return (
        dependent(device)
        and shared_memory(device) >= UNDER_WAY + 2**10
        and nvrtc.works(lambda: _function(device, 128, 1, 16, False, False), "attention kernels of few rows")
    )


def attend(q: Tensor, cache: LayerCache, block_size: int, cut: Tiling, given: Arguments) -> None:
    """One class of spans, for some key heads."""
    heads, width = q.shape[1:]
    shared = heads // cache.k.shape[2]
    tall = cut.tile_rows * shared > LEAST_ROWS // 2
    function = _function(q.device, width, shared, block_size, tall, q.dtype == torch.float16)
    with torch.cuda.device(q.device):
        function(given.items, torch.cuda.current_stream().cuda_stream, given)


def ahead(width: int) -> int:
    """Times a warp's keys and values, of two bytes each, that are under way."""
    return UNDER_WAY // (WARPS * KEYS * width * 4)


@cache
def _function(
    device: torch.device, width: int, shared: int, block_size: int, tall: bool, float16: bool
) -> nvrtc.Function:
    """tall: there are more than eight rows in a tile."""
    constants = {
        "WIDTH": width, "SHARED": shared, "BLOCK_SIZE": block_size, "TALL": tall, "FLOAT16": float16,
        "WARPS": WARPS, "KEYS": KEYS, "AHEAD": ahead(width),
    }  # fmt: skip
    source = SHARED_SOURCE.read_bytes() + SOURCE.read_bytes()
    return nvrtc.loaded(source, SOURCE.name, "attend_short", device, constants, 32 * WARPS, UNDER_WAY)
