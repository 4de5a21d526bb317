"""Launches of skinny.cu: products of up to eight rows, from Hopper on. Knows tensors and launches, no models."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifypd.kernels import nvrtc
from verifypd.kernels.base import Activation, Normed, Rows
from verifypd.kernels.launch import dependent, processors, shared_memory

SOURCE = Path(__file__).with_name("skinny.cu")
MOST_ROWS = 8
MOST_BYTES = 260 * 2**20  # of a weight: Triton takes longer to start, and reads large ones up to 15 % faster (H200)
ROUND = 32  # of the depth, at a time
THREADS = 256  # of a block; there is one for each processor
SQUARES_ROW = 16  # sums of squares, of which Triton's products read as many at once
PLAIN, GATED, ADDED, QKV = range(4)

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


def suits(x: Rows, weight: Tensor) -> bool:
    """Whether a product is one of these. Its weights must be older than the kernel before: they are read early."""
    values = _values(x)
    rows, depth = values.shape
    return (
        0 < rows <= MOST_ROWS
        and weight.nbytes <= MOST_BYTES
        and depth % ROUND == 0
        and weight.dtype == values.dtype
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and _available(weight.device)
    )


@cache
def _available(device: torch.device) -> bool:
    """Whether they run on a device. Without NVRTC the products are Triton's."""
    return (
        dependent(device)
        and shared_memory(device) >= UNDER_WAY + 2**15
        and nvrtc.works(lambda: _function(device, PLAIN, 4, False, False, False), "products of few rows are")
    )


def linear(x: Rows, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See Kernels.linear."""
    out = _values(x).new_empty(x.shape[0], weight.shape[0])
    _launch(PLAIN, x, weight, bias, weight.shape[0], out=out)
    return out


def linear_gated(x: Rows, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """See Kernels.linear_gated."""
    outputs = weight.shape[0] // 2
    out = _values(x).new_empty(x.shape[0], outputs)
    _launch(GATED, x, weight, bias, outputs, silu=activation == "silu", out=out)
    return out


def linear_add_norm(
    x: Rows, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float, unit_offset: bool
) -> tuple[Normed, Tensor]:
    """See Kernels.linear_add_norm. Blocks write parts of a row: its norm is left to who reads it."""
    residual, norm = residual.contiguous(), norm.to(weight.dtype)
    out, stream = torch.empty_like(residual), torch.empty_like(residual)
    squares = torch.empty(processors(weight.device), SQUARES_ROW, dtype=torch.float32, device=weight.device)
    _launch(
        ADDED, x, weight, bias, weight.shape[0], unit=unit_offset,
        residual=residual, norm=norm, out=out, stream=stream, new_squares=squares, new_squares_row=SQUARES_ROW,
    )  # fmt: skip
    return Normed(out, squares, eps), stream


def linear_qkv(
    x: Rows,
    weight: Tensor,
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
    q = _values(x).new_empty(x.shape[0], query_heads, width)
    _launch(
        QKV, x, weight, bias, weight.shape[0] // 2, out=q, cache_k=cache_k, cache_v=cache_v, write_index=write_index,
        positions=positions, cos=cos, sin=sin, query_heads=query_heads, kv_heads=kv_heads, width=width,
    )  # fmt: skip
    return q


def _values(x: Rows) -> Tensor:
    return x.values if isinstance(x, Normed) else x


def _launch(
    mode: int, x: Rows, weight: Tensor, bias: Tensor | None, items: int, *, silu: bool = False, unit: bool = False,
    **given: Tensor | int,
) -> None:  # fmt: skip
    values = _values(x)
    if values.stride(1) != 1 or values.stride(0) % 8 or values.data_ptr() % 16:  # sixteen bytes are read at once
        values = values.clone(memory_format=torch.contiguous_format)
    rows, depth = values.shape
    assert depth == weight.shape[1]
    blocks = processors(weight.device)
    arguments: dict[str, Any] = {
        key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in given.items()
    }
    if isinstance(x, Normed):
        arguments.update(squares=x.squares.data_ptr(), parts=len(x.squares), squares_row=x.squares.stride(0), eps=x.eps)
    if bias is not None:
        bias = bias.to(weight.dtype)
        arguments["bias"] = bias.data_ptr()
    argument = _Arguments(
        x=values.data_ptr(), weight=weight.data_ptr(), x_row=values.stride(0), rows=rows, depth=depth, items=items,
        **arguments,
    )  # fmt: skip
    share = -(-weight.shape[0] // blocks)
    function = _function(weight.device, mode, matrices_of(mode, share), weight.dtype == torch.float16, silu, unit)
    with torch.cuda.device(weight.device):
        function(blocks, argument, torch.cuda.current_stream().cuda_stream)


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


@cache
def _function(device: torch.device, mode: int, matrices: int, float16: bool, silu: bool, unit: bool) -> nvrtc.Function:
    ahead, shared = memory(mode, matrices)
    constants = {
        "PLAIN": PLAIN, "GATED": GATED, "ADDED": ADDED, "QKV": QKV, "ROWS": MOST_ROWS, "THREADS": THREADS,
        "DEPTH": ROUND, "MODE": mode, "MATRICES": matrices, "AHEAD": ahead, "FLOAT16": float16, "SILU": silu,
        "UNIT": unit,
    }  # fmt: skip
    return nvrtc.loaded(SOURCE, "skinny", device, constants, THREADS, shared)
