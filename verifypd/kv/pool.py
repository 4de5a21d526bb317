"""The tensors behind a block pool. Knows shapes and bytes; nothing of requests or of who owns a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verifypd.kernels.base import Kernels, PagedRows


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [blocks, block_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


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
    """What a draft head reads of the verifier at each position, in the blocks of the head's own pool."""

    def __init__(
        self, blocks: int, block_size: int, width: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.kernels = kernels
        self.data = torch.empty(blocks * block_size, width, dtype=dtype, device=device).zero_()

    def keep(self, streams: Sequence[Tensor], where: PagedRows) -> None:
        """Keep the states of a pass, each stream [N, a part of the width]."""
        self.kernels.keep_rows_(self.data, streams, where)

    def read(self, where: PagedRows) -> Tensor:
        """What was kept there, [N, width]."""
        return self.data[where.places()]
