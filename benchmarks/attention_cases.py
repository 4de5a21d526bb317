"""Passes of attention to check and to time: spans of requests in a cache of shuffled blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verifypd.attention import PassLayout, tiling
from verifypd.attention.base import AttentionBackend
from verifypd.kernels.weights import FP8
from verifypd.kv.fp8 import fitting
from verifypd.kv.pool import KVCache
from verifypd.runtime.passes import PassInputs, pass_key

BLOCK = 16


def traffic(requests: int, rows: int) -> list[tuple[int, int, int]]:
    """Spans of mixed traffic: every eighth has 1,500 to 4,000 tokens before it, the others 100 to 700."""
    long, short = (1500 + 357 * i % 2500 for i in itertools.count()), (100 + 137 * i % 600 for i in itertools.count())
    return [(1, rows, next(long if i % 8 == 5 else short)) for i in range(requests)]


CASES = {  # name: spans of (requests, rows, context before them)
    "1x1@512": [(1, 1, 512)],
    "1x5@512": [(1, 5, 512)],
    "8x5@512": [(8, 5, 512)],
    "32x5@512": [(32, 5, 512)],
    "32x1@512": [(32, 1, 512)],
    "128x1@512": [(128, 1, 512)],
    "128x5@512": [(128, 5, 512)],
    "1x5@8000": [(1, 5, 8000)],
    "8x9@4000": [(8, 9, 4000)],
    "4x5 one@4000 rest@300": [(3, 5, 300), (1, 5, 4000)],
    "12x5 one@4000 rest@300": [(11, 5, 300), (1, 5, 4000)],
    "24x3 two@4000 rest@300": [(22, 3, 300), (2, 3, 4000)],
    "16x3 of traffic": traffic(16, 3),
    "24x3 of traffic": traffic(24, 3),
    "32x3 of traffic": traffic(32, 3),
    "64x5 of traffic": traffic(64, 5),
    "128x1 of traffic": traffic(128, 1),
    "chunk 256@1792": [(1, 256, 1792)],
    "chunk 512@0": [(1, 512, 0)],
    "chunk 512@3584": [(1, 512, 3584)],
    "chunk 640@1000": [(1, 640, 1000)],
    "chunk 1100@0": [(1, 1100, 0)],
    "chunk 1100@1100": [(1, 1100, 1100)],
    "chunk 1100@2200": [(1, 1100, 2200)],
    "chunk 1280@1280": [(1, 1280, 1280)],
    "chunk 2048@0": [(1, 2048, 0)],
    "chunk 100@3500 + chunk 900@0": [(1, 100, 3500), (1, 900, 0)],
    "32x5@512 + chunk 256": [(32, 5, 512), (1, 256, 1792)],
}
PADDED_CASES = {  # as captured passes run them: room for more chunks than there are, bounds instead of lengths
    "8x3@512 + chunk 256@0": [(8, 3, 512), (1, 256, 0)],
    "8x3@512 + chunk 448@512": [(8, 3, 512), (1, 448, 512)],
    "12x5 one@4000 rest@300 padded": [(11, 5, 300), (1, 5, 4000)],
    "12x5 mixed + chunk 256@3584": [(11, 5, 300), (1, 5, 4000), (1, 256, 3584)],
    "8x3@512 + chunk 128@3584": [(8, 3, 512), (1, 128, 3584)],
    "8x3@512 + chunk 256@3584": [(8, 3, 512), (1, 256, 3584)],
    "8x3@512 + chunk 416@3584": [(8, 3, 512), (1, 416, 3584)],
    "32x3@512 + 3 chunks of 128": [(32, 3, 512), (3, 128, 512)],
    "8x5@512 + chunk 1100@1100": [(8, 5, 512), (1, 1100, 1100)],
}
BOUND = 8192  # tokens of context that padded passes reckon with
DEFAULT_SHAPES = "llama-2-7b"
ALL_SHAPES = "llama-2-7b,tinyllama-1.1b,qwen2-7b,gemma-2b,gemma-7b"
TINY_CASES = {
    "1x5@200": [(1, 5, 200)],
    "3x2@40 + chunk 20": [(3, 2, 40), (1, 20, 12)],
    "9x2 one@600 rest@30": [(8, 2, 30), (1, 2, 600)],
}
TINY_PADDED_CASES = {"3x2 one@400 + chunk 20@300 padded": [(2, 2, 30), (1, 2, 400), (1, 20, 300)]}
TINY_SHAPES = {"tiny": (2, 0, 4, 2, 32, 0, 0)}


@dataclass
class Pass:
    """One pass over as many caches as there are layers."""

    layout: PassLayout
    exact: PassLayout  # the same without padding: its rows are the first of the padded ones
    cache: KVCache
    q: Tensor
    k: Tensor
    v: Tensor
    read: int  # bytes a layer must read and write at least

    def run(self, chosen: AttentionBackend, layers: int, options: dict[str, Any], prepared: Any = None) -> Tensor:
        """Attention of `layers` layers; the last one's output. Inside a capture nothing may be prepared."""
        prepared = prepared or chosen.prepare(self.layout)
        layout = replace(self.layout)  # each pass has its own: what is planned once a pass counts
        for layer in range(layers):
            out = chosen.attend(
                self.q, self.k, self.v, self.cache.layer(layer), layout, prepared,
                scale=self.q.shape[-1] ** -0.5, **options,
            )  # fmt: skip
        return out


def make_pass(
    shape: tuple[int, ...],
    spans: list[tuple[int, int, int]],
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    padded: bool = False,
    fp8: bool = False,
) -> Pass:
    """Random numbers in shuffled blocks."""
    _, _, heads, kv_heads, width, _, _ = shape
    each = [(rows, before) for count, rows, before in spans for _ in range(count)]
    needs = [-(-(rows + before) // BLOCK) for rows, before in each]
    cache = KVCache(layers, sum(needs) + 1, BLOCK, kv_heads, width, FP8 if fp8 else dtype, device)
    if cache.scales is None:
        cache.data.normal_()
    else:
        cache.take_scales(fitting(torch.full(cache.scales.shape, 4.0)))
        for layer in cache.data:
            layer.copy_(32 * torch.randn(layer.shape, device=device, dtype=torch.float16))
    blocks = iter((torch.randperm(sum(needs)) + 1).tolist())
    table = torch.zeros(len(each), max(needs), dtype=torch.int32)
    for row, count in zip(table, needs, strict=True):
        row[:count] = torch.tensor(list(itertools.islice(blocks, count)))
    rows = [n for n, _ in each]
    contexts = [n + before for n, before in each]
    starts = torch.tensor([before for _, before in each], device=device)
    slots = torch.arange(len(each), device=device)
    exact = layout = PassLayout.build(rows, contexts, slots, starts, table.to(device), BLOCK)
    if padded:
        short, long = [n for n in rows if n <= tiling.SHORT_ROWS], [n for n in rows if n > tiling.SHORT_ROWS]
        inputs = PassInputs(pass_key(short, max(short), long), device)
        inputs.fill(short, range(len(rows)), rows, drafted=True, chunks=long)
        layout = inputs.layout(torch.tensor(contexts, device=device), table.to(device), BLOCK, BOUND)
    fused = torch.randn(layout.rows, heads + 2 * kv_heads, width, device=device).to(dtype)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    kept = cache.data.element_size() * 2 * kv_heads * (sum(contexts) + sum(rows))
    read = width * (kept + dtype.itemsize * (2 * kv_heads + 2 * heads) * sum(rows))
    return Pass(layout, exact, cache, q, k, v, read)


def flops(shape: tuple[int, ...], spans: list[tuple[int, int, int]]) -> int:
    """Multiplications and additions of one layer."""
    _, _, heads, _, width, _, _ = shape
    pairs = sum(count * (rows * before + rows * (rows + 1) // 2) for count, rows, before in spans)
    return 4 * heads * width * pairs
