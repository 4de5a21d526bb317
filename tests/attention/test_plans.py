"""The plan of sorted tiles: every key of every tile is read once, those with most context come first, bounds hold."""

from __future__ import annotations

import itertools
import random
from math import ceil
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.attention.test_tiling import LLAMA, QWEN, TINY

pytest.importorskip("triton")

from verifypd.attention import PassLayout, tiling
from verifypd.attention import triton as module
from verifypd.attention.tiling import SHORT_ROWS, Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 8192
VOID = -(1 << 30)  # where padding begins
Chunk = tuple[int, int]  # rows, and tokens before them


def bounds(shape: dict[str, Any], chunks: list[Chunk], window: int | None, padded: bool) -> Tiling:
    """The cut of chunks; padded: of a captured pass that has room for more and for longer ones."""
    rows, spans = sum(n for n, _ in chunks), len(chunks)
    longest, most = max(n for n, _ in chunks), max(n + before for n, before in chunks)
    given = {"spans": spans, "rows": longest, "pass_rows": rows, "context": most}
    if padded:
        longer = rows if longest > SHORT_ROWS else longest
        given = {"spans": max(spans, 9), "rows": longer, "pass_rows": rows, "context": BOUND}
    return tiling.tiling(**{**shape, **given, "window": window})


def planned(
    shape: dict[str, Any], cut: Tiling, chunks: list[Chunk], window: int | None = None, firsts: list[int] | None = None
) -> module.Plan:
    """What the device makes of a cut and lengths; slots are not in the order of spans."""
    rows = [n for n, _ in chunks]
    starts = torch.tensor([before for _, before in chunks])
    slots = torch.arange(len(chunks)).flip(0)
    table = torch.zeros(len(chunks), BOUND // 16, dtype=torch.int32)
    first = None if firsts is None else torch.tensor(firsts).flip(0).to(DEVICE)
    moved = (each.to(DEVICE) for each in (slots, starts, table))
    layout = PassLayout.build(rows, [BOUND] * len(chunks), *moved, 16, first)
    spans = module.SpanClass(len(chunks), max(rows), layout.rows, BOUND, None)
    with patch.object(torch, "empty", lambda *size, **more: torch.full(size, -1, **more)):  # what nobody writes shows
        return module._plan(layout, spans, cut, (shape["heads"], shape["kv_heads"], shape["width"], window))


def keys_of(cut: Tiling, start: int, held: int, lowest: int, window: int | None) -> range:
    """What `attend_tile` reads for a tile, all splits together."""
    low = 0 if window is None else max(start - window + 1, 0) // cut.block_n * cut.block_n
    return range(max(low, lowest // cut.block_n * cut.block_n), max(start + held, 1))


def tiles_of(cut: Tiling, chunks: list[Chunk], firsts: list[int] | None) -> list[tuple[int, int, int, int, int]]:
    """First row, rows, start, slot and lowest key of each tile, in the order of spans."""
    found, first_row = [], 0
    for i, (rows, before) in enumerate(chunks):
        for row in range(0, rows, cut.block_q):
            held = min(cut.block_q, rows - row)
            found.append((first_row + row, held, before + row, len(chunks) - 1 - i, firsts[i] if firsts else 0))
        first_row += rows
    return found


def expected(cut: Tiling, reaches: list[int]) -> list[int]:
    """Shares of tiles whose context falls."""
    found: list[int] = []
    for rank, reach in enumerate(reaches):
        left = sum(reaches[rank // cut.workers * cut.workers :])
        wanted = int(reach * cut.workers / left + 0.5)
        wanted = max(1, min(wanted, -(-reach // cut.least), cut.splits))
        found.append(wanted)
    spare, places = cut.pairs - len(reaches), cut.shared_tiles
    extra, several = itertools.accumulate(n - 1 for n in found), itertools.accumulate(n > 1 for n in found)
    return [n if e <= spare and s <= places else 1 for n, e, s in zip(found, extra, several, strict=True)]


def check(
    shape: dict[str, Any],
    chunks: list[Chunk],
    window: int | None = None,
    firsts: list[int] | None = None,
    padded: bool = False,
) -> list[int]:
    """Shares of the tiles, as they come."""
    cut = bounds(shape, chunks, window, padded)
    if not cut.pairs:
        return [1] * len(tiles_of(cut, chunks, firsts))
    plan = planned(shape, cut, chunks, window, firsts)
    pairs = plan.pairs.tolist()
    tiles = {tile[0]: tile for tile in tiles_of(cut, chunks, firsts)}
    there = [pair for pair in pairs if pair[6]]
    assert pairs[: len(there)] == there, "programs without work come last"
    assert not plan.counters.any()
    reaches, shares = [], []
    read: dict[int, list[range]] = {}
    for first, held, start, slot, lowest, split, count, place in there:
        assert tiles[first] == (first, held, start, slot, lowest)
        assert count == 1 or place < cut.shared_tiles
        keys = keys_of(cut, start, held, lowest, window)
        each = ceil(ceil(len(keys) / cut.block_n) / count) * cut.block_n
        read.setdefault(first, []).append(keys[split * each : (split + 1) * each])
        if not split:
            reach = max(start + held - lowest, 1)
            reaches.append(reach if window is None else min(reach, window + cut.block_q))
            shares.append(count)
    assert set(read) == set(tiles)
    for first, parts in read.items():
        _, held, start, _, lowest = tiles[first]
        whole = keys_of(cut, start, held, lowest, window)
        assert [key for part in sorted(parts, key=lambda r: r.start) for key in part] == list(whole)
    assert reaches == sorted(reaches, reverse=True)
    assert shares == expected(cut, reaches)
    places = {pair[7]: pair[0] for pair in there if pair[6] > 1}
    assert len(places) == len(set(places.values())) == sum(n > 1 for n in shares)
    return shares


def mix(seed: int) -> list[Chunk]:
    """Up to eight chunks of a pass; half of them behind something."""
    draw = random.Random(seed)
    while True:
        chunks = [(int(17 * 120 ** draw.random()), draw.choice((0, draw.randrange(4000)))) for _ in range(8)]
        chunks = chunks[: draw.randint(1, 8)]
        if sum(rows for rows, _ in chunks) <= 2500:
            return chunks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_every_key_of_every_tile_is_read_once(shape: dict[str, Any], seed: int) -> None:
    check(shape, mix(seed))
    check(shape, [*mix(seed + 100)[:7], (seed * 9, VOID)], padded=True)


@pytest.mark.parametrize(("window", "late"), [(None, True), (700, False), (700, True)])
def test_windows_and_slots_that_begin_late(window: int | None, late: bool) -> None:
    chunks = [(300, 900), (40, 3000), (90, 0), (700, 100)]
    check(QWEN, chunks, window, [600, 0, 50, 1300] if late else None)


def test_more_tiles_than_there_are_threads() -> None:
    assert bounds(TINY, [(2400, 1000)], None, False).sorted_tiles == 512
    check(TINY, [(2400, 1000)])
    many = bounds(TINY, [(8000, 0)], None, True)
    assert (many.sorted_tiles, many.splits) == (0, 1)
    plan = planned(TINY, many, [(7000, 0), (1000, 0)])
    assert [pair[0] for pair in plan.pairs.tolist() if pair[6]] == [*range(0, 8000, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "shares"),
    [
        ([(512, 3584)], [1] * 4),  # they fill the device
        ([(256, 1792)], [2] * 2),
        ([(100, 3500)], [4]),
        ([(1100, 1100)], [1] * 8 + [3]),  # two rounds, and one tile for four workers
        ([(1280, 1280)], [1] * 8 + [2] * 2),
        ([(2048, 0)], [1] * 16),
        ([(100, 3500), (900, 0)], [2] + [1] * 8),  # more than a worker's share of the whole pass
        ([(562, 3954), (300, 0), (100, VOID)], [1] * 4 + [3] + [1] * 4),  # light tiles do not make a round
    ],
)
def test_rounds_end_evenly(chunks: list[Chunk], shares: list[int]) -> None:
    assert check(LLAMA, chunks) == shares
    assert check(LLAMA, chunks, padded=True) == shares


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contexts", "shares"),
    [
        ([4000] * 2 + [300] * 22, [4] * 2 + [1] * 14 + [2] * 8),
        ([8000] + [300] * 63, [5] + [1] * 63),
        ([8000] * 2 + [300] * 126, [2] * 2 + [1] * 126),
        ([4000] * 16, [1] * 16),
        ([4000] * 24, [1] * 16 + [2] * 8),  # a round, and another of sixteen halves
        ([4000] * 32, [1] * 32),
        ([250] * 64, [1] * 64),
    ],
)
def test_long_contexts_of_spans_that_fill_the_device(contexts: list[int], shares: list[int]) -> None:
    """A context that is longer than a worker's share has several programs, wherever its request stands."""
    spans = [(5, context - 5) for context in contexts]
    assert check(LLAMA, spans) == shares
    random.Random(len(spans)).shuffle(spans)
    assert check(LLAMA, spans) == shares
    assert check(LLAMA, [*spans, (5, VOID)], padded=True)[: len(shares)] == shares
