"""Launches of wide.cu: products of 33 to 64 rows, on Hopper. Knows tensors and launches, no models."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verifypd.kernels import nvrtc, wgmma
from verifypd.kernels.base import Rows
from verifypd.kernels.launch import processors, shared_memory
from verifypd.kernels.streamed import NAMES, NUMBERS, PLAIN, Streamed, addresses, aligned, values_of
from verifypd.kernels.weights import Weight

SOURCE = Path(__file__).with_name("wide.cu")
LEAST_ROWS, MOST_ROWS = 33, 64  # of fewer Triton's are as fast, of more cuBLAS's are faster (H200)
LEAST_BYTES = 2**25  # of a weight: of smaller ones cuBLAS's are faster (H200)
PIECE = 64  # of the depth, at a time
TILE = 128  # outputs
THREADS = 384  # of a block
STAGES = 6  # pieces fetched ahead, the fastest of six numbers: with more, what ends a block waits behind them (H200)
LATER = 4  # pieces that the block which adds up a split tile has more than the others, which are read meanwhile (H200)


class _Arguments(ctypes.Structure):
    """As wide.cu has them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "bias",  # of the rows of the weight, or none
            "squares",  # float32 [parts, squares_row]: sums of squares of the stream x was made of; see `Normed`
            "residual",  # ADDED: [rows, outputs]
            "norm",  # ADDED: [outputs]
            "out",  # [rows, outputs], half of them where GATED; QKV: queries [rows, query_heads, width]
            "stream",  # ADDED: out, [rows, outputs]
            "new_squares",  # ADDED: out, float32 [outputs / TILE, new_squares_row]
            "cache_k",  # QKV: [places, kv_heads, width]
            "cache_v",
            "write_index",  # QKV: int64 [rows], a row's place
            "positions",  # QKV: int64 [rows]
            "cos",  # QKV: float32 [T, width / 2]
            "sin",
            "partial",  # float32 [blocks, ROWS / 2, 256]: sums of a tile that another block has to finish
            "flags",  # int32 [blocks]: whether these are there; zero before and after a launch
        )),
        *((name, ctypes.c_int) for name in (
            "rows", "depth", "outputs", "parts", "squares_row", "new_squares_row", "query_heads", "kv_heads", "width",
            "splits",  # parts of a tile; 0: shares are even, and cut where they end
            "later",  # pieces that the first part of a tile has more
            "early",  # whether sums of the next block are read some pieces before the own are complete
        )),
        ("eps", ctypes.c_float),
    )  # fmt: skip


@cache
def _available(device: torch.device) -> bool:
    """Whether they run on a device. Without NVRTC the products are torch's."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == wgmma.CAPABILITY
        and shared_memory(device) >= memory(MOST_ROWS)
        and nvrtc.works(
            lambda: _function(device, PLAIN, MOST_ROWS, False, False, False), "products of 33 to 64 rows are"
        )
    )


class Wide(Streamed):
    """Products of 33 to 64 rows."""

    widths = (64, 128, 256)

    def suits(self, x: Rows, weight: Weight) -> bool:
        """See Streamed."""
        values = values_of(x)
        rows, depth = values.shape
        return (
            isinstance(weight, Tensor)
            and LEAST_ROWS <= rows <= MOST_ROWS
            and weight.nbytes >= LEAST_BYTES
            and depth % PIECE == 0
            and weight.shape[0] % TILE == 0
            and weight.dtype == values.dtype
            and weight.dtype in (torch.bfloat16, torch.float16)
            and weight.is_contiguous()
            and weight.data_ptr() % 16 == 0
            and _available(weight.device)
        )

    def squares(self, rows: int, weight: Weight) -> Tensor:
        """See Streamed."""
        return torch.empty(weight.shape[0] // TILE, padded(rows), dtype=torch.float32, device=weight.device)

    def launch(
        self, mode: int, x: Rows, weight: Tensor, bias: Tensor | None, *, silu: bool = False, unit: bool = False,
        **given: Tensor | int,
    ) -> None:  # fmt: skip
        """See Streamed."""
        values = aligned(x)
        (rows, depth), outputs = values.shape, weight.shape[0]
        held = padded(rows)
        blocks, splits, later, early = shares(outputs // TILE, depth // PIECE, processors(weight.device))
        partial, flags = _workspace(weight.device)
        argument = _Arguments(
            rows=rows, depth=depth, outputs=outputs, splits=splits, later=later, early=early,
            partial=partial.data_ptr(), flags=flags.data_ptr(), **addresses(x, weight, bias, given),
        )  # fmt: skip
        maps = nvrtc.tensor_map(weight, (TILE // 2, PIECE)), nvrtc.tensor_map(values, (held, PIECE))
        function = _function(weight.device, mode, held, weight.dtype == torch.float16, silu, unit)
        function(blocks, torch.cuda.current_stream().cuda_stream, *maps, argument)


def padded(rows: int) -> int:
    """Rows that a kernel is compiled for."""
    return 48 if rows <= 48 else 64


def shares(tiles: int, pieces: int, blocks: int) -> tuple[int, int, int, bool]:
    """Blocks, splits, `later` and `early`: see _Arguments. Tiles are split where that takes 9 of 10 blocks."""
    splits = min(blocks // tiles, pieces)
    if 10 * tiles * splits < 9 * blocks and splits < pieces:
        return min(blocks, tiles * pieces), 0, 0, tiles >= blocks
    return tiles * splits, splits, min(LATER, pieces - splits) if splits > 1 else 0, False


def memory(rows: int) -> int:
    """Bytes of shared memory of a block: pieces and rows, sums that are finished, and up to an alignment."""
    return STAGES * 2 * PIECE * (TILE + rows) + 2 * rows * (TILE + 8) + 1024


@cache
def _function(device: torch.device, mode: int, rows: int, float16: bool, silu: bool, unit: bool) -> nvrtc.Function:
    constants = {
        **NAMES, "MODE": mode, "ROWS": rows, "TILE_OUTPUTS": TILE, "PIECE_DEPTH": PIECE, "THREADS": THREADS,
        "STAGES": STAGES, "FLOAT16": float16, "SILU": silu, "UNIT": unit,
    }  # fmt: skip
    return nvrtc.loaded(
        source(rows, float16), SOURCE.name, "wide_product", device, constants, THREADS, memory(rows), "a"
    )


def source(rows: int, float16: bool) -> bytes:
    """What is compiled."""
    multiply = wgmma.product("multiply", rows, float16)
    return NUMBERS.read_bytes() + wgmma.SOURCE.read_bytes() + multiply + SOURCE.read_bytes()


_WORKSPACES: dict[tuple[torch.device, int | None], tuple[Tensor, Tensor]] = {}


def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums under way and their flags: of the stream, or of all captured passes of one engine, for these run in line."""

    def made(stream: int | None) -> tuple[Tensor, Tensor]:
        found = _WORKSPACES.get((device, stream))
        if found is None:
            blocks = processors(device)
            partial = torch.empty(blocks * MOST_ROWS // 2 * 256, device=device)
            flags = torch.zeros(blocks, dtype=torch.int32).to(device)  # there before any stream goes on
            found = _WORKSPACES.setdefault((device, stream), (partial, flags))
        return found

    if torch.cuda.is_current_stream_capturing():
        return _WORKSPACES[device, None]
    made(None)  # what is captured runs once before
    return made(torch.cuda.current_stream(device).cuda_stream)


PRODUCTS = Wide()
