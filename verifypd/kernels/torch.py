"""The reference kernels in plain torch, for every device. Knows nothing of how weights were loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.kernels.base import Activation, Composed, PagedRows, Rows, whole
from verifypd.kernels.launch import fp8_products
from verifypd.kernels.weights import Fp8Weight, Int8Panels, Int8Weight, PackedWeight, Weight, fp8_rows

DEQUANTIZE_ROWS = 16  # from this many rows on, dequantising once beats the packed int8 product


class TorchKernels(Composed):
    """Activations in the weights' dtype; norms and rotations computed in float32."""

    name = "torch"

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The weights' own dtype."""
        return weight_dtype

    def pack(self, weight: Tensor | Int8Weight | Fp8Weight) -> Weight:
        """As it is; what no CPU multiplies is widened once, and not in every pass."""
        return (
            weight.dequantize(weight.dtype) if isinstance(weight, Fp8Weight) and weight.device.type == "cpu" else weight
        )

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Kernels.linear."""
        x = whole(x)
        if isinstance(weight, Fp8Weight) and multiplies_fp8(x, weight):
            return scaled_product(*self.fp8_rows(x), weight, bias)
        if isinstance(weight, PackedWeight | Int8Panels | Fp8Weight):
            weight = weight.dequantize(x.dtype)
        if isinstance(weight, Int8Weight):
            # the packed product is wrong for rows that are no multiple of 16 long
            if x.device.type == "cpu" and x.shape[0] < DEQUANTIZE_ROWS and x.shape[1] % 16 == 0:
                y: Tensor = torch.ops.aten._weight_int8pack_mm(x, weight.values, weight.scale.to(x.dtype))
            else:
                y = F.linear(x, weight.values.to(x.dtype)) * weight.scale.to(x.dtype)
            return y if bias is None else y + bias
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def fp8_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `fp8_rows`."""
        return fp8_rows(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """See Kernels.rms_norm."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if unit_offset:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight.to(x.dtype) * wide.to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm."""
        total = x + residual
        return self.rms_norm(total, weight, eps, unit_offset), total

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See Kernels.gated."""
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def rotate_(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Kernels.rotate_."""
        half = cos.shape[1]
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [N, 1, R / 2]
        for x in (q, k):
            low, high = x[..., :half].float(), x[..., half : 2 * half].float()
            rotated = low * c - high * s, high * c + low * s  # both before either is written: low may be a view of x
            x[..., :half], x[..., half : 2 * half] = rotated

    def keep_rows_(self, data: Tensor, rows: Tensor, where: PagedRows) -> None:
        """See Kernels.keep_rows_."""
        keep_rows_(data, rows, where)

    def rows_before(self, data: Tensor, where: PagedRows) -> Tensor:
        """See Kernels.rows_before."""
        return rows_before(data, where)


def multiplies_fp8(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the device multiplies fp8 with fp8, and torch has the product; else the weight is widened."""
    outputs, depth = weight.shape
    fits = x.dtype == torch.bfloat16 and len(x) > 0 and outputs % 16 == 0 and depth % 16 == 0
    return fits and fp8_products(x.device)


def scaled_product(x: Tensor, row_scale: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """x [N, in] in fp8, a scale for each row of it and of the weight -> [N, out] in bfloat16.

    Fast accumulation keeps about 14 bits of a sum: far more than the 4 that x was rounded to.
    """
    return torch._scaled_mm(
        x, weight.values.t(), row_scale[:, None], weight.scale[None, :], bias=bias, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


def keep_rows_(data: Tensor, rows: Tensor, where: PagedRows) -> None:
    """See Kernels.keep_rows_."""
    places = where.places().masked_fill_(where.write_index == 0, 0)
    data.index_copy_(0, places, rows.to(data.dtype))  # on a CPU 18 times as fast as data[places] = rows


def rows_before(data: Tensor, where: PagedRows) -> Tensor:
    """See Kernels.rows_before."""
    return data[where.places(back=1)].masked_fill_((where.positions == 0)[:, None], 0.0)
