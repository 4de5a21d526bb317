"""Launches of skinny.cu: products of up to eight rows, from Hopper on. Knows tensors and launches, no models."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verifypd.kernels import nvrtc
from verifypd.kernels.base import Rows
from verifypd.kernels.launch import dependent, processors, shared_memory
from verifypd.kernels.streamed import (
    ADDED,
    GATED,
    NAMES,
    NUMBERS,
    PLAIN,
    QKV,
    Streamed,
    addresses,
    aligned,
    values_of,
)
from verifypd.kernels.weights import Weight

SOURCE = Path(__file__).with_name("skinny.cu")
MOST_ROWS = 8
MOST_BYTES = 260 * 2**20  # of a weight: Triton takes longer to start, and reads large ones up to 15 % faster (H200)
ROUND = 32  # of the depth, at a time
THREADS = 256  # of a block; there is one for each processor
SQUARES_ROW = 16  # sums of squares, of which Triton's products read as many at once

# Bytes of shared memory for what is under way, of 227 KiB: the fastest of six on an H200, in whole passes. Attention
# starts beside the product before it where there is room.
UNDER_WAY = 180 * 1024
UNDER_WAY_BESIDE_ATTENTION = 130 * 1024


class _Arguments(ctypes.Structure):
    """As skinny.cu has them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x",  # [rows, depth], rows x_row apart
            "weight",  # [items, depth]; [2 items, depth] where GATED or QKV: an item is a pair of outputs there
            "bias",  # of the rows of the weight, or none
            "squares",  # float32 [parts, squares_row]: sums of squares of the stream x was made of; see `Normed`
            "residual",  # ADDED: [rows, items]
            "norm",  # ADDED: [items]
            "out",  # [rows, items]; QKV: queries [rows, query_heads, width]
            "stream",  # ADDED: out, [rows, items]
            "new_squares",  # ADDED: out, float32 [blocks, new_squares_row]
            "cache_k",  # QKV: [places, kv_heads, width]
            "cache_v",
            "write_index",  # QKV: int64 [rows], a row's place
            "positions",  # QKV: int64 [rows]
            "cos",  # QKV: float32 [T, width / 2]
            "sin",
        )),
        ("x_row", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in (
            "rows", "depth", "items", "parts", "squares_row", "new_squares_row", "query_heads", "kv_heads", "width",
        )),
        ("eps", ctypes.c_float),
    )  # fmt: skip


@cache
def _available(device: torch.device) -> bool:
    """Whether they run on a device. Without NVRTC the products are Triton's."""
    return (
        dependent(device)
        and shared_memory(device) >= UNDER_WAY + 2**15
        and nvrtc.works(lambda: _function(device, PLAIN, 4, False, False, False), "products of few rows")
    )


class Skinny(Streamed):
    """Products of up to eight rows."""

    widths = range(2, 1025, 2)

    def suits(self, x: Rows, weight: Weight) -> bool:
        """See Streamed."""
        values = values_of(x)
        rows, depth = values.shape
        return (
            isinstance(weight, Tensor)
            and 0 < rows <= MOST_ROWS
            and weight.nbytes <= MOST_BYTES
            and depth % ROUND == 0
            and weight.dtype == values.dtype
            and weight.dtype in (torch.bfloat16, torch.float16)
            and weight.is_contiguous()
            and weight.data_ptr() % 16 == 0
            and _available(weight.device)
        )

    def squares(self, rows: int, weight: Weight) -> Tensor:
        """See Streamed."""
        return torch.empty(processors(weight.device), SQUARES_ROW, dtype=torch.float32, device=weight.device)

    def launch(
        self, mode: int, x: Rows, weight: Tensor, bias: Tensor | None, *, silu: bool = False, unit: bool = False,
        **given: Tensor | int,
    ) -> None:  # fmt: skip
        """See Streamed."""
        values = aligned(x)
        rows, depth = values.shape
        blocks = processors(weight.device)
        argument = _Arguments(
            x=values.data_ptr(), weight=weight.data_ptr(), x_row=values.stride(0), rows=rows, depth=depth,
            items=weight.shape[0] // (2 if mode in (GATED, QKV) else 1), **addresses(x, weight, bias, given),
        )  # fmt: skip
        share = -(-weight.shape[0] // blocks)
        function = _function(weight.device, mode, matrices_of(mode, share), weight.dtype == torch.float16, silu, unit)
        function(blocks, torch.cuda.current_stream().cuda_stream, argument)


def matrices_of(mode: int, share: int) -> int:
    """Eight rows of weights each that a block multiplies at a time, of its `share`."""
    if share <= 16:
        return 2
    # with eight a row's squares would be spread over two warps, and little be under way beside attention
    return 4 if share <= 96 or mode in (ADDED, QKV) else 8


def memory(mode: int, matrices: int) -> tuple[int, int]:
    """Rounds that are fetched ahead, and bytes of shared memory of a block."""
    slot = (matrices + 1) * THREADS * 16
    sums = 2 * MOST_ROWS * THREADS // 32 * (8 * matrices + 8) * 4
    ahead = ((UNDER_WAY_BESIDE_ATTENTION if mode == QKV else UNDER_WAY) - sums) // slot
    return ahead, ahead * slot + sums


def source() -> bytes:
    """What is compiled."""
    return NUMBERS.read_bytes() + SOURCE.read_bytes()


@cache
def _function(device: torch.device, mode: int, matrices: int, float16: bool, silu: bool, unit: bool) -> nvrtc.Function:
    ahead, shared = memory(mode, matrices)
    constants = {
        **NAMES, "ROWS": MOST_ROWS, "THREADS": THREADS, "DEPTH": ROUND, "MODE": mode, "MATRICES": matrices,
        "AHEAD": ahead, "FLOAT16": float16, "SILU": silu, "UNIT": unit,
    }  # fmt: skip
    return nvrtc.loaded(source(), SOURCE.name, "skinny", device, constants, THREADS, shared)


PRODUCTS = Skinny()
