"""A layer's small operations in Triton, for CUDA devices: one launch each. Knows launches; nothing of models.

Products of few rows are ours, with the norms, sums and gates around them, and multiply fp8 weights as they are; up to
eight rows of bfloat16 or float16 are skinny.py's, and 33 to 64 wide.py's, where these run. Others are torch's
(with fp8 weights, of rows rounded to fp8), unless a row may not feel its neighbours (`batch_invariant`): then they are
tiles of one size whose sums have one order. Same results as the torch kernels up to the order of a sum and where it is
rounded. Rotation apart from a product belongs to attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from verifypd.kernels import embeddings, skinny, wide
from verifypd.kernels.base import Activation, Normed, PagedRows, Rows
from verifypd.kernels.launch import fp8_products, launch_early, shared_memory
from verifypd.kernels.streamed import Streamed
from verifypd.kernels.tiles import SKINNY_MEMORY, SkinnyTile, power_of_two, row_warps, skinny_tile
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.triton_kernels import (
    add_norm_rows,
    divide_rows,
    gate_rows,
    move_rows,
    narrow_rows,
    norm_rows,
    product_tile,
)
from verifypd.kernels.triton_products import skinny_product, skinny_qkv, split_rows
from verifypd.kernels.weights import FP8, Fp8Weight, Int8Panels, Int8Weight, PackedWeight, Weight

STREAMED = (skinny.PRODUCTS, wide.PRODUCTS)
GATE_ELEMENTS = 1024  # of a program
MOVED_ELEMENTS = 2048  # of a program

FETCH_AHEAD = True  # fp8 weights, while their rows are split

# Triton's interpreter gets products of bfloat16 wrong.
INTERPRETED = not isinstance(product_tile, triton.JITFunction)


class TritonKernels(TorchKernels):
    """Activations in the weights' dtype, like torch's."""

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Kernels.linear."""
        if isinstance(weight, Int8Panels):
            weight = weight.unpacked()
        elif isinstance(weight, PackedWeight):
            weight = weight.dequantize(weight.dtype)
        elif (streamed := self._streamed(x, weight)) is not None:  # that are older than the kernel before
            return streamed.linear(x, weight, bias)
        tile = self._tile(x, weight)
        if tile is not None:
            return _skinny(x, weight, bias, tile)
        x = self.whole(x)
        if not self.batch_invariant:
            return super().linear(x, weight, bias)
        if isinstance(weight, Fp8Weight):
            return self._product(x, weight.dequantize(x.dtype), bias)
        if isinstance(weight, Int8Weight):
            scaled = self._product(x, weight.values.to(x.dtype), None) * weight.scale.to(x.dtype)
            return scaled if bias is None else scaled + bias
        return self._product(x, weight.to(x.dtype), bias)

    def pack(self, weight: Tensor | Int8Weight | Fp8Weight) -> Weight:
        """As it is."""
        return weight

    def fp8_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `weights.fp8_rows`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, width = x.shape
        out = torch.empty(rows, width, dtype=FP8, device=x.device)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            narrow_rows[(rows,)](
                x, out, scale, x.stride(0), WIDTH=width, BLOCK=power_of_two(width), num_warps=row_warps(width),
                **launch_early(x.device),
            )  # fmt: skip
        return out, scale

    def whole(self, x: Rows) -> Tensor:
        """See Kernels.whole."""
        if isinstance(x, Tensor):
            return x
        rows, width = x.shape
        out = torch.empty_like(x.values)
        divide_rows[(rows,)](
            x.values,
            x.squares,
            out,
            x.squares.stride(0),
            x.eps,
            WIDTH=width,
            BLOCK=power_of_two(width),
            SQUARES=len(x.squares),
            SQUARES_PADDED=power_of_two(len(x.squares)),
            num_warps=row_warps(width),
            **launch_early(out.device),
        )
        return out

    def linear_gated(self, x: Rows, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        """See Kernels.linear_gated."""
        if (streamed := self._streamed(x, weight)) is not None:
            return streamed.linear_gated(x, weight, bias, activation)
        tile = self._tile(x, weight, gated=True)
        if tile is None:
            return super().linear_gated(x, weight, bias, activation)
        return _skinny(x, weight, bias, tile, activation)

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
        """See Kernels.linear_add_norm. Programs write parts of a row: its norm is left to who reads it.

        Widths that the kernels which read it may refuse are normed at once. In float16 a stream times its
        norm may be too large before it is divided.
        """
        streamed = self._streamed(x, weight)
        if streamed is not None and weight.shape[0] % skinny.ROUND == 0 and x.dtype != torch.float16:
            return streamed.linear_add_norm(x, weight, bias, residual, norm, eps, unit_offset)
        tile = self._tile(x, weight)
        if tile is None or weight.shape[0] % 256 or x.dtype == torch.float16:
            return super().linear_add_norm(x, weight, bias, residual, norm, eps, unit_offset)
        residual = residual.contiguous()
        stream = torch.empty_like(residual)
        parts = -(-weight.shape[0] // tile.outputs)
        squares = torch.empty(parts, _padded(len(residual)), dtype=torch.float32, device=residual.device)
        out = _skinny(x, weight, bias, tile, added=(residual, norm, stream, squares), unit_offset=unit_offset)
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
        scales: Tensor | None = None,
    ) -> Tensor | None:
        """See Kernels.linear_qkv."""
        kv_heads, width = cache_k.shape[-2:]
        whole = width == 2 * cos.shape[1]  # all dimensions of a head rotate
        streamed = self._streamed(x, weight)
        if streamed is not None and whole and cache_k.dtype == _dtype(x) and width in streamed.widths:
            return streamed.linear_qkv(x, weight, bias, cos, sin, positions, cache_k, cache_v, write_index)
        tile = self._tile(x, weight)
        if tile is None or not whole or width % tile.outputs:
            return None
        matrix, channels = _matrix(weight)
        given = _given(x, channels is not None)
        rows, heads = x.shape[0], weight.shape[0] // width
        q = torch.empty(rows, heads - 2 * kv_heads, width, dtype=_dtype(x), device=weight.device)
        skinny_qkv[(weight.shape[0] // tile.outputs,)](
            given.values,
            matrix,
            q if channels is None else channels,
            q if bias is None else bias,
            q if given.squares is None else given.squares,
            q,
            cache_k,
            cache_v,
            cos if scales is None else scales,
            write_index,
            positions,
            cos,
            sin,
            rows,
            given.values.stride(0),
            given.squares_row,
            given.eps,
            Q_HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            WIDTH=width,
            CACHE_SCALED=scales is not None,
            **_constants(rows, given, channels, bias, tile),
        )
        return q

    def _streamed(self, x: Rows, weight: Weight) -> Streamed | None:
        """Whose the product is, if it is one in CUDA C++."""
        if self.batch_invariant:
            return None
        return next((products for products in STREAMED if products.suits(x, weight)), None)

    def _tile(self, x: Rows, weight: Weight, gated: bool = False) -> SkinnyTile | None:
        """How a product is cut that is ours; None: it is not."""
        rows, depth = x.shape
        if self.batch_invariant or not isinstance(weight, Tensor | Fp8Weight):
            return None
        dtype = _dtype(x)
        matrix, channels = _matrix(weight)
        if weight.dtype != dtype or not (dtype.itemsize == 2 or INTERPRETED) or not matrix.is_contiguous():
            return None
        if shared_memory(weight.device) < SKINNY_MEMORY:
            return None
        sums_of_two = dtype == torch.bfloat16 and fp8_products(weight.device)  # float16 has three bits more
        if channels is not None and not (sums_of_two or INTERPRETED):
            return None
        return skinny_tile(rows, weight.shape[0] // (2 if gated else 1), depth, gated, channels is not None)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tiles of one size: 16 rows is what a matrix instruction takes at least."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, depth = x.shape
        outputs = weight.shape[0]
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        full = x.dtype == torch.float32
        block_m, block_n, block_k = (16, 32, 32) if full else (64, 32, 128)
        product_tile[(-(-rows // block_m), -(-outputs // block_n))](
            x,
            weight.contiguous(),
            x if bias is None else bias,
            out,
            rows,
            outputs,
            x.stride(0),
            DEPTH=depth,
            BIASED=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=2 if full else 4,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """See Kernels.rms_norm."""
        width = x.shape[-1]
        if x.dim() not in (2, 3) or x.stride(-1) != 1:
            x = x.reshape(-1, width).contiguous().view(x.shape)
        wide = x if x.dim() == 3 else x[..., None, :] if x.dim() == 2 else x.reshape(-1, 1, width)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, group, _ = wide.shape
        if rows * group:
            norm_rows[(rows * group,)](
                wide,
                weight,
                out,
                wide.stride(0),
                wide.stride(1),
                eps,
                GROUP=group,
                WIDTH=width,
                BLOCK=power_of_two(width),
                UNIT=unit_offset,
                num_warps=row_warps(width),
                **launch_early(out.device),
            )
        return out

    def embed_norm(
        self,
        ids: Tensor,
        table: Weight,
        scale: float | None,
        weight: Tensor,
        eps: float,
        unit_offset: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.embed_norm."""
        if isinstance(table, Tensor) and table.dtype == dtype and table.is_contiguous():
            return embeddings.embed_norm(ids, table, scale, weight, eps, unit_offset)
        return super().embed_norm(ids, table, scale, weight, eps, unit_offset, dtype)

    def embed_beside(
        self,
        ids: Tensor,
        table: Weight,
        scale: float | None,
        features: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.embed_beside."""
        if isinstance(table, Tensor) and table.dtype == features.dtype and table.is_contiguous():
            return embeddings.embed_beside(ids, table, scale, features, norms, eps)
        return super().embed_beside(ids, table, scale, features, norms, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm."""
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        rows, width = x.shape
        if rows:
            add_norm_rows[(rows,)](
                x,
                residual,
                weight,
                out,
                total,
                eps,
                WIDTH=width,
                BLOCK=power_of_two(width),
                UNIT=unit_offset,
                num_warps=row_warps(width),
                **launch_early(out.device),
            )
        return out, total

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See Kernels.gated."""
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        block = min(GATE_ELEMENTS, power_of_two(width))
        if rows:
            gate_rows[(rows, -(-width // block))](
                gate_up,
                out,
                WIDTH=width,
                BLOCK=block,
                SILU=activation == "silu",
                num_warps=4,
                **launch_early(out.device),
            )
        return out

    def keep_rows_(self, data: Tensor, rows: Tensor, where: PagedRows) -> None:
        """See Kernels.keep_rows_. Void rows are not written at all."""
        _move_rows(data, rows.contiguous(), where, keep=True)

    def rows_before(self, data: Tensor, where: PagedRows) -> Tensor:
        """See Kernels.rows_before."""
        rows = torch.empty(len(where.positions), data.shape[1], dtype=data.dtype, device=data.device)
        _move_rows(data, rows, where, keep=False)
        return rows


def _padded(rows: int) -> int:
    """Rows that a matrix instruction takes."""
    return max(16, power_of_two(rows))


@dataclass(frozen=True, slots=True)
class _Given:
    """Rows as the kernels of products take them."""

    values: Tensor  # [N, W]; in fp8 [2 N, W]: see `split_rows`
    squares: Tensor | None  # float32 [parts, N or more]; of rows in fp8 their scales, [1, N]
    eps: float

    @property
    def squares_row(self) -> int:
        return 0 if self.squares is None else self.squares.stride(0)

    @property
    def sums(self) -> dict[str, int]:
        """How many sums of squares a row has, and a power of two that is no less."""
        count = 0 if self.squares is None else len(self.squares)
        return {"SCALED": self.squares is not None, "SQUARES": count, "SQUARES_PADDED": power_of_two(max(count, 1))}


def _given(x: Rows, fp8: bool) -> _Given:
    values, squares, eps = (x.values, x.squares, x.eps) if isinstance(x, Normed) else (x, None, 0.0)
    given = _Given(values if values.stride(1) == 1 else values.contiguous(), squares, eps)
    return _split(given) if fp8 else given


def _split(given: _Given) -> _Given:
    """See `split_rows`."""
    rows, width = given.values.shape
    out = torch.empty(2 * rows, width, dtype=FP8, device=given.values.device)
    scale = torch.empty(1, rows, dtype=torch.float32, device=out.device)
    split_rows[(rows,)](
        given.values,
        scale if given.squares is None else given.squares,
        out,
        scale,
        given.values.stride(0),
        given.squares_row,
        given.eps,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=row_warps(width),
        **given.sums,
        **launch_early(out.device),
    )
    return _Given(out, scale, 0.0)


def _dtype(x: Rows) -> torch.dtype:
    return x.values.dtype if isinstance(x, Normed) else x.dtype


def _matrix(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """A matrix and the scales of its rows, as kernels take them."""
    if isinstance(weight, Fp8Weight):
        return weight.values, weight.scale
    assert isinstance(weight, Tensor)
    return weight, None


def _constants(
    rows: int, given: _Given, channels: Tensor | None, bias: Tensor | None, tile: SkinnyTile
) -> dict[str, int]:
    """Compile-time constants and options that skinny products have in common."""
    options = launch_early(given.values.device)
    return {
        "DEPTH": given.values.shape[1],
        "FP8": channels is not None,
        "BIASED": bias is not None,
        **given.sums,
        "BLOCK_M": _padded(rows),
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.depth,
        "PARTS": tile.parts,
        "STAGES": tile.stages,
        "AHEAD": options["PDL"] and tile.parts == 1 and channels is not None and FETCH_AHEAD,
        "num_warps": 4,
        **options,
    }


def _skinny(
    x: Rows,
    weight: Weight,
    bias: Tensor | None,
    tile: SkinnyTile,
    activation: Activation | None = None,
    added: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    unit_offset: bool = False,
) -> Tensor:
    """See `skinny_product`. added: residual, norm, and where the stream and its squares go."""
    matrix, channels = _matrix(weight)
    given = _given(x, channels is not None)
    rows, outputs = x.shape[0], weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(rows, outputs, dtype=_dtype(x), device=matrix.device)
    residual, norm, stream, sums = added or (out, out, out, out)  # not read and not written
    skinny_product[(-(-outputs // tile.outputs),)](
        given.values,
        matrix,
        out if channels is None else channels,
        out if bias is None else bias,
        out if given.squares is None else given.squares,
        residual,
        norm,
        out,
        stream,
        sums,
        rows,
        given.values.stride(0),
        given.squares_row,
        given.eps,
        OUT=outputs,
        GATED=activation is not None,
        SILU=activation == "silu",
        ADDED=added is not None,
        UNIT=unit_offset,
        **_constants(rows, given, channels, bias, tile),
    )
    return out


def _move_rows(data: Tensor, rows: Tensor, where: PagedRows, keep: bool) -> None:
    count, width = rows.shape
    block = min(MOVED_ELEMENTS, power_of_two(width))
    if count:
        move_rows[(count, -(-width // block))](
            data,
            rows,
            where.block_table,
            where.slots,
            where.row_span,
            where.positions,
            where.write_index,
            where.block_table.stride(0),
            WIDTH=width,
            BLOCK_SIZE=where.block_size,
            BLOCK=block,
            KEEP=keep,
            **launch_early(data.device),
        )
