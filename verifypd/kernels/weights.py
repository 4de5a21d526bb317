"""Formats of weight matrices: eight bits with scales, and orders in which processors multiply them best. Knows numbers;
nothing of products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True, eq=False)
class PanelWeight:
    """A weight matrix for processors that multiply float32 in vectors: 16 rows side by side, entry by entry.

    In bfloat16 two entries of a row lie together.
    """

    values: Tensor  # [out / 16, in / e, 16, e], e entries: e j to e j + e - 1 of rows 16 i to 16 i + 15

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a tensor can be packed: a matrix of bfloat16 or float32 whose sides divide."""
        whole = weight.dim() == 2 and weight.numel() > 0 and not any(side % 16 for side in weight.shape)
        return whole and weight.dtype in (torch.bfloat16, torch.float32)

    @classmethod
    def pack(cls, weight: Tensor) -> PanelWeight:
        """weight [out, in], a matrix that `fits`."""
        (outputs, width), entries = weight.shape, 4 // weight.element_size()
        return cls(weight.view(outputs // 16, 16, width // entries, entries).transpose(1, 2).contiguous())

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` [...] in float32: a tied embedding is read this way."""
        return self.values[ids // 16, :, ids % 16].flatten(-2).float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix as an ordinary tensor."""
        return self.values.transpose(1, 2).reshape(self.shape).to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix it was made of."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.values.nbytes

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        panels, steps, _, entries = self.values.shape
        return torch.Size((16 * panels, steps * entries))


@dataclass(frozen=True, slots=True, eq=False)
class Int8Panels(_Scaled):
    """An Int8Weight in panels as PanelWeight has them, two entries of a row together."""

    values: Tensor  # [out / 16, in / 2, 16, 2] int8
    scale: Tensor  # [out] float32

    @staticmethod
    def fits(weight: Int8Weight) -> bool:
        """Whether its sides divide."""
        return weight.values.numel() > 0 and not any(side % 16 for side in weight.shape)

    @classmethod
    def pack(cls, weight: Int8Weight) -> Int8Panels:
        """A matrix that `fits`."""
        outputs, width = weight.shape
        return cls(weight.values.view(outputs // 16, 16, width // 2, 2).transpose(1, 2).contiguous(), weight.scale)

    def unpacked(self) -> Int8Weight:
        """The same matrix, row by row."""
        return Int8Weight(self.values.transpose(1, 2).reshape(self.shape), self.scale)

    def some(self, ids: Tensor) -> Int8Weight:
        """The rows `ids` [...], row by row; the others are not copied."""
        return Int8Weight(self.values[ids // 16, :, ids % 16].flatten(-2), self.scale[ids])

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` [...] in float32: a tied embedding is read this way."""
        part = self.some(ids)
        return part.values.float() * part.scale.unsqueeze(-1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix as an ordinary tensor."""
        return self.unpacked().dequantize(dtype)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        panels, pairs, _, _ = self.values.shape
        return torch.Size((16 * panels, 2 * pairs))


PackedWeight = HalfWeight | PanelWeight  # of floats
Weight = Tensor | Int8Weight | Int8Panels | Fp8Weight | HalfWeight | PanelWeight
QUANTIZED: dict[Quantization, type[Int8Weight] | type[Fp8Weight]] = {"int8": Int8Weight, "fp8": Fp8Weight}
