"""The operations a model is made of, besides attention. Knows shapes and dtypes; nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

Activation = Literal["silu", "gelu_tanh"]
Quantization = Literal["int8", "fp8"]  # of weights, with a scale for each row

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number of that format


class _Scaled:
    """What weights with a scale for each row have in common."""

    __slots__ = ()
    values: Tensor
    scale: Tensor

    @property
    def device(self) -> torch.device:
        """Where both tensors live."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight(_Scaled):
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


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(_Scaled):
    """A weight matrix in fp8 (e4m3) with one scale per output row: weight = values * scale[:, None]."""

    values: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [out] float32
    dtype: torch.dtype  # of what it is multiplied with, and of the matrix where it is widened

    @classmethod
    def quantize(cls, weight: Tensor) -> Fp8Weight:
        """Per row: its largest entry becomes 448. An entry moves by 1/16 of itself or scale / 1024, if that is more."""
        values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scale = torch.empty(len(weight), device=weight.device)
        for start in range(0, len(weight), 4096):  # bounds the float32 copy of a large matrix
            part = slice(start, start + 4096)
            values[part], scale[part] = fp8_rows(weight[part])
        return cls(values, scale, weight.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` in float32."""
        return self.values[ids].float() * self.scale[ids].unsqueeze(-1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix as an ordinary tensor."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for start in range(0, len(out), 4096):  # bounds the float32 copy of a large matrix
            rows = slice(start, start + 4096)
            out[rows] = self.values[rows].float() * self.scale[rows, None]
        return out

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp8 [N, W], and what each was divided by, float32 [N]."""
    wide = x.float()
    scale = wide.abs().amax(1).clamp_min(1e-12) / FP8_MAX
    return (wide / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


@dataclass(frozen=True, slots=True, eq=False)
class HalfWeight(_Scaled):
    """A weight matrix in float16 for processors that multiply it: weight = values * scale[:, None], four rows by turns.

    A scale is a power of two and brings the largest entry of its row into [8, 16). So a bfloat16 keeps all its bits,
    unless it is 2^-21 of that entry or less.
    """

    values: Tensor  # [out / 4, in / 8, 4, 8] float16: entries 8 j to 8 j + 7 of rows 4 i to 4 i + 3
    scale: Tensor  # [out] float32
    dtype: torch.dtype  # of the matrix it was made of

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a tensor can be packed: a matrix of 16-bit floats whose sides divide."""
        sixteen = weight.dtype in (torch.bfloat16, torch.float16)
        return sixteen and weight.dim() == 2 and weight.shape[0] % 4 == 0 and weight.shape[1] % 8 == 0

    @classmethod
    def pack(cls, weight: Tensor) -> HalfWeight:
        """weight [out, in], a matrix that `fits`."""
        outputs, width = weight.shape
        values = torch.empty(outputs // 4, width // 8, 4, 8, dtype=torch.float16, device=weight.device)
        scale = torch.empty(outputs, device=weight.device)
        for start in range(0, outputs, 4096):  # bounds the float32 copy of a large embedding
            rows = weight[start : start + 4096].float()
            power = torch.frexp(rows.abs().amax(1)).exponent.clamp(-100, 127) - 4
            ones = torch.ones(len(rows), device=weight.device)
            part = (rows * ones.ldexp(-power)[:, None]).view(-1, 4, width // 8, 8).transpose(1, 2)
            values[start // 4 : (start + len(rows)) // 4] = part
            scale[start : start + len(rows)] = ones.ldexp(power)
        return cls(values, scale, weight.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` [...] in float32: a tied embedding is read this way."""
        return self.values[ids // 4, :, ids % 4].flatten(-2).float() * self.scale[ids].unsqueeze(-1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix as an ordinary tensor."""
        return (self.values.transpose(1, 2).reshape(self.shape).float() * self.scale[:, None]).to(dtype)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        blocks, parts, _, _ = self.values.shape
        return torch.Size((4 * blocks, 8 * parts))


Weight = Tensor | Int8Weight | Fp8Weight | HalfWeight
QUANTIZED: dict[Quantization, type[Int8Weight] | type[Fp8Weight]] = {"int8": Int8Weight, "fp8": Fp8Weight}


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

    def pack(self, weight: Tensor | Fp8Weight) -> Weight:
        """The form of a matrix that `linear` reads fastest, equal to it within the rounding of its dtype."""
        ...

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [N, in], weight [out, in] row-major, or of those that `pack` makes -> [N, out]."""
        ...

    def embed(self, ids: Tensor, table: Weight) -> Tensor:
        """Rows `ids` [N] of a table [V, H], or of one that `pack` made: [N, H], of its dtype or wider."""
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


class Composed:
    """What is made of several operations, one after the other."""

    def embed(self, ids: Tensor, table: Weight) -> Tensor:
        """See Kernels.embed."""
        return embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)

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
