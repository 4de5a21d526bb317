"""Paged attention in C: reads the cache in place, block by block. Knows pointers and strides; nothing of models.

CPU only. A row's result is the same to the bit whatever spans and rows come with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout, Rotary
from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.kernels.weights import FP8
from verifypd.kv.pool import LayerCache

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, FP8: 5}  # enum in native_vectors.h; dtype of the cache


class NativeAttention:
    """float32 queries over a float32, bfloat16, float16 or e4m3 cache; sums and softmax in float32."""

    name = "native"
    rotates = False
    written = None

    def __init__(self) -> None:
        loaded = build.library()
        if loaded is None:
            raise ConfigError("native attention cannot be built here: install gcc or clang, or use attention=torch")
        self._attend = loaded.vpd_attend

    def prepare(self, layout: PassLayout) -> tuple[int | None, ...]:
        """The layout as C takes it: from the write index to where slots begin."""
        return (
            layout.write_index.data_ptr(),
            layout.row_offsets.data_ptr(),
            layout.slots.data_ptr(),
            layout.starts.data_ptr(),
            layout.block_table.data_ptr(),
            layout.block_table.stride(0),
            layout.block_size,
            None if layout.first is None else layout.first.data_ptr(),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: tuple[int | None, ...],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend. The heads of a row must lie one after another, as in a fused qkv."""
        dtype = q.dtype
        if dtype is not torch.float32:
            q, k, v = q.float(), k.float(), v.float()
        rows, heads, width = q.shape
        out = torch.empty(rows, heads, width)
        failed = self._attend(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            TYPES[cache.k.dtype],
            None if cache.scales is None else cache.scales.data_ptr(),
            *prepared,
            out.data_ptr(),
            rows,
            layout.spans,
            heads,
            k.shape[1],
            width,
            window or 0,
            scale,
            softcap or 0.0,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the attention's working space")
        return out if dtype is torch.float32 else out.to(dtype)
