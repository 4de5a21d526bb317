"""Launches of short.cu: attention of few rows, from Hopper on. Knows launches, no models."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

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


class _Arguments(ctypes.Structure):
    """As short.cu has them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q",  # [N, heads, width], rows q_row apart
            "cache_k",  # [places, kv_heads, width]
            "cache_v",
            "out",  # [N, heads, width]
            "partial",  # these four: as of `attend_tile`
            "summary",
            "pairs",  # or none: a block of threads for each member and key head
            "counters",
            "members",  # int32 [members], spans of this launch; none: all of the pass
            "row_offsets",  # int64 [R + 1]
            "slots",  # int64 [R]
            "starts",  # int64 [R]
            "block_table",  # int32 [S, table_row]
        )),
        ("q_row", ctypes.c_longlong),
        ("table_row", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in (
            "kv_heads",
            "first_head",  # key head, of the launch
            "held",  # key heads of the launch
            "splits",  # most that share a context
            "tile_rows",  # query rows that a tile has at most
            "block_n",  # splits begin at multiples of it
            "early",  # the kernel before wrote queries, keys or values, and neither pairs nor lengths
        )),
        ("scale", ctypes.c_float),  # of the scores, in base 2
    )  # fmt: skip


def suits(
    q: Tensor, cache: LayerCache, layout: PassLayout, cut: Tiling, window: int | None, softcap: float | None
) -> bool:
    """Whether a launch is one of these.

    What lies before the first row of a tile was written by earlier passes, and is read before the kernel before is
    done: a span of few rows has one tile, and see `PassLayout`.
    """
    return (
        cut.few
        and window is None
        and softcap is None
        and layout.first is None
        and cache.scales is None
        and q.shape[2] in WIDTHS
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == cache.k.dtype == cache.v.dtype
        and q.stride(0) % 8 == 0
        and q.data_ptr() % 16 == 0  # sixteen bytes are read at once
        and _available(q.device)
    )


@cache
def _available(device: torch.device) -> bool:
    """Whether they run on a device. Without NVRTC attention is Triton's."""
    return (
        dependent(device)
        and shared_memory(device) >= UNDER_WAY + 2**10
        and nvrtc.works(lambda: _function(device, 128, 1, 16, False, False), "attention kernels of few rows")
    )


def attend(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    cut: Tiling,
    spans: int,
    members: Tensor | None,
    pairs: Tensor | None,
    counters: Tensor | None,
    out: Tensor,
    partial: Tensor,
    summary: Tensor,
    scale: float,
    first_head: int,
    head_count: int,
    early: bool,
) -> None:
    """One class of spans, for some key heads; arguments are those of `attend_tile`. scale: in base 2."""
    heads, width = q.shape[1:]
    kv_heads = cache.k.shape[2]
    argument = _Arguments(
        q=q.data_ptr(), cache_k=cache.k.data_ptr(), cache_v=cache.v.data_ptr(), out=out.data_ptr(),
        partial=partial.data_ptr(), summary=summary.data_ptr(), pairs=_address(pairs), counters=_address(counters),
        members=_address(members), row_offsets=layout.row_offsets.data_ptr(), slots=layout.slots.data_ptr(),
        starts=layout.starts.data_ptr(), block_table=layout.block_table.data_ptr(), q_row=q.stride(0),
        table_row=layout.block_table.stride(0), kv_heads=kv_heads, first_head=first_head, held=head_count,
        splits=cut.splits, tile_rows=cut.tile_rows, block_n=cut.block_n, early=early, scale=scale,
    )  # fmt: skip
    shared = heads // kv_heads
    tall = cut.tile_rows * shared > LEAST_ROWS // 2
    function = _function(q.device, width, shared, layout.block_size, tall, q.dtype == torch.float16)
    with torch.cuda.device(q.device):
        function((cut.pairs or spans) * head_count, torch.cuda.current_stream().cuda_stream, argument)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


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
    return nvrtc.loaded(SOURCE.read_bytes(), SOURCE.name, "attend_short", device, constants, 32 * WARPS, UNDER_WAY)
