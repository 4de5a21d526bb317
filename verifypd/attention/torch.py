"""Reference attention in plain torch, for every device. Knows the paged layout; nothing of models.

Spans fall into at most two uniform groups, decided once a pass: short ones (plain tokens, verify spans) go through a
flat list of (span, tile of blocks) pairs, partial softmaxes merged per span, so no span pays for another's context;
long ones (prefill chunks) are padded and go through scaled_dot_product_attention. Only blocks in use are read; nothing
waits for the device: the work is bounded by the host's upper bounds and masked by the device's positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.attention.base import PassLayout, Rotary
from verifypd.kv.pool import LayerCache

SHORT_ROWS = 16  # spans up to this many rows share the flat pair list
TILE_TOKENS = 128  # tokens of context a pair covers: wide enough to amortise the merge, narrow enough to stay ragged
FLOOR = -1e30  # stands for -inf where a difference is taken


@dataclass(frozen=True, slots=True)
class Tiles:
    """A flat list of T (span, run of blocks) pairs."""

    span: Tensor  # [T] int64, span within the group
    blocks: Tensor  # [T, B] int64, physical blocks
    keys: Tensor  # [T, B * block_size] int64, absolute position of each key; masked where it passes a row's own


@dataclass(slots=True)
class Group:
    """Spans padded to a common number of rows Q."""

    rows: Tensor  # [G, Q] int64, row of the pass; padding repeats the span's last row
    positions: Tensor  # [G, Q] int64
    slots: Tensor  # [G] int64
    first: Tensor | None  # [G] int64, lowest position that holds a key
    keep: Tensor | None  # flat [G * Q] indices of real rows, None when nothing is padded
    target: Tensor | None  # rows of the pass they go to, None when the group is the whole pass
    span_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    short: bool
    tiles: dict[int | None, Tiles] = field(default_factory=dict)  # by window: layers may differ


def _group(layout: PassLayout, members: list[int], short: bool) -> Group:
    device = layout.starts.device
    span_rows = tuple(layout.span_rows[r] for r in members)
    longest = max(span_rows)
    first = [0]
    for n in layout.span_rows:
        first.append(first[-1] + n)
    rows = torch.tensor([[first[r] + min(j, layout.span_rows[r] - 1) for j in range(longest)] for r in members])
    keep = None
    if min(span_rows) < longest:
        keep = torch.tensor([g * longest + j for g, n in enumerate(span_rows) for j in range(n)])
    target = None
    if len(members) < layout.spans:
        target = torch.tensor([first[r] + j for r in members for j in range(layout.span_rows[r])])
        target = target.to(device, non_blocking=True)
    rows = rows.to(device, non_blocking=True)
    slots = layout.slots
    if len(members) < layout.spans:
        slots = slots[torch.tensor(members).to(device, non_blocking=True)]
    return Group(
        rows=rows,
        positions=layout.positions[rows],
        slots=slots,
        first=None if layout.first is None else layout.first[slots],
        keep=None if keep is None else keep.to(device, non_blocking=True),
        target=target,
        span_rows=span_rows,
        contexts=tuple(layout.contexts[r] for r in members),
        short=short,
    )


def _tiles(group: Group, layout: PassLayout, window: int | None) -> Tiles:
    """Pairs that cover every key a row of the group may see: from the window's start on, where there is a window."""
    if window in group.tiles:
        return group.tiles[window]
    device = layout.starts.device
    size = layout.block_size
    needs = [max(c, 1) for c in group.contexts]
    if window is not None:  # rows + window - 1 keys, at any offset within a block
        needs = [min(c, n + window - 1 + size - 1) for c, n in zip(needs, group.span_rows, strict=True)]
    counts = [-(-c // size) for c in needs]
    longest = max(counts)
    width = min(longest, max(1, TILE_TOKENS // size)) if group.short else longest  # blocks of a tile
    pairs = [(g, t) for g, n in enumerate(counts) for t in range(-(-n // width))]
    span, tile = torch.tensor(pairs).T.to(device, non_blocking=True)
    block = tile[:, None] * width + torch.arange(width, device=device)  # [T, B], relative to the first block needed
    if window is not None:
        lowest = (group.positions[:, 0] - window + 1).clamp_min(0)
        block = block + (lowest // size)[span][:, None]
    # a tile may reach past the table: those keys lie behind every row, so any block will do
    index = block.clamp_max(layout.block_table.shape[1] - 1)
    blocks = layout.block_table[group.slots[span][:, None], index].to(torch.int64)
    keys = (block[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    group.tiles[window] = tiles = Tiles(span, blocks, keys)
    return tiles


def _visible(positions: Tensor, keys: Tensor, window: int | None, first: Tensor | None) -> Tensor:
    """positions [T, Q], keys [T, K], first [T] -> bool [T, Q, K]."""
    seen = keys[:, None, :] <= positions[:, :, None]
    if window is not None:
        seen &= keys[:, None, :] > positions[:, :, None] - window
    if first is not None:
        seen &= (keys >= first[:, None])[:, None]
    return seen


class TorchAttention:
    """Every device, every dtype; softmax in float32."""

    name = "torch"
    rotates = False
    written = None

    def prepare(self, layout: PassLayout) -> list[Group]:
        """Split the spans into short and long ones."""
        short = [r for r, n in enumerate(layout.span_rows) if 0 < n <= SHORT_ROWS]
        long = [r for r, n in enumerate(layout.span_rows) if n > SHORT_ROWS]
        return [_group(layout, spans, is_short) for spans, is_short in ((short, True), (long, False)) if spans]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: list[Group],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend."""
        cache.write(k, v, layout.write_index)
        out = q.new_empty(q.shape)
        for group in prepared:
            run = _pairwise if group.short else _padded
            result = run(q, cache, layout, group, scale=scale, window=window, softcap=softcap).to(q.dtype)
            result = result.flatten(0, 1)
            if group.keep is not None:
                result = result[group.keep]
            if group.target is None:
                return result
            out.index_copy_(0, group.target, result)
        return out


def _pairwise(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    group: Group,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[G, Q, Hq, D] float32: one partial softmax per (span, tile) pair, merged per span."""
    tiles = _tiles(group, layout, window)
    spans, rows = group.rows.shape
    _, heads, dim = q.shape
    kv_heads = cache.k.shape[2]
    shared = heads // kv_heads  # query heads that share a key head
    pairs = tiles.span.shape[0]
    padded = (q[group.rows].float() * scale).view(spans, rows, kv_heads, shared, dim)
    padded = padded.permute(0, 2, 3, 1, 4).reshape(spans, kv_heads, shared * rows, dim)
    keys, values = cache.read(tiles.blocks, torch.float32)  # [T, K, Hkv, D]
    scores = padded[tiles.span] @ keys.permute(0, 2, 3, 1)  # [T, Hkv, shared * Q, K]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    first = None if group.first is None else group.first[tiles.span]
    hidden = ~_visible(group.positions[tiles.span], tiles.keys, window, first)
    scores = scores.view(pairs, kv_heads, shared, rows, -1)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf")).flatten(2, 3)
    top = scores.amax(-1, keepdim=True).clamp_min(FLOOR)  # [T, Hkv, shared * Q, 1]
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    partial = weights @ values.transpose(1, 2)  # [T, Hkv, shared * Q, D]
    if pairs > spans:
        index = tiles.span[:, None, None, None].expand_as(top)
        best = top.new_full((spans, *top.shape[1:]), FLOOR).scatter_reduce_(0, index, top, "amax")
        rescale = torch.exp(top - best[tiles.span])
        total = torch.zeros_like(best).index_add_(0, tiles.span, total * rescale)
        partial = torch.zeros_like(padded).index_add_(0, tiles.span, partial * rescale)
    result = partial / total.clamp_min(1e-30)
    return result.view(spans, kv_heads, shared, rows, dim).permute(0, 3, 1, 2, 4).reshape(spans, rows, heads, dim)


def _padded(
    q: Tensor,
    cache: LayerCache,
    layout: PassLayout,
    group: Group,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[G, Q, Hq, D]: spans padded to the group's longest context; one tile a span."""
    tiles = _tiles(group, layout, window)
    exact = softcap is not None or q.device.type == "cpu"
    dtype = torch.float32 if exact else q.dtype
    padded = q[group.rows].to(dtype).transpose(1, 2)  # [G, Hq, Q, D]
    keys, values = (x.transpose(1, 2) for x in cache.read(tiles.blocks, dtype))  # [G, Hkv, K, D]
    seen = _visible(group.positions, tiles.keys, window, group.first)[:, None]  # [G, 1, Q, K]
    if group.first is not None:  # a void row sees nothing: let it see anything, so that it comes out finite
        seen |= ~seen.any(-1, keepdim=True)
    gqa = padded.shape[1] != keys.shape[1]
    if softcap is None:
        out = F.scaled_dot_product_attention(padded, keys, values, attn_mask=seen, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)
    if gqa:
        shared = padded.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.tanh(padded @ keys.transpose(2, 3) * (scale / softcap)) * softcap
    return (torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ values).transpose(1, 2)
