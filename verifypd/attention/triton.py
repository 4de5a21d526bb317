"""Paged attention in Triton: CUDA devices, and Triton's interpreter for tests. Knows launches; nothing of models.

One kernel serves plain tokens, verify spans and prompt chunks. On Hopper others take over: where tiles are small and
few short.py, where they are large chunks.py.

The query heads that share a key head are packed into the rows of a tile, so that even one row fills matrix
instructions. A context that is long beside the others of the pass is shared by several programs, and the last of them
to be done merges what they found; which programs do is planned once a pass, for all layers. Lengths, starts and block
tables are read on the device and grids follow from the host's bounds: nothing waits, and a captured launch stays right.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from verifypd.attention import chunks, short
from verifypd.attention.arguments import Arguments
from verifypd.attention.base import PassLayout, Rotary
from verifypd.attention.tiling import SHORT_ROWS, Tiling, head_slices, tiling
from verifypd.attention.triton_kernels import attend_tile, rotate_and_write, write_cache
from verifypd.attention.triton_plans import PAIR, PLANNED, plan_pairs, plan_sorted
from verifypd.kernels.launch import dependent, launch_early, processors, shared_memory
from verifypd.kernels.tiles import power_of_two
from verifypd.kv.pool import LayerCache

WRITE_ELEMENTS = 1024  # keys or values one program of write_cache moves
TICKETS = 2  # of a launch of chunks.cu
ROTATED_ELEMENTS = 512  # of queries or keys, in each half of a head, one program of rotate_and_write moves


@dataclass(frozen=True, slots=True)
class SpanClass:
    """Spans of about one length, launched together."""

    spans: int
    rows: int  # of the longest
    pass_rows: int  # of all spans of the pass
    context: int  # upper bound of any, tokens
    members: Tensor | None  # [spans] int32; None: all spans of the pass


@dataclass(frozen=True, slots=True)
class Plan:
    """What the programs of one class of spans do: see `attend_tile`."""

    pairs: Tensor
    counters: Tensor  # of tiles that may have several splits and key heads; two tickets behind: see `Arguments`


Plans = list[Plan | None]  # of each class; None: programs follow from the grid


Shape = tuple[int, int, int, int | None]  # heads, key heads, width, window: layers may differ


@dataclass(slots=True)
class Prepared:
    """The spans of a pass in classes, how layers cut them, and the plan of the latest pass."""

    classes: list[SpanClass]
    cuts: dict[Shape, list[Tiling]] = field(default_factory=dict)
    plans: dict[Shape, Plans] = field(default_factory=dict)
    planned: weakref.ref[PassLayout] | None = None  # the pass that plans are of

    def plan(self, layout: PassLayout, shape: Shape) -> tuple[Plans, bool]:
        """The plan of a pass, and whether it is new: made for its first layer of a shape, read by the others.

        Each pass has a layout of its own; one that is captured makes its plan in every replay.
        """
        if self.planned is None or self.planned() is not layout:
            self.plans.clear()
            self.planned = weakref.ref(layout)
        new = shape not in self.plans
        if new:
            pairs = zip(self.classes, self.cuts[shape], strict=True)
            self.plans[shape] = [_plan(layout, spans, cut, shape) if cut.pairs else None for spans, cut in pairs]
        return self.plans[shape], new


# Triton's interpreter gets bfloat16 wrong; widening is exact there.
INTERPRETED = not isinstance(attend_tile, triton.JITFunction)


class TritonAttention:
    """bfloat16 and float16 through matrix instructions, float32 in full precision; sums and softmax in float32.

    batch_invariant: a row's result is the same to the bit whatever spans and rows come with it.
    """

    name = "triton"
    rotates = True

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def prepare(self, layout: PassLayout) -> Prepared:
        """Split the spans into short and long ones."""
        short = [r for r, n in enumerate(layout.span_rows) if 0 < n <= SHORT_ROWS]
        long = [r for r, n in enumerate(layout.span_rows) if n > SHORT_ROWS]
        return Prepared([_span_class(layout, spans) for spans in (short, long) if spans])

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: Prepared,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend. Views of a fused qkv are read in place."""
        q, k, v = _dense(q), _dense(k), _dense(v)
        if len(q) and rotary is None:
            write_rows(k, v, cache, layout)
        elif len(q) and rotary is not None:
            q = rotate_and_write_rows(q, k, v, cache, layout, rotary)
        return self.attend_written(q, cache, layout, prepared, scale=scale, window=window, softcap=softcap)

    @property
    def written(self) -> TritonAttention:
        """It reads keys and values from the cache alone."""
        return self

    def attend_written(
        self,
        q: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: Prepared,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See WrittenAttention.attend_written."""
        rows, heads, width = q.shape
        out = torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
        if not rows:
            return out
        shape = (heads, cache.k.shape[2], width, window)
        if shape not in prepared.cuts:
            fp8 = cache.scales is not None
            prepared.cuts[shape] = [self._tiling(spans, shape, q, fp8) for spans in prepared.classes]
        plans, new = prepared.plan(layout, shape)
        early = dependent(q.device) and not new  # what was planned is older than the kernel before
        _launch(q, cache, layout, prepared.classes, prepared.cuts[shape], plans, out, scale, window, softcap, early)
        return out

    def _tiling(self, spans: SpanClass, shape: Shape, q: Tensor, fp8: bool) -> Tiling:
        heads, kv_heads, width, window = shape
        return tiling(
            spans=spans.spans,
            rows=spans.rows,
            pass_rows=spans.pass_rows,
            context=spans.context,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            itemsize=q.element_size(),
            window=window,
            processors=processors(q.device),
            shared_memory=shared_memory(q.device),
            fixed=self.batch_invariant,
            fp8=fp8,
        )


def _dense(x: Tensor) -> Tensor:
    """Heads of a row side by side; a view of a fused qkv is."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()


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


def _scales_of(cache: LayerCache, layout: PassLayout) -> Tensor:
    """The scales of a cache, as kernels take them; what is not read is anything."""
    return layout.starts if cache.scales is None else cache.scales


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, layout: PassLayout) -> None:
    """Keys and values of the pass into the cache, in one launch."""
    rows, kv_heads, width = k.shape
    elements = kv_heads * width
    block = min(power_of_two(elements), WRITE_ELEMENTS)
    write_cache[(rows, -(-elements // block))](
        k,
        v,
        cache.k,
        cache.v,
        _scales_of(cache, layout),
        layout.write_index,
        k.stride(0),
        v.stride(0),
        ELEMENTS=elements,
        WIDTH=width,
        SCALED=cache.scales is not None,
        BLOCK=block,
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
        _scales_of(cache, layout),
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
        SCALED=cache.scales is not None,
        BLOCK_H=block_h,
        BLOCK_D=power_of_two(half),
        BLOCK_W=power_of_two(width),
        num_warps=2,
        **launch_early(q.device),
    )
    return q


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What scores are multiplied by before and after the cap, in base 2: tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    if softcap is None:
        return scale * math.log2(math.e), 0.0
    return 2 * scale / softcap * math.log2(math.e), softcap * math.log2(math.e)


def _plan(layout: PassLayout, spans: SpanClass, cut: Tiling, shape: Shape) -> Plan:
    """Have the device write down what programs do, where it does not follow from the grid."""
    _, kv_heads, _, window = shape
    device = layout.starts.device
    pairs = torch.empty(cut.pairs, PAIR.value, dtype=torch.int32, device=device)
    counters = torch.empty(cut.shared_tiles * kv_heads + TICKETS, dtype=torch.int32, device=device)
    constants = {
        "BLOCK_Q": cut.block_q,
        "WINDOW": window or 0,
        "BEGINS": layout.first is not None,
        "LISTED": spans.members is not None,
    }
    given = (pairs, counters, *_where(layout, spans), spans.spans, cut.pairs, counters.numel())
    if cut.sorted_tiles:
        plan_sorted[(1,)](
            *given,
            cut.shared_tiles,
            cut.splits,
            cut.workers,
            cut.least,
            **constants,
            TILES=cut.sorted_tiles,
            num_warps=min(cut.sorted_tiles // 32, 8),
        )
        return Plan(pairs, counters)
    plan_pairs[(-(-cut.pairs // PLANNED.value),)](
        *given,
        cut.splits,
        cut.workers,
        cut.least,
        **constants,
        SPLIT=cut.splits > 1,
        SPLIT_TOKENS=cut.split_tokens,
        num_warps=8,
    )
    return Plan(pairs, counters)


def _where(layout: PassLayout, spans: SpanClass) -> tuple[Tensor, ...]:
    """Members, row offsets, slots, starts and begins, as kernels take them; what is not read is anything."""
    members = layout.row_offsets if spans.members is None else spans.members
    begins = layout.starts if layout.first is None else layout.first
    return members, layout.row_offsets, layout.slots, layout.starts, begins


def _launch(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    classes: list[SpanClass],
    cuts: list[Tiling],
    plans: Plans,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    early: bool,
) -> None:
    """One class of spans after the other; a range of heads at a time, where partial results are too large."""
    _, heads, width = q.shape
    kv_heads = cache.k.shape[2]
    shared = heads // kv_heads
    partials = max(cut.partials for cut in cuts)  # classes use the same room in turn
    partial = summary = out  # not written
    slices = head_slices(kv_heads, partials * shared * width)
    if partials:
        room = partials * slices[0][1] * shared
        partial = torch.empty(room, width, dtype=torch.float32, device=q.device)
        summary = torch.empty(room, 2, dtype=torch.float32, device=q.device)
    for first_head, count in slices:
        for spans, cut, plan in zip(classes, cuts, plans, strict=True):
            _attend(
                q, cache, layout, spans, cut, plan, out, partial, summary, scale, window, softcap, first_head, count,
                early,
            )  # fmt: skip


def _attend(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    spans: SpanClass,
    cut: Tiling,
    plan: Plan | None,
    out: Tensor,
    partial: Tensor,
    summary: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    first_head: int,
    head_count: int,
    early: bool,
) -> None:
    """One class of spans, for some key heads."""
    _, heads, width = q.shape
    kv_heads = cache.k.shape[2]
    before, cap = _scales(scale, softcap)
    kind = next((each for each in (short, chunks) if each.suits(q, cache, layout, cut, window, softcap)), None)
    if kind is not None:
        pairs, counters = (None, None) if plan is None else (plan.pairs, plan.counters)
        given = Arguments.of(
            q, cache, layout, cut, spans.spans, spans.members, pairs, counters, out, partial, summary, before,
            first_head, head_count, early,
        )  # fmt: skip
        kind.attend(q, cache, layout.block_size, cut, given)
        return
    grid = (cut.tiles, head_count, spans.spans) if plan is None else (cut.pairs * head_count,)
    attend_tile[grid](
        q,
        cache.k,
        cache.v,
        _scales_of(cache, layout),
        out,
        partial,
        summary,
        layout.row_offsets if plan is None else plan.pairs,
        layout.row_offsets if plan is None else plan.counters,
        *_where(layout, spans),
        layout.block_table,
        q.stride(0),
        layout.block_table.stride(0),
        first_head,
        head_count,
        cut.splits,
        cut.tile_rows,
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
        LISTED=spans.members is not None and plan is None,
        # with another code for some blocks a row's sums would depend on where its chunk begins
        UNMASKED=window is None and layout.first is None and spans.rows > SHORT_ROWS and not cut.split_tokens,
        WIDEN=INTERPRETED or (q.dtype != cache.k.dtype if cache.scales is None else q.dtype == torch.float32),
        SCALED=cache.scales is not None,
        BLOCK_M=cut.block_m,
        BLOCK_Q=cut.block_q,
        BLOCK_N=cut.block_n,
        PAIRED=plan is not None,
        SPLIT=cut.splits > 1,
        SPLIT_TOKENS=cut.split_tokens if cut.splits > 1 else 0,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_early(q.device, early),
    )
