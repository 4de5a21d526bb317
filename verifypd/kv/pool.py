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

    On a CPU what is kept waits in one place until somebody reads it, its blocks change hands, or much has gathered:
    between two passes caches are cold, and each of a dozen small operations takes ten times its usual time.
    """

    def __init__(self, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.data = torch.empty(blocks * block_size, width, dtype=dtype, device=device).zero_()
        self._waits = self.data.device.type == "cpu"
        self._gathered = torch.empty(GATHERED if self._waits else 0, width, dtype=dtype)
        self._table: Tensor | None = None  # of the blocks that its rows belong to, while there are any
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # slots, row_span and positions of each pass, oldest first
        self._rows = 0  # of all of them

    @torch.inference_mode()
    def keep(self, kept: Kept) -> None:
        """Keep the states of a pass. Nobody may write to its slots, row_span and positions afterwards."""
        rows = kept.positions.shape[0]
        if not self._waits or rows > len(self._gathered):
            self.settle()
            self._write(kept.block_table, kept.slots[kept.row_span], kept.positions, torch.cat(kept.streams, -1))
            return
        if self._rows + rows > len(self._gathered):
            self.settle()
        torch.cat(kept.streams, -1, out=self._gathered[self._rows : self._rows + rows])
        assert not self._kept or self._table is kept.block_table, "one pool has one table"
        self._table = kept.block_table
        self._kept.append((kept.slots, kept.row_span, kept.positions))
        self._rows += rows

    def read(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """What was kept of these positions of these slots, [N, width]."""
        self.settle()
        return self.data[self._place(block_table, slots, positions)]

    @torch.inference_mode()
    def settle(self) -> None:
        """Write what waits; of two states of one place the later one stays. Must run before the rows of a block table
        change hands."""
        if not self._kept or self._table is None:
            return
        rows = self._gathered[: self._rows]
        if len(self._kept) == 1:
            [(spans, span, positions)] = self._kept
            slots = spans[span]
        else:  # a few operations for all passes, not a few for each
            all_slots = np.concatenate([spans.numpy()[span.numpy()] for spans, span, _ in self._kept])
            all_positions = np.concatenate([at.numpy() for _, _, at in self._kept])
            _, newest = np.unique((all_slots * (1 << 32) + all_positions)[::-1], return_index=True)
            if len(newest) < len(all_slots):  # a place comes twice: a draft was rejected, and its rows came again
                stays = len(all_slots) - 1 - newest
                all_slots, all_positions, rows = all_slots[stays], all_positions[stays], rows[torch.from_numpy(stays)]
            slots, positions = torch.from_numpy(all_slots), torch.from_numpy(all_positions)
        self._write(self._table, slots, positions, rows)
        self._kept.clear()
        self._rows = 0

    def _write(self, block_table: Tensor, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        places = self._place(block_table, slots, positions)
        self.data.index_copy_(0, places, rows.to(self.data.dtype))  # on a CPU 18 times as fast as data[places] = rows

    def _place(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows [N] of `data` that hold these positions of these slots; the null block where nothing is reserved."""
        index = positions // self.block_size
        return torch.add(positions, block_table[slots, index] - index, alpha=self.block_size)
