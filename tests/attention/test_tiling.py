"""The cut of attention into programs: bounds in, launch out."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.attention.tiling import (
    CHUNK_TILE,
    MOST_SPLITS,
    SPLIT_TOKENS,
    WORKSPACE_ELEMENTS,
    Tiling,
    head_slices,
    tiling,
)
from verifypd.kernels.tiles import power_of_two

LLAMA = {"heads": 32, "kv_heads": 32, "width": 128, "itemsize": 2, "window": None, "processors": 132}
LLAMA |= {"shared_memory": 227 * 1024}
TINY = {**LLAMA, "kv_heads": 4, "width": 64}
QWEN = {**LLAMA, "heads": 28, "kv_heads": 4}
GEMMA = {**LLAMA, "heads": 8, "kv_heads": 1, "width": 256}


def cut(shape: dict[str, Any], spans: int, rows: int, context: int, **changes: Any) -> Tiling:
    bounds = {"spans": spans, "rows": rows, "pass_rows": spans * rows, "context": context}
    return tiling(**{**shape, **bounds, **changes})


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
    assert found.pairs >= spans * found.tiles * (found.splits > 1)
    large = found.block_m == CHUNK_TILE and found.sorted_tiles > 0
    assert found.pairs == 0 or found.splits > 1 or large  # no list where the grid says it all
    assert found.shared_tiles <= spans * found.tiles
    elements = found.partials * shared * shape["width"]
    pieces = head_slices(shape["kv_heads"], elements)
    assert [head for first, count in pieces for head in range(first, first + count)] == list(range(shape["kv_heads"]))
    assert pieces[0][1] * elements <= max(2 * WORKSPACE_ELEMENTS, elements)
    assert fixed or found.partials * shape["heads"] * shape["width"] <= WORKSPACE_ELEMENTS


def test_a_verify_span_fits_one_tile() -> None:
    assert cut(LLAMA, 32, 9, 600).tiles == 1
    assert cut(TINY, 32, 5, 600).tiles == 1
    assert cut(QWEN, 32, 9, 600).tiles == 1
    assert cut(LLAMA, 32, 5, 600).block_m == 16


def test_programs_of_crowds_are_small() -> None:
    for found in (cut(LLAMA, 1, 5, 600), cut(TINY, 16, 1, 600)):
        assert (found.block_n, found.warps, found.few) == (64, 4, True)
    assert cut(LLAMA, 8, 5, 600, fp8=True).block_n == 128
    assert cut(LLAMA, 8, 5, 600, fp8=True, shared_memory=99 * 1024).block_n < 128
    for found in (cut(LLAMA, 8, 5, 600), cut(TINY, 128, 1, 600)):
        assert (found.block_n, found.warps, found.few) == (32, 2, False)
    assert not cut(QWEN, 1, 5, 600).few  # 35 rows of a tile
    assert cut(QWEN, 128, 5, 600).warps == 4  # tiles of 64 rows need the registers of four


def test_tiles_of_chunks_follow_the_memory_of_the_device() -> None:
    large, small = cut(LLAMA, 1, 1024, 2048), cut(LLAMA, 1, 1024, 2048, shared_memory=99 * 1024)
    assert (large.block_m, large.warps, large.stages) == (128, 8, 3)
    assert (small.block_m, small.warps, small.stages) == (64, 4, 2)
    assert cut(TINY, 1, 1024, 2048).block_m == 64
    assert cut(LLAMA, 1, 1024, 2048, fixed=True).block_m == 64  # of decode spans too: sums in the same order


def test_few_programs_share_long_contexts() -> None:
    assert cut(LLAMA, 1, 5, 600).splits > 1
    assert cut(LLAMA, 1, 5, 100).splits == 1  # too short to be worth it
    assert cut(GEMMA, 1, 1, 1 << 20).splits == MOST_SPLITS
    assert cut(LLAMA, 1, 5, 8192, window=100).splits == 1  # no more than the window holds


def shares(found: Tiling, contexts: list[int]) -> list[int]:
    """What the device makes of a launch of spans that have one tile each, and do not fill it."""
    assert not found.sorted_tiles
    total = max(sum(contexts), 1)
    wanted = [max(1, min(-(-n // found.least), n * found.workers // total, found.splits)) for n in contexts]
    if found.pairs:
        assert sum(wanted) <= found.pairs, "each of them has a program"
        assert sum(n > 1 for n in wanted) <= found.shared_tiles, "and a place for its partial results"
    return wanted


@pytest.mark.parametrize("spans", range(1, 8))
def test_equal_contexts_fill_the_device_and_no_more(spans: int) -> None:
    expected = min(max(1, 264 // (spans * 32)), 8192 // 128)
    for context in (4000, 4009, 8005):  # also where it is no multiple of the programs
        assert set(shares(cut(LLAMA, spans, 5, 8192), [context] * spans)) == {expected}


def test_a_long_context_is_shared_among_short_ones() -> None:
    assert shares(cut(LLAMA, 7, 5, 8192), [4000] + [300] * 6) == [5] + [1] * 6
    assert shares(cut(LLAMA, 12, 5, 8192), [4000] + [300] * 11) == [8] + [1] * 11


def test_spans_that_fill_the_device_are_sorted() -> None:
    """What the device may make of them: tests/attention/test_plans.py."""
    for spans in (16, 64, 128):
        found = cut(LLAMA, spans, 5, 8192)
        assert (found.workers, found.splits) == (16, 16)  # twice as many as fill it: those that start last are short
        assert found.sorted_tiles >= spans and found.pairs == spans + 16
    assert cut(TINY, 131, 1, 8192).sorted_tiles == 0 < cut(TINY, 132, 1, 8192).sorted_tiles
    assert cut(LLAMA, 64, 5, 8192, fixed=True).sorted_tiles == 0
    crowd = cut(LLAMA, 513, 5, 8192)
    assert (crowd.sorted_tiles, crowd.splits, crowd.pairs) == (0, 1, 0)


def test_chunks_are_shared_out_among_programs_that_run_at_once() -> None:
    """What the device may make of them: tests/attention/test_plans.py."""
    for rows in (256, 1024, 2048):
        found = cut(LLAMA, 1, rows, 8192)
        assert (found.workers, found.splits, found.pairs) == (4, 4, min(4 * found.tiles, found.tiles + 4))
        assert (found.sorted_tiles, found.shared_tiles) == (64, min(found.tiles, 4))
    assert cut(LLAMA, 1, 1024, 2048, shared_memory=99 * 1024).workers == 8  # small tiles, two a processor
    assert cut(QWEN, 1, 1024, 8192).workers == 33
    assert (cut(LLAMA, 1, 512, 512).splits, cut(LLAMA, 1, 512, 512).pairs) == (1, 4)  # too short for splits
    assert cut(LLAMA, 1, 1024, 8192, window=300).pairs == 0


def test_chunks_of_a_padded_pass() -> None:
    """Nine spans of as many rows as the pass has, most of them void: the pass's rows bound the tiles."""
    few = cut(LLAMA, 9, 320, 8192, pass_rows=320)
    assert (few.splits, few.pairs) == (4, 320 // 128 + 9 + 4)
    many = cut(LLAMA, 9, 2176, 8192, pass_rows=2176)
    assert (many.splits, many.pairs) == (4, 2176 // 128 + 9 + 4)  # of 153 tiles
    assert cut(LLAMA, 8, 5, 8192, pass_rows=2176).splits == 8  # spans beside them keep theirs


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
