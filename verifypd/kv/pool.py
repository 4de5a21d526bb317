"""The tensors behind a block pool. Knows shapes and bytes; nothing of requests or of who owns a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from verifypd.kernels.base import Kernels, PagedRows
from verifypd.kernels.weights import FP8
from verifypd.kv.fp8 import fitting, narrowed, widened


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [blocks, block_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor
    scales: Tensor | None = None  # float32 [2, kv_heads], of keys and values in e4m3: see `fp8`

    def write(self, k: Tensor, v: Tensor, write_index: Tensor) -> None:
        """Rows [N, kv_heads, head_dim] to the rows [N] of the pool that `write_index` names."""
        if self.scales is None:
            k, v = k.to(self.k.dtype), v.to(self.v.dtype)
        else:
            k, v = narrowed(k, self.scales[0]), narrowed(v, self.scales[1])
        for rows, held in ((k, self.k), (v, self.v)):
            _bytes(held).view(-1, *held.shape[2:]).index_copy_(0, write_index, _bytes(rows))

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [T, B], each [T, B * block_size, kv_heads, head_dim]."""
        k, v = (_bytes(held)[blocks].flatten(1, 2).view(held.dtype) for held in (self.k, self.v))
        if self.scales is None:
            return k.to(dtype), v.to(dtype)
        return widened(k, self.scales[0], dtype), widened(v, self.scales[1], dtype)


def _bytes(x: Tensor) -> Tensor:
    """The same, where torch cannot move e4m3 about but bytes."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def block_bytes(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers, keys and values."""
    return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize


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
        """In e4m3 all scales are 1 until `take_scales`."""
        self.block_size = block_size
        self.blocks = blocks
        shape = (layers, 2, blocks, block_size, kv_heads, head_dim)
        # written and not only reserved, so that memory a machine does not have is missed at start and not under load
        self.data = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.scales = torch.ones(layers, 2, kv_heads, device=device) if dtype == FP8 else None
        self._layers = [
            LayerCache(self.data[i, 0], self.data[i, 1], None if self.scales is None else self.scales[i])
            for i in range(layers)
        ]

    def fitting_scales(self) -> Tensor:
        """Scales [layers, 2, kv_heads] for keys and values such as those held here, in another dtype than e4m3."""
        return fitting(self.data.abs().amax((2, 3, 5)))

    def take_scales(self, scales: Tensor) -> None:
        """From now on, of what is in e4m3; nothing may be held yet."""
        assert self.scales is not None
        self.scales.copy_(scales)

    def layer(self, index: int) -> LayerCache:
        """Keys and values of layer `index`, as views."""
        return self._layers[index]

    @property
    def rows(self) -> Tensor:
        """The same, token by token: [layers, keys and values, blocks · block_size, kv_heads, head_dim], as a view; of
        bytes where it is e4m3."""
        return _bytes(self.data).flatten(2, 3)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.data.numel() * self.data.element_size()


class SlotRows(Protocol):
    """Rows of a pass, whatever else is known of it: of which slot and position each is."""

    @property
    def slots(self) -> Tensor:
        """int64 [R], of each span."""
        ...

    @property
    def row_span(self) -> Tensor:
        """int64 [N]."""
        ...

    @property
    def positions(self) -> Tensor:
        """int64 [N]."""
        ...

    @property
    def write_index(self) -> Tensor:
        """int64 [N]; 0: a void row."""
        ...


class FeatureCache:
    """What a draft head reads of the verifier, one vector a position, in the blocks of the head's own pool."""

    def __init__(
        self,
        layers: tuple[int, ...],
        output: bool,
        project: Callable[[Sequence[Tensor]], Tensor],
        blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        kernels: Kernels,
        table: Tensor,
    ) -> None:
        """layers, output: which of the verifier's streams are read, see Reader; project: makes features [N, width] of
        those; table: of the pool's blocks, int32 [slots, blocks a row]."""
        self.layers = layers
        self.output = output
        self.project = project
        self.block_size = block_size
        self.kernels = kernels
        self.table = table
        self.data = torch.empty(blocks * block_size, width, dtype=dtype, device=table.device).zero_()

    def keep(self, streams: Sequence[Tensor], layout: SlotRows) -> None:
        """Keep the features of a verifier's pass."""
        self.kernels.keep_rows_(self.data, self.project(streams), self._rows(layout))

    def before(self, layout: SlotRows) -> Tensor:
        """The features of the positions before the rows of a pass, [N, width]; position 0 has zeros before it."""
        return self.kernels.rows_before(self.data, self._rows(layout))

    def _rows(self, layout: SlotRows) -> PagedRows:
        return PagedRows(
            self.table, self.block_size, layout.slots, layout.row_span, layout.positions, layout.write_index
        )
