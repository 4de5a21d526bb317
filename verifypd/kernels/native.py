"""Kernels in C, through ctypes. Knows which calls C takes and which go to torch; nothing of models.

Activations are float32; weights float32, bfloat16, float16 or int8 with a scale per row, as they lie in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.kernels.base import Activation, Int8Weight

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # enum in native.c
TORCH_ROWS = 64  # above this many rows torch's own product is faster where it is tuned to the processor (x86)


class NativeKernels:
    """CPU only. A row's result is the same to the bit whatever rows come with it, unless torch takes over for many rows
    (x86 only, float32, or bfloat16 where the processor multiplies it); with `batch_invariant` it never does."""

    name = "native"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        loaded = build.library()
        if loaded is None:
            raise ConfigError("native kernels cannot be built here: install gcc or clang, or use kernels=torch")
        self.batch_invariant = batch_invariant
        processor = build.processor()
        self._torch_types: set[torch.dtype] = set()
        if processor.startswith("x86") and not batch_invariant:
            self._torch_types.add(torch.float32)
            if "amx_bf16" in processor or "avx512_bf16" in processor:
                self._torch_types.add(torch.bfloat16)
        self._linear = loaded.vpd_linear
        self._norm = loaded.vpd_norm
        self._gated = loaded.vpd_gated
        self._rotate = loaded.vpd_rotate

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """float32 always: weights are widened as they are read."""
        return torch.float32

    def linear(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
        """See Kernels.linear."""
        if isinstance(weight, Int8Weight):
            values, scale = weight.values, weight.scale.data_ptr()
        else:
            values, scale = weight, None
        rows, width = x.shape
        kind = values.dtype
        if rows > TORCH_ROWS and kind in self._torch_types:
            return F.linear(x.to(kind), values, None if bias is None else bias.to(kind)).float()
        if x.stride(1) != 1:
            x = x.contiguous()
        outputs = values.shape[0]
        y = torch.empty(rows, outputs)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            rows,
            values.data_ptr(),
            TYPES[kind],
            scale,
            None if bias is None else bias.data_ptr(),
            0 if bias is None else TYPES[bias.dtype],
            y.data_ptr(),
            width,
            outputs,
            torch.get_num_threads(),
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """See Kernels.rms_norm."""
        if x.dim() > 2 or x.stride(-1) != 1:
            x = x.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        width = weight.shape[0]
        self._norm(
            x.data_ptr(),
            x.stride(0) if x.dim() == 2 else width,
            None,
            None,
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

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm."""
        x, residual = x.contiguous(), residual.contiguous()
        y, total = torch.empty_like(x), torch.empty_like(x)
        width = weight.shape[0]
        self._norm(
            x.data_ptr(),
            width,
            residual.data_ptr(),
            total.data_ptr(),
            weight.data_ptr(),
            TYPES[weight.dtype],
            y.data_ptr(),
            x.numel() // width,
            width,
            eps,
            1.0 if unit_offset else 0.0,
            torch.get_num_threads(),
        )
        return y, total

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
