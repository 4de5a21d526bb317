"""Kernels in C, through ctypes. Knows which calls C takes and which go to torch; nothing of models.

Activations are float32; weights float32, bfloat16, float16 or int8 with a scale per row, in the order in which the
processor multiplies them best.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.kernels.base import Activation, Composed, PagedRows, Rows, whole
from verifypd.kernels.torch import keep_rows_, rows_before
from verifypd.kernels.weights import Fp8Weight, HalfWeight, Int8Panels, Int8Weight, PanelWeight, Weight

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # enum in native_vectors.h
HALF = 4
PANELS = {torch.bfloat16: 6, torch.float32: 7, torch.int8: 8}
TORCH_ROWS = 65  # from which torch's own product of bfloat16 is faster than ours, both by AMX tiles


def operand(weight: Weight) -> tuple[int, int | None, int]:
    """A matrix as C takes it: where its values and its scales are, and of what type it is."""
    if isinstance(weight, Tensor):
        return weight.data_ptr(), None, TYPES[weight.dtype]
    if isinstance(weight, PanelWeight):
        return weight.values.data_ptr(), None, PANELS[weight.dtype]
    kinds = PANELS if isinstance(weight, Int8Panels) else TYPES
    kind = HALF if isinstance(weight, HalfWeight) else kinds[weight.values.dtype]
    return weight.values.data_ptr(), weight.scale.data_ptr(), kind


class NativeKernels(Composed):
    """CPU only. A row's result is the same to the bit whatever rows come with it, unless torch takes over for many rows
    (bfloat16 where there are AMX tiles); with `batch_invariant` it never does."""

    name = "native"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        loaded = build.library()
        if loaded is None:
            raise ConfigError("native kernels cannot be built here: install gcc or clang, or use kernels=torch")
        self.batch_invariant = batch_invariant
        self.halves = bool(loaded.vpd_takes_half())  # whether matrices are packed as float16
        self.tiles = bool(loaded.vpd_takes_tiles())  # whether bfloat16 and int8 are multiplied by AMX tiles
        self.panels = {dtype for dtype in PANELS if loaded.vpd_takes_panels(TYPES[dtype])}  # that are packed so
        self._torch_rows = {torch.bfloat16: TORCH_ROWS} if self.tiles and not batch_invariant else {}
        self._linear = loaded.vpd_linear
        self._norm = loaded.vpd_norm
        self._gated = loaded.vpd_gated
        self._rotate = loaded.vpd_rotate
        self._keep = loaded.vpd_keep
        self._embed = loaded.vpd_embed

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """float32 always: weights are widened as they are read."""
        return torch.float32

    def leaves(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether a product of so many rows with weights of this dtype is left to torch."""
        return rows >= self._torch_rows.get(dtype, rows + 1)

    def pack(self, weight: Tensor | Int8Weight | Fp8Weight) -> Weight:
        """16-bit floats as float16 where the processor multiplies it (native_half.h says what that costs), others and
        int8 in panels where that is fastest (native_panels.h). fp8 is widened before."""
        if isinstance(weight, Int8Weight):
            return Int8Panels.pack(weight) if torch.int8 in self.panels and Int8Panels.fits(weight) else weight
        if isinstance(weight, Fp8Weight):
            weight = weight.dequantize(weight.dtype)
        if weight.dtype in self.panels and PanelWeight.fits(weight):
            return PanelWeight.pack(weight)
        return HalfWeight.pack(weight) if self.halves and HalfWeight.fits(weight) else weight

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Kernels.linear."""
        x = whole(x)
        # every step here runs with caches emptied by the weights of the call before: 1 us warm is 5 us then
        rows = len(x)
        if isinstance(weight, Tensor):
            at, scale, kind = weight.data_ptr(), None, TYPES[weight.dtype]
            if self._torch_rows and self.leaves(rows, weight.dtype):
                return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).float()
        else:
            at, scale, kind = operand(weight)
        outputs, width = weight.shape
        stride = width
        if not x.is_contiguous():
            if x.stride(1) != 1:
                x = x.contiguous()
            stride = x.stride(0)
        y = torch.empty(rows, outputs)
        if bias is None:
            bias_at, bias_type = None, 0
        else:
            bias_at, bias_type = bias.data_ptr(), TYPES[bias.dtype]
        failed = self._linear(
            x.data_ptr(), stride, rows, at, kind, scale, bias_at, bias_type, y.data_ptr(), width, outputs,
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the working space of a product")
        return y

    def embed(self, ids: Tensor, table: Weight) -> Tensor:
        """See Kernels.embed. In float32, which activations have here."""
        if ids.dim() != 1 or ids.dtype is not torch.int64:
            return super().embed(ids, table)
        ids, (rows, width) = ids.contiguous(), table.shape
        at, scale, kind = operand(table)
        y = torch.empty(len(ids), width)
        if self._embed(ids.data_ptr(), len(ids), at, kind, scale, rows, width, y.data_ptr()):
            raise IndexError(f"a token id is not in 0..{rows - 1}")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """See Kernels.rms_norm."""
        if x.dim() > 2 or x.stride(-1) != 1:
            x = x.contiguous()
        return self._normed(x, weight, eps, unit_offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm."""
        x, residual = x.contiguous(), residual.contiguous()
        total = torch.empty_like(x)
        return self._normed(x, weight, eps, unit_offset, residual, total), total

    def _normed(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        unit_offset: bool,
        residual: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Tensor:
        """x with its residual, where there is one, normed; `total` gets their sum."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        width = weight.shape[0]
        self._norm(
            x.data_ptr(),
            x.stride(0) if x.dim() == 2 else width,
            None if residual is None else residual.data_ptr(),
            None if total is None else total.data_ptr(),
            weight.data_ptr(),
            TYPES[weight.dtype],
            y.data_ptr(),
            x.numel() // width,
            width,
            eps,
            1.0 if unit_offset else 0.0,
            torch.get_num_threads(),
        )
        return y

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See Kernels.gated."""
        if gate_up.stride(1) != 1:
            gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        width //= 2
        y = torch.empty(rows, width)
        self._gated(
            gate_up.data_ptr(),
            gate_up.stride(0),
            y.data_ptr(),
            rows,
            width,
            activation == "gelu_tanh",
            torch.get_num_threads(),
        )
        return y

    def rotate_(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Kernels.rotate_. The heads of a row must lie one after another, as in a fused qkv."""
        rows, q_heads, width = q.shape
        self._rotate(
            q.data_ptr(),
            q.stride(0),
            q_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            width,
            cos.shape[1],
            torch.get_num_threads(),
        )

    def keep_rows_(self, data: Tensor, rows: Tensor, where: PagedRows) -> None:
        """See Kernels.keep_rows_. One call: between two passes, with cold caches, each of torch's takes 20 us."""
        shape = (len(where.positions), data.shape[1])
        plain = rows.dtype is data.dtype is torch.float32 and rows.is_contiguous() and rows.shape == shape
        if not plain:
            keep_rows_(data, rows, where)
            return
        table = where.block_table
        self._keep(
            data.data_ptr(), rows.data_ptr(), data.shape[1], table.data_ptr(), table.stride(0), where.block_size,
            where.slots.data_ptr(), where.row_span.data_ptr(), where.positions.data_ptr(),
            where.write_index.data_ptr(), len(where.positions),
        )  # fmt: skip

    def rows_before(self, data: Tensor, where: PagedRows) -> Tensor:
        """See Kernels.rows_before."""
        return rows_before(data, where)
