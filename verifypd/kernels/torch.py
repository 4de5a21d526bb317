"""The reference kernels in plain torch, for every device. Knows nothing of how weights were loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.kernels.base import Activation, Composed, HalfWeight, Int8Weight, PagedRows, Rows, Weight, whole

DEQUANTIZE_ROWS = 16  # from this many rows on, dequantising once beats the packed int8 product


class TorchKernels(Composed):
    """Activations in the weights' dtype; norms and rotations computed in float32."""

    name = "torch"

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The weights' own dtype."""
        return weight_dtype

    def pack(self, weight: Tensor) -> Weight:
        """As it is."""
        return weight

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Kernels.linear."""
        x = whole(x)
        if isinstance(weight, HalfWeight):
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


def keep_rows_(data: Tensor, rows: Tensor, where: PagedRows) -> None:
    """See Kernels.keep_rows_."""
    places = where.places().masked_fill_(where.write_index == 0, 0)
    data.index_copy_(0, places, rows.to(data.dtype))  # on a CPU 18 times as fast as data[places] = rows


def rows_before(data: Tensor, where: PagedRows) -> Tensor:
    """See Kernels.rows_before."""
    return data[where.places(back=1)].masked_fill_((where.positions == 0)[:, None], 0.0)
