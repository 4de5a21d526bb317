"""The cut of attention into programs: bounds in, launch out."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.attention.tiling import MOST_SPLITS, SPLIT_TOKENS, WORKSPACE_ELEMENTS, Tiling, tiling
from verifypd.kernels.tiles import power_of_two

LLAMA = {"heads": 32, "kv_heads": 32, "width": 128, "itemsize": 2, "window": None, "processors": 132}
TINY = {**LLAMA, "kv_heads": 4, "width": 64}
QWEN = {**LLAMA, "heads": 28, "kv_heads": 4}
GEMMA = {**LLAMA, "heads": 8, "kv_heads": 1, "width": 256}


def cut(shape: dict[str, Any], spans: int, rows: int, context: int, **changes: Any) -> Tiling:
    return tiling(**{**shape, "spans": spans, "rows": rows, "context": context, **changes})


@pytest.mark.parametrize("shape", [LLAMA, TINY, QWEN, GEMMA])
@pytest.mark.parametrize("rows", [1, 5, 9, 16, 17, 256, 4096])
@pytest.mark.parametrize("spans", [1, 32, 256])
@pytest.mark.parametrize("fixed", [False, True])
def test_every_row_has_a_place(shape: dict[str, Any], rows: int, spans: int, fixed: bool) -> None:
    found = cut(shape, spans, rows, 8192, fixed=fixed)
    shared = shape["heads"] // shape["kv_heads"]
    assert found.block_m == power_of_two(found.block_m) >= 16  # a matrix instruction's rows
    assert found.block_q * shared <= found.block_m
    assert (found.tiles - 1) * found.block_q < rows <= found.tiles * found.block_q
    pieces = found.slices(spans, shape["heads"], shape["width"])
    assert [tile for first, count in pieces for tile in range(first, first + count)] == list(range(found.tiles))
    if len(pieces) > 1:
        held = spans * pieces[0][1] * found.block_q * shape["heads"] * found.splits * shape["width"]
        assert held <= max(WORKSPACE_ELEMENTS, held // pieces[0][1])


def test_a_verify_span_fits_one_tile() -> None:
    assert cut(LLAMA, 32, 9, 600).tiles == 1
    assert cut(TINY, 32, 5, 600).tiles == 1
    assert cut(QWEN, 32, 9, 600).tiles == 1
    assert cut(LLAMA, 32, 5, 600).block_m == 16


def test_few_programs_share_long_contexts() -> None:
    assert cut(LLAMA, 1, 5, 600).splits > 1
    assert cut(LLAMA, 1, 5, 100).splits == 1  # too short to be worth it
    assert cut(LLAMA, 64, 5, 8192).splits == 1  # enough programs as it is
    assert cut(GEMMA, 1, 1, 1 << 20).splits == MOST_SPLITS
    assert cut(LLAMA, 1, 5, 8192, window=100).splits <= 2  # no more than the window holds


def test_fixed_cut_does_not_know_the_batch() -> None:
    alone = cut(LLAMA, 1, 1, 3000, fixed=True)
    for spans, rows in ((1, 9), (128, 5), (3, 1000)):
        found = cut(LLAMA, spans, rows, 3000, fixed=True)
        assert (found.block_m, found.block_n, found.split_tokens, found.warps, found.stages) == (
            alone.block_m,
            alone.block_n,
            SPLIT_TOKENS,
            alone.warps,
            alone.stages,
        )
    assert SPLIT_TOKENS % alone.block_n == 0
