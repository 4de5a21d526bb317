"""What attention kernels in CUDA C++ take, and which passes they are for. Knows no kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.attention.tiling import Tiling
from verifypd.kv.pool import LayerCache

SHARED_SOURCE = Path(__file__).with_name("shared.cu")  # before the source of each


class Arguments(ctypes.Structure):
    """As shared.cu has them."""

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
            "tickets",  # int32 [2], behind the counters: pairs times heads that were begun, blocks that are done
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
            "items",  # pairs, or members, times key heads of the launch
            "places",  # tokens that the pool has room for
        )),
        ("scale", ctypes.c_float),  # of the scores, in base 2
    )  # fmt: skip

    @classmethod
    def of(
        cls,
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
    ) -> Arguments:
        """Those of a launch; arguments are those of `attend_tile`."""
        blocks, block_size, kv_heads, _ = cache.k.shape
        return cls(
            q=q.data_ptr(), cache_k=cache.k.data_ptr(), cache_v=cache.v.data_ptr(), out=out.data_ptr(),
            partial=partial.data_ptr(), summary=summary.data_ptr(), pairs=_address(pairs), counters=_address(counters),
            tickets=None if counters is None else counters.data_ptr() + counters.itemsize * cut.shared_tiles * kv_heads,
            members=_address(members), row_offsets=layout.row_offsets.data_ptr(), slots=layout.slots.data_ptr(),
            starts=layout.starts.data_ptr(), block_table=layout.block_table.data_ptr(), q_row=q.stride(0),
            table_row=layout.block_table.stride(0), kv_heads=kv_heads, first_head=first_head, held=head_count,
            splits=cut.splits, tile_rows=cut.tile_rows, block_n=cut.block_n, early=early,
            items=(cut.pairs or spans) * head_count, places=blocks * block_size, scale=scale,
        )  # fmt: skip


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def suits(q: Tensor, cache: LayerCache, layout: PassLayout, window: int | None, softcap: float | None) -> bool:
    """Whether queries, keys and values are what these kernels take."""
    return (
        window is None
        and softcap is None
        and layout.first is None
        and cache.scales is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == cache.k.dtype == cache.v.dtype
        and q.stride(0) % 8 == 0
        and q.data_ptr() % 16 == 0  # sixteen bytes are read at once
    )
