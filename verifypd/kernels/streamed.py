"""Products in CUDA C++ whose weights come while the kernel before still runs. Knows tensors, and no launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifypd.kernels.base import Activation, Normed, Rows
from verifypd.kernels.weights import Weight

NUMBERS = Path(__file__).with_name("numbers.cu")  # before every source
PLAIN, GATED, ADDED, QKV = MODES = range(4)  # as the sources have them
NAMES = {"PLAIN": PLAIN, "GATED": GATED, "ADDED": ADDED, "QKV": QKV}


def values_of(x: Rows) -> Tensor:
    """Rows without the norm that is left to do."""
    return x.values if isinstance(x, Normed) else x


def aligned(x: Rows) -> Tensor:
    """The same, where sixteen bytes can be read at once, each row of its own."""
    values = values_of(x)
    row = values.stride(0)
    if values.stride(1) != 1 or row % 8 or row < values.shape[1] or values.data_ptr() % 16:
        values = values.clone(memory_format=torch.contiguous_format)
    return values


def whole(values: Tensor) -> Tensor:
    """A tensor without gaps, of which sixteen bytes can be read at once."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def addresses(x: Rows, weight: Tensor, bias: Tensor | None, given: dict[str, Tensor | int]) -> dict[str, Any]:
    """Fields of a structure of arguments: tensors as addresses, and what norms x."""
    found: dict[str, Any] = {key: v.data_ptr() if isinstance(v, Tensor) else v for key, v in given.items()}
    if isinstance(x, Normed):
        found.update(squares=x.squares.data_ptr(), parts=len(x.squares), squares_row=x.squares.stride(0), eps=x.eps)
    if bias is not None:
        found["bias"] = bias.data_ptr()
    return found


class Streamed(ABC):
    """Products of some number of rows. Their weights must be older than the kernel before: they are read early."""

    widths: Container[int]  # of heads whose queries, keys and values it rotates

    @abstractmethod
    def suits(self, x: Rows, weight: Weight) -> bool:
        """Whether a product is one of these."""

    @abstractmethod
    def squares(self, rows: int, weight: Weight) -> Tensor:
        """Room for the sums of squares of parts of a stream's rows: float32 [parts, rows or more]."""

    @abstractmethod
    def launch(
        self, mode: int, x: Rows, weight: Tensor, bias: Tensor | None, *, silu: bool = False, unit: bool = False,
        **given: Tensor | int,
    ) -> None:  # fmt: skip
        """One product. given: fields of the arguments, by name. bias: of the weight's dtype."""

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None) -> Tensor:
        """See Kernels.linear."""
        out = values_of(x).new_empty(x.shape[0], weight.shape[0])
        self._launch(PLAIN, x, weight, bias, out=out)
        return out

    def linear_gated(self, x: Rows, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        """See Kernels.linear_gated."""
        out = values_of(x).new_empty(x.shape[0], weight.shape[0] // 2)
        self._launch(GATED, x, weight, bias, silu=activation == "silu", out=out)
        return out

    def linear_add_norm(
        self,
        x: Rows,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        unit_offset: bool,
    ) -> tuple[Normed, Tensor]:
        """See Kernels.linear_add_norm. Blocks write parts of a row: its norm is left to who reads it."""
        residual, norm = whole(residual), whole(norm.to(residual.dtype))
        out, stream = torch.empty_like(residual), torch.empty_like(residual)
        squares = self.squares(len(residual), weight)
        self._launch(
            ADDED, x, weight, bias, unit=unit_offset, residual=residual, norm=norm, out=out, stream=stream,
            new_squares=squares, new_squares_row=squares.stride(0),
        )  # fmt: skip
        return Normed(out, squares, eps), stream

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
    ) -> Tensor:
        """See Kernels.linear_qkv."""
        kv_heads, width = cache_k.shape[-2:]
        query_heads = weight.shape[0] // width - 2 * kv_heads
        q = values_of(x).new_empty(x.shape[0], query_heads, width)
        self._launch(
            QKV, x, weight, bias, out=q, cache_k=cache_k, cache_v=cache_v, write_index=write_index,
            positions=positions, cos=cos, sin=sin, query_heads=query_heads, kv_heads=kv_heads, width=width,
        )  # fmt: skip
        return q

    def _launch(
        self, mode: int, x: Rows, weight: Weight, bias: Tensor | None, *, silu: bool = False, unit: bool = False,
        **given: Tensor | int,
    ) -> None:  # fmt: skip
        assert isinstance(weight, Tensor) and x.shape[1] == weight.shape[1]
        bias = None if bias is None else bias.to(weight.dtype)
        with torch.cuda.device(weight.device):
            self.launch(mode, x, weight, bias, silu=silu, unit=unit, **given)
