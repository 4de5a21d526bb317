"""The tensors behind a block pool. Knows shapes and bytes; nothing of requests or of who owns a block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GATHERED = 1024  # rows of features that may wait on a CPU: 7 MB of the built-in pair


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [blocks, block_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


def block_bytes(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers, keys and values."""
    return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize


class Kept(NamedTuple):
    """States of the rows of one pass, and where they belong."""

    block_table: Tensor  # [S, max_blocks]
    slots: Tensor  # [R]
    row_span: Tensor  # [N], which of the slots a row is of
    positions: Tensor  # [N]
    streams: tuple[Tensor, ...]  # each [N, a part of the width]


class KVCache:
    """Paged keys and values of one model. Block 0 is the null block: padding rows write there, nobody owns it."""

    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        shape = (layers, 2, blocks, block_size, kv_heads, head_dim)
        # written and not only reserved, so that memory a machine does not have is missed at start and not under load
        self.data = torch.empty(shape, dtype=dtype, device=device).zero_()
        self._layers = [LayerCache(self.data[i, 0], self.data[i, 1]) for i in range(layers)]

    def layer(self, index: int) -> LayerCache:
        """Keys and values of layer `index`, as views."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.data.numel() * self.data.element_size()


class FeatureCache:
    """What a draft head reads of the verifier at each position, in the blocks of the head's own pool.

    On a CPU what is kept waits as the passes left it until somebody reads it, its blocks change hands, or much has
    gathered: between two passes caches are cold, and each of a dozen small operations takes ten times its usual time.
    """

    def __init__(self, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.data = torch.empty(blocks * block_size, width, dtype=dtype, device=device).zero_()
        self._waits = self.data.device.type == "cpu"
        self._kept: list[Kept] = []  # oldest first
        self._rows = 0  # of all of them

    def keep(self, kept: Kept) -> None:
        """Keep the states of a pass. They are not copied at once: nobody may write to them afterwards."""
        self._kept.append(kept)
        self._rows += kept.positions.shape[0]
        if not self._waits or self._rows >= GATHERED:
            self.settle()

    def read(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """What was kept of these positions of these slots, [N, width]."""
        self.settle()
        return self.data[self._place(block_table, slots, positions)]

    @torch.inference_mode()
    def settle(self) -> None:
        """Write what waits; of two states of one place the later one stays. Must run before the rows of a block table
        change hands."""
        if not self._kept:
            return
        kept = self._kept[0] if len(self._kept) == 1 else self._gathered()
        places = self._place(kept.block_table, kept.slots[kept.row_span], kept.positions)
        rows = torch.cat(kept.streams, -1).to(self.data.dtype)
        self.data.index_copy_(0, places, rows)  # an eighteenth of the time of data[places] = rows on a CPU
        self._kept.clear()
        self._rows = 0

    def _gathered(self) -> Kept:
        """All that waits as if one pass had left it: a few operations for all passes, not a few for each. CPU only."""
        slots = np.concatenate([kept.slots.numpy()[kept.row_span.numpy()] for kept in self._kept])
        positions = np.concatenate([kept.positions.numpy() for kept in self._kept])
        streams = tuple(torch.cat(parts) for parts in zip(*(kept.streams for kept in self._kept), strict=True))
        _, newest = np.unique((slots * (1 << 32) + positions)[::-1], return_index=True)
        if len(newest) < len(slots):  # a place was written twice: a draft was rejected, and its rows came again
            stays = len(slots) - 1 - newest
            slots, positions = slots[stays], positions[stays]
            streams = tuple(stream[torch.from_numpy(stays)] for stream in streams)
        span = torch.arange(len(slots))
        return Kept(self._kept[0].block_table, torch.from_numpy(slots), span, torch.from_numpy(positions), streams)

    def _place(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows [N] of `data` that hold these positions of these slots; the null block where nothing is reserved."""
        index = positions // self.block_size
        return torch.add(positions, block_table[slots, index] - index, alpha=self.block_size)
