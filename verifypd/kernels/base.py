"""The operations a model is made of, besides attention. Knows shapes and dtypes; nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight matrix in int8 with one scale per output row: weight = values * scale[:, None]."""

    values: Tensor  # [out, in] int8
    scale: Tensor  # [out] float32

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Weight:
        """Symmetric, per row, round to nearest: the error of an entry is at most scale / 2."""
        scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for start in range(0, weight.shape[0], 4096):  # bounds the float32 copy of a large embedding
            part = slice(start, start + 4096)
            values[part] = torch.round(weight[part].float() / scale[part, None]).clamp_(-127, 127).to(torch.int8)
        return cls(values, scale)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, dequantised to float32: a tied embedding is read this way."""
        return self.values[ids].float() * self.scale[ids].unsqueeze(-1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix as an ordinary tensor."""
        return (self.values.float() * self.scale[:, None]).to(dtype)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where both tensors live."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the rows of a pass lie in a cache of blocks."""

    block_table: Tensor  # int32 [S, max_blocks]
    block_size: int
    slots: Tensor  # int64 [R]
    row_span: Tensor  # int64 [N], which of the slots a row is of
    positions: Tensor  # int64 [N]
    write_index: Tensor  # int64 [N], of the pass; 0: a void row, which lies nowhere

    def places(self, back: int = 0) -> Tensor:
        """Where the position `back` before each row's lies among the rows of the cache, [N]; in the null block where
        nothing is reserved."""
        positions = (self.positions - back).clamp_min(0) if back else self.positions
        index = positions // self.block_size
        blocks = self.block_table[self.slots[self.row_span], index]
        return torch.add(positions, blocks - index, alpha=self.block_size)


class Kernels(Protocol):
    """One implementation of the operations; all of them agree with TorchKernels."""

    name: str

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The dtype activations have between layers when weights are stored in `weight_dtype`."""
        ...

    def linear(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
        """x [N, in], weight [out, in] row-major -> [N, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """x [..., H] over its last dimension; unit_offset scales by 1 + weight, in float32 (Gemma)."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [N, 2 I] -> activation(gate) * up, [N, I]."""
        ...

    def rotate_(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place, half-rotation. q [N, Hq, D] and k [N, Hkv, D] may be views of a fused qkv.

        cos, sin: [T, R / 2] float32 for the first R <= D dimensions of a head; positions [N] int64 index them.
        """
        ...

    def keep_rows_(self, data: Tensor, rows: Tensor, where: PagedRows) -> None:
        """Write rows [N, W] into a paged cache, data [blocks * block_size, W]; void rows are written nowhere but in the
        null block."""
        ...

    def rows_before(self, data: Tensor, where: PagedRows) -> Tensor:
        """What `keep_rows_` wrote for the position before each row's, [N, W]; zero for position 0."""
        ...
