"""Paged attention in Triton: CUDA devices, and Triton's interpreter for tests. Knows launches; nothing of models.

One kernel serves plain tokens, verify spans and prompt chunks. The query heads that share a key head are packed into
the rows of a tile, so that even one row fills matrix instructions. A context that is long beside the others of the
pass is shared by several programs, and a second kernel merges what they found. Lengths, starts and block tables are
read on the device and grids follow from the host's bounds: nothing waits, and a captured launch stays right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache as remember

import torch
import triton
from torch import Tensor

from verifypd.attention.base import PassLayout, Rotary
from verifypd.attention.tiling import SHORT_ROWS, Tiling, head_slices, tiling
from verifypd.attention.triton_kernels import attend_tile, merge_splits, rotate_and_write, write_cache
from verifypd.kernels.tiles import power_of_two
from verifypd.kv.pool import LayerCache

WRITE_ELEMENTS = 1024  # keys or values one program of write_cache moves
ROTATED_ELEMENTS = 512  # of queries or keys, in each half of a head, one program of rotate_and_write moves
MERGED_ELEMENTS = 1024  # of a row one program of merge_splits merges
INTERPRETED_PROCESSORS = 8  # what the interpreter passes for, so that small cases split too


@dataclass(slots=True)
class SpanClass:
    """Spans of about one length, launched together."""

    spans: int
    rows: int  # of the longest
    pass_rows: int  # of all spans of the pass
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
        cuts = [(spans, self._tiling(spans, q, k.shape[1], window)) for spans in prepared]
        _launch(q, cache, layout, cuts, out, scale, window, softcap)
        return out

    def _tiling(self, spans: SpanClass, q: Tensor, kv_heads: int, window: int | None) -> Tiling:
        _, heads, width = q.shape
        key = (heads, kv_heads, width, window)
        found = spans.tilings.get(key)
        if found is None:
            found = spans.tilings[key] = tiling(
                spans=spans.spans,
                rows=spans.rows,
                pass_rows=spans.pass_rows,
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
        pass_rows=layout.rows,
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
    cuts: list[tuple[SpanClass, Tiling]],
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """All classes of spans, then one merge for all; a range of heads at a time, where partial results are too large."""
    rows, heads, width = q.shape
    kv_heads = cache.k.shape[2]
    shared = heads // kv_heads
    partials = sum(cut.partials for _, cut in cuts)
    work = Workspace(out, out, out)  # not written
    slices = head_slices(kv_heads, partials * shared * width)
    if partials:
        room = (partials, slices[0][1] * shared)
        work = Workspace(
            partial=torch.empty(*room, width, dtype=torch.float32, device=q.device),
            summary=torch.empty(*room, 2, dtype=torch.float32, device=q.device),
            plan=torch.empty(rows, 2, dtype=torch.int32, device=q.device),
        )
    for first_head, count in slices:
        first_partial = 0
        for spans, cut in cuts:
            _attend(
                q, cache, layout, spans, cut, out, scale, window, softcap,
                work, bool(partials), first_partial, first_head, count,
            )  # fmt: skip
            first_partial += cut.partials
        if partials:
            columns = count * shared * width
            merge_splits[(rows, -(-columns // MERGED_ELEMENTS))](
                work.partial,
                work.summary,
                work.plan,
                out,
                first_head * shared,
                count * shared,
                HEADS=heads,
                WIDTH=width,
                COLUMNS=MERGED_ELEMENTS,
                num_warps=8,
            )


@dataclass(frozen=True, slots=True)
class Workspace:
    """What programs that share contexts leave for the merge: see `attend_tile`."""

    partial: Tensor
    summary: Tensor
    plan: Tensor


def _attend(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    spans: SpanClass,
    cut: Tiling,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    work: Workspace,
    planned: bool,
    first_partial: int,
    first_head: int,
    head_count: int,
) -> None:
    """One class of spans, for some key heads."""
    _, heads, width = q.shape
    kv_heads = cache.k.shape[2]
    before, cap = _scales(scale, softcap)
    attend_tile[(cut.items, head_count)](
        q,
        cache.k,
        cache.v,
        out,
        work.partial,
        work.summary,
        work.plan,
        layout.row_offsets if spans.members is None else spans.members,
        layout.row_offsets,
        layout.slots,
        layout.starts,
        layout.starts if layout.first is None else layout.first,
        layout.block_table,
        q.stride(0),
        layout.block_table.stride(0),
        spans.spans,
        first_head,
        head_count * (heads // kv_heads),
        cut.splits,
        cut.workers,
        cut.least,
        first_partial,
        cut.member_rows,
        before,
        cap,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK_D=power_of_two(width),
        BLOCK_SIZE=layout.block_size,
        WINDOW=window or 0,
        BEGINS=layout.first is not None,
        CAPPED=softcap is not None,
        LISTED=spans.members is not None,
        # with another code for some blocks a row's sums would depend on where its chunk begins
        UNMASKED=window is None and layout.first is None and spans.rows > SHORT_ROWS and not cut.split_tokens,
        WIDEN=INTERPRETED or q.dtype != cache.k.dtype,
        BLOCK_M=cut.block_m,
        BLOCK_Q=cut.block_q,
        BLOCK_N=cut.block_n,
        SEARCH=cut.splits > 1 or cut.tiles > 1,
        SPLIT=cut.splits > 1,
        PLANNED=planned,
        SPLIT_TOKENS=cut.split_tokens if cut.splits > 1 else 0,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
