"""The operations a model is made of, besides attention. Knows shapes and dtypes; nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from verifypd.kernels.weights import Fp8Weight, Int8Weight, Weight

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """Rows of a stream that are normed but for one factor each, which whoever multiplies them puts on the result.

    row = values / sqrt(sum of its squares / width + eps). So a product can norm what it wrote without waiting for the
    others that write the same rows.
    """

    values: Tensor  # [N, H]: the stream times the norm's weight
    squares: Tensor  # float32 [parts, N or more]: sums over parts of the stream's rows
    eps: float

    @property
    def shape(self) -> torch.Size:
        """[N, H]."""
        return self.values.shape


Rows = Tensor | Normed


def whole(x: Rows) -> Tensor:
    """Rows as a tensor: the reference of Kernels.whole."""
    if isinstance(x, Tensor):
        return x
    rows, width = x.shape
    factor = torch.rsqrt(x.squares[:, :rows].sum(0) / width + x.eps)
    return (x.values * factor[:, None]).to(x.values.dtype)


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

    def pack(self, weight: Tensor | Int8Weight | Fp8Weight) -> Weight:
        """The form of a matrix that `linear` reads fastest, equal to it within the rounding of its dtype."""
        ...

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [N, in], weight [out, in] row-major, or of those that `pack` makes -> [N, out]."""
        ...

    def embed(self, ids: Tensor, table: Weight) -> Tensor:
        """Rows `ids` [N] of a table [V, H], or of one that `pack` made: [N, H], of its dtype or wider."""
        ...

    def embed_norm(
        self,
        ids: Tensor,
        table: Weight,
        scale: float | None,
        weight: Tensor,
        eps: float,
        unit_offset: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x, weight, eps, unit_offset), x), where x are `embed(ids, table)` in `dtype`, times `scale`."""
        ...

    def embed_beside(
        self,
        ids: Tensor,
        table: Weight,
        scale: float | None,
        features: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Such x in the dtype of features [N, H], with those beside them, [N, 2 H]; and those. norms: of either."""
        ...

    def whole(self, x: Rows) -> Tensor:
        """Rows as a tensor."""
        ...

    def linear_gated(self, x: Rows, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        """gated(linear(x, weight, bias), activation)."""
        ...

    def linear_add_norm(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        unit_offset: bool = False,
    ) -> tuple[Rows, Tensor]:
        """add_rms_norm(linear(x, weight, bias), residual, norm, eps, unit_offset), the first perhaps as `Normed`."""
        ...

    def linear_qkv(
        self,
        x: Rows,
        weight: Weight,
        bias: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        write_index: Tensor,
        scales: Tensor | None = None,
    ) -> Tensor | None:
        """linear(x, weight, bias) as queries, keys and values; queries and keys are rotated, keys and values written to
        their places [N] of a cache [places, heads, D], over its `scales` [2, heads] where it has some. Returns the
        queries [N, heads, D]; None: not here, do it apart.
        """
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


def _scaled(rows: Tensor, scale: float | None) -> Tensor:
    return rows if scale is None else rows * scale


class Composed:
    """What is made of several operations, one after the other."""

    def embed(self, ids: Tensor, table: Weight) -> Tensor:
        """See Kernels.embed."""
        return embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)

    def embed_norm(
        self: Kernels,
        ids: Tensor,
        table: Weight,
        scale: float | None,
        weight: Tensor,
        eps: float,
        unit_offset: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.embed_norm."""
        rows = _scaled(self.embed(ids, table).to(dtype), scale)
        return self.rms_norm(rows, weight, eps, unit_offset), rows

    def embed_beside(
        self: Kernels,
        ids: Tensor,
        table: Weight,
        scale: float | None,
        features: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.embed_beside."""
        rows = _scaled(self.embed(ids, table).to(features.dtype), scale)
        if norms is not None:
            rows, features = self.rms_norm(rows, norms[0], eps), self.rms_norm(features, norms[1], eps)
        return torch.cat([rows, features], -1), features

    def whole(self, x: Rows) -> Tensor:
        """See Kernels.whole."""
        return whole(x)

    def linear_qkv(
        self,
        x: Rows,
        weight: Weight,
        bias: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        write_index: Tensor,
        scales: Tensor | None = None,
    ) -> Tensor | None:
        """See Kernels.linear_qkv."""
        return None

    def linear_gated(self: Kernels, x: Rows, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        """See Kernels.linear_gated."""
        return self.gated(self.linear(x, weight, bias), activation)

    def linear_add_norm(
        self: Kernels,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        unit_offset: bool = False,
    ) -> tuple[Rows, Tensor]:
        """See Kernels.linear_add_norm."""
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps, unit_offset)
