"""Paged attention in Triton: CUDA devices, and Triton's interpreter for tests. Knows launches; nothing of models.

One kernel serves plain tokens, verify spans and prompt chunks. The query heads that share a key head are packed into
the rows of a tile, so that even one row fills matrix instructions; where spans are few and contexts long, several
programs share a tile's context and a second kernel merges them. Lengths, starts and block tables are read on the
device and grids follow from the host's bounds: nothing waits, and a captured launch stays right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache as remember

import torch
import triton
from torch import Tensor

from verifypd.attention.base import PassLayout, Rotary
from verifypd.attention.tiling import SHORT_ROWS, Tiling, tiling
from verifypd.attention.triton_kernels import attend_tile, merge_splits, rotate_and_write, write_cache
from verifypd.kernels.tiles import power_of_two
from verifypd.kv.pool import LayerCache

WRITE_ELEMENTS = 1024  # keys or values one program of write_cache moves
ROTATED_ELEMENTS = 512  # of queries or keys, in each half of a head, one program of rotate_and_write moves
INTERPRETED_PROCESSORS = 8  # what the interpreter passes for, so that small cases split too


@dataclass(slots=True)
class SpanClass:
    """Spans of about one length, launched together."""

    spans: int
    rows: int  # of the longest
    context: int  # upper bound of any, tokens
    members: Tensor | None  # [spans] int32; None: all spans of the pass
    tilings: dict[tuple[int, int, int, int | None], Tiling] = field(default_factory=dict)  # layers may differ


# Triton's interpreter gets bfloat16 wrong; widening is exact there.
INTERPRETED = not isinstance(attend_tile, triton.JITFunction)


@remember
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class TritonAttention:
    """bfloat16 and float16 through matrix instructions, float32 in full precision; sums and softmax in float32.

    batch_invariant: a row's result is the same to the bit whatever spans and rows come with it.
    """

    name = "triton"
    rotates = True

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def prepare(self, layout: PassLayout) -> list[SpanClass]:
        """Split the spans into short and long ones."""
        short = [r for r, n in enumerate(layout.span_rows) if 0 < n <= SHORT_ROWS]
        long = [r for r, n in enumerate(layout.span_rows) if n > SHORT_ROWS]
        return [_span_class(layout, spans) for spans in (short, long) if spans]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: list[SpanClass],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend. Views of a fused qkv are read in place."""
        rows, heads, width = q.shape
        q, k, v = (x if x.stride(1) == width and x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
        if not rows:
            return out
        if rotary is None:
            write_rows(k, v, cache, layout)
        else:
            q = rotate_and_write_rows(q, k, v, cache, layout, rotary)
        for spans in prepared:
            cut = self._tiling(spans, q, k.shape[1], window)
            _launch(q, cache, layout, spans, cut, out, scale, window, softcap)
        return out

    def _tiling(self, spans: SpanClass, q: Tensor, kv_heads: int, window: int | None) -> Tiling:
        _, heads, width = q.shape
        key = (heads, kv_heads, width, window)
        found = spans.tilings.get(key)
        if found is None:
            found = spans.tilings[key] = tiling(
                spans=spans.spans,
                rows=spans.rows,
                context=spans.context,
                heads=heads,
                kv_heads=kv_heads,
                width=width,
                itemsize=q.element_size(),
                window=window,
                processors=_processors(q.device),
                fixed=self.batch_invariant,
            )
        return found


def _span_class(layout: PassLayout, spans: list[int]) -> SpanClass:
    members = None
    if len(spans) < layout.spans:
        members = torch.tensor(spans, dtype=torch.int32)
        if layout.starts.device.type == "cuda":
            members = members.pin_memory().to(layout.starts.device, non_blocking=True)
    return SpanClass(
        spans=len(spans),
        rows=max(layout.span_rows[r] for r in spans),
        context=max(layout.contexts[r] for r in spans),
        members=members,
    )


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, layout: PassLayout) -> None:
    """Keys and values of the pass into the cache, in one launch."""
    rows, kv_heads, width = k.shape
    elements = kv_heads * width
    block = min(power_of_two(elements), WRITE_ELEMENTS)
    write_cache[(rows, -(-elements // block))](
        k, v, cache.k, cache.v, layout.write_index, k.stride(0), v.stride(0), ELEMENTS=elements, BLOCK=block
    )


def rotate_and_write_rows(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: PassLayout, rotary: Rotary
) -> Tensor:
    """As `write_rows`, with keys rotated on the way and queries in place; returns those."""
    rows, heads, width = q.shape
    kv_heads, half = k.shape[1], rotary[0].shape[1]
    block_h = max(1, ROTATED_ELEMENTS // power_of_two(half))
    q_parts, kv_parts = -(-heads // block_h), -(-kv_heads // block_h)
    rotate_and_write[(rows, q_parts + 2 * kv_parts)](
        q,
        k,
        v,
        cache.k,
        cache.v,
        layout.write_index,
        layout.positions,
        *rotary,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        Q_HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_D=power_of_two(half),
        BLOCK_W=power_of_two(width),
        num_warps=2,
    )
    return q


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What scores are multiplied by before and after the cap, in base 2: tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    if softcap is None:
        return scale * math.log2(math.e), 0.0
    return 2 * scale / softcap * math.log2(math.e), softcap * math.log2(math.e)


def _launch(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    spans: SpanClass,
    cut: Tiling,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    _, heads, width = q.shape
    kv_heads = cache.k.shape[2]
    listed = spans.members is not None
    members = layout.row_offsets if spans.members is None else spans.members
    before, cap = _scales(scale, softcap)
    block_d = power_of_two(width)
    for first, tiles in cut.slices(spans.spans, heads, width):
        slice_rows = min(tiles * cut.block_q, spans.rows - first * cut.block_q)
        partial = summary = out  # not written
        if cut.splits > 1:
            shape = (spans.spans, slice_rows, heads, cut.splits)
            partial = torch.empty(*shape, width, dtype=torch.float32, device=q.device)
            summary = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
        attend_tile[(tiles, kv_heads * cut.splits, spans.spans)](
            q,
            cache.k,
            cache.v,
            out,
            partial,
            summary,
            members,
            layout.row_offsets,
            layout.slots,
            layout.starts,
            layout.starts if layout.first is None else layout.first,
            layout.block_table,
            q.stride(0),
            layout.block_table.stride(0),
            first,
            slice_rows,
            cut.splits,
            before,
            cap,
            HEADS=heads,
            KV_HEADS=kv_heads,
            WIDTH=width,
            BLOCK_D=block_d,
            BLOCK_SIZE=layout.block_size,
            WINDOW=window or 0,
            BEGINS=layout.first is not None,
            CAPPED=softcap is not None,
            LISTED=listed,
            # with another code for some blocks a row's sums would depend on where its chunk begins
            UNMASKED=window is None and layout.first is None and spans.rows > SHORT_ROWS and not cut.split_tokens,
            WIDEN=INTERPRETED or q.dtype != cache.k.dtype,
            BLOCK_M=cut.block_m,
            BLOCK_Q=cut.block_q,
            BLOCK_N=cut.block_n,
            SPLIT=cut.splits > 1,
            SPLIT_TOKENS=cut.split_tokens,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        if cut.splits > 1:
            merge_splits[(spans.spans * slice_rows, heads)](
                partial,
                summary,
                out,
                members,
                layout.row_offsets,
                first * cut.block_q,
                slice_rows,
                cut.splits,
                HEADS=heads,
                WIDTH=width,
                BLOCK_D=block_d,
                LISTED=listed,
                num_warps=1,
            )
