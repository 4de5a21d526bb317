"""Every backend equals a dense softmax written out per request; native rows do not depend on their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from verifypd.attention import PassLayout, available_backends, backend, choose
from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.kv.pool import KVCache, LayerCache

BACKENDS = available_backends("cpu")
SLOTS = 12


@dataclass
class Case:
    """Spans over shuffled blocks, with the history each of them has in the cache."""

    layout: PassLayout
    cache: LayerCache
    starts: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    history: list[tuple[Tensor, Tensor]]
    firsts: list[int] | None = None


def make_case(
    spans: list[tuple[int, int]],  # (start, rows)
    heads: int = 6,
    kv_heads: int = 2,
    width: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    slack: int = 0,
    seed: int = 0,
    firsts: list[int] | None = None,  # position from which on a span's slot holds anything
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).float()

    starts, rows = [s for s, _ in spans], [n for _, n in spans]
    contexts = [max(s + n + slack, 1) for s, n in spans]  # upper bounds, as a host one step behind has them
    per_slot = -(-max(contexts) // block_size)
    pool = SLOTS * per_slot + 1
    cache = KVCache(1, pool, block_size, kv_heads, width, dtype, "cpu").layer(0)
    table = (torch.randperm(pool - 1, generator=generator) + 1).view(SLOTS, per_slot).to(torch.int32)
    slots = torch.randperm(SLOTS, generator=generator)[: len(spans)]
    history = []
    for slot, start in zip(slots.tolist(), starts, strict=True):
        at = torch.arange(max(start, 0))
        k, v = random(len(at), kv_heads, width), random(len(at), kv_heads, width)
        blocks = table[slot][at // block_size].long()
        cache.k[blocks, at % block_size], cache.v[blocks, at % block_size] = k.to(dtype), v.to(dtype)
        history.append((k, v))
    first = None
    if firsts is not None:
        first = torch.full((SLOTS,), 1 << 20)
        first[slots] = torch.tensor(firsts)
    layout = PassLayout.build(rows, contexts, slots, torch.tensor(starts), table, block_size, first)
    n = sum(rows)
    fused = torch.cat((random(n, heads, width), random(n, kv_heads, width), random(n, kv_heads, width)), 1)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)  # views, as a model has them
    return Case(layout, cache, starts, q, k, v, history, firsts)


def dense(case: Case, scale: float, window: int | None, softcap: float | None) -> dict[int, Tensor]:
    """Row -> [Hq, D], void rows left out."""
    results, row = {}, 0
    shared = case.q.shape[1] // case.k.shape[1]
    spans = zip(case.starts, case.layout.span_rows, case.history, case.firsts or [0] * len(case.starts), strict=True)
    for start, count, (k, v), first in spans:
        real = slice(row + max(0, -start), row + count)
        keys = torch.cat((k, case.k[real])).repeat_interleave(shared, 1).double()
        values = torch.cat((v, case.v[real])).repeat_interleave(shared, 1).double()
        for j in range(max(0, -start), count):
            position = start + j
            low = first if window is None else max(first, position - window + 1)
            if position < first:
                continue  # void
            scores = torch.einsum("hd,khd->hk", case.q[row + j].double(), keys[low : position + 1]) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            results[row + j] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[low : position + 1]).float()
        row += count
    return results


def attend(name: str, case: Case, *, window: int | None = None, softcap: float | None = None) -> Tensor:
    chosen = backend(name, "cpu")
    prepared = chosen.prepare(case.layout)
    scale = case.q.shape[-1] ** -0.5
    return chosen.attend(
        case.q, case.k, case.v, case.cache, case.layout, prepared, scale=scale, window=window, softcap=softcap
    )


def check(name: str, case: Case, window: int | None = None, softcap: float | None = None, atol: float = 1e-5) -> None:
    out = attend(name, case, window=window, softcap=softcap)
    assert out.shape == case.q.shape
    assert out.isfinite().all()
    for row, expected in dense(case, case.q.shape[-1] ** -0.5, window, softcap).items():
        assert_close(out[row], expected, rtol=1e-4, atol=atol)


MIXED = [(100, 5), (0, 1), (60, 40), (200, 3), (0, 20), (-2, 5), (-4, 4), (63, 1), (64, 17)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1), (40, 1)])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256, 20])
def test_heads(name: str, heads: int, kv_heads: int, width: int) -> None:
    check(name, make_case([(70, 4), (0, 18), (3, 1), (-1, 2)], heads, kv_heads, width))


FIRSTS = [33, 0, 64, 201, 7, 1, 0, 63, 70]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 7, 40])
def test_slots_that_begin_late(name: str, window: int | None) -> None:
    """What lies before the first position that holds anything is not seen; rows there write nothing."""
    case = make_case(MIXED, firsts=FIRSTS)
    check(name, case, window)
    garbage = make_case(MIXED, firsts=FIRSTS)
    for slot, first in zip(case.layout.slots.tolist(), FIRSTS, strict=True):
        blocks = garbage.layout.block_table[slot]
        for position in range(first):
            garbage.cache.k[blocks[position // 16], position % 16] = 1e4
            garbage.cache.v[blocks[position // 16], position % 16] = -1e4
    check(name, garbage, window)
    real = [s + j >= f for (s, n), f in zip(MIXED, FIRSTS, strict=True) for j in range(n)]
    assert [bool(place) for place in case.layout.write_index] == real


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
@pytest.mark.parametrize("window", [None, 1, 7, 40, 1000])
def test_mixed_spans(name: str, window: int | None, softcap: float | None) -> None:
    check(name, make_case(MIXED, slack=9), window, softcap)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 64, 256])
def test_block_sizes(name: str, block_size: int) -> None:
    check(name, make_case(MIXED, block_size=block_size, slack=2), window=30)
    check(name, make_case(MIXED, block_size=block_size))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_cache(name: str, dtype: torch.dtype) -> None:
    check(name, make_case(MIXED, dtype=dtype))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spans", [[(0, 1)], [(500, 1)], [(0, 300)], [(9, 16)] * 3, [(5, 17)] * 3, [(-3, 2), (-1, 1)]])
def test_uniform_spans(name: str, spans: list[tuple[int, int]]) -> None:
    check(name, make_case(spans))


@pytest.mark.parametrize("name", BACKENDS)
def test_keys_and_values_are_written(name: str) -> None:
    case = make_case(MIXED)
    attend(name, case)
    real = case.layout.write_index >= case.layout.block_size  # void rows went to the null block
    at = case.layout.write_index[real]
    assert torch.equal(case.cache.k.flatten(0, 1)[at], case.k[real])
    assert torch.equal(case.cache.v.flatten(0, 1)[at], case.v[real])
    assert int(real.sum()) == case.layout.rows - 6


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_equal_one_pass(name: str) -> None:
    whole = make_case([(0, 90)])
    out = attend(name, whole)
    whole.cache.k.zero_(), whole.cache.v.zero_()
    parts, start = [], 0
    for rows in (33, 1, 5, 16, 17, 18):
        span = slice(start, start + rows)
        layout = PassLayout.build(
            [rows], [start + rows], whole.layout.slots, torch.tensor([start]), whole.layout.block_table, 16
        )
        case = Case(layout, whole.cache, [start], whole.q[span], whole.k[span], whole.v[span], [])
        parts.append(attend(name, case))
        start += rows
    assert_close(torch.cat(parts), out, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, 20.0)])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_is_batch_invariant(threads: int, window: int | None, softcap: float | None) -> None:
    spans = [(130, 5), (0, 40), (63, 2), (200, 1), (90, 70)]
    case = make_case(spans)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = attend("native", case, window=window, softcap=softcap)
        torch.set_num_threads(1)
        for r, (start, rows) in enumerate(spans):
            first = int(case.layout.row_offsets[r])
            for j in range(0, rows, 7):  # each row again, alone: what it sees is in the cache by now
                row = slice(first + j, first + j + 1)
                slot = case.layout.slots[r : r + 1]
                layout = PassLayout.build(
                    [1], [start + j + 1], slot, torch.tensor([start + j]), case.layout.block_table, 16
                )
                one = Case(layout, case.cache, [start + j], case.q[row], case.k[row], case.v[row], [])
                assert torch.equal(attend("native", one, window=window, softcap=softcap), together[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("compiled", [True, False])
def test_layout(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setenv("VERIFYPD_NATIVE", "0")
    table = torch.tensor([[0, 0, 0], [5, 7, 0]], dtype=torch.int32)
    layout = PassLayout.build([3, 1], [2, 6], torch.tensor([1, 1]), torch.tensor([-1, 5]), table, 4)
    assert (layout.rows, layout.spans, layout.max_context) == (4, 2, 6)
    assert layout.positions.tolist() == [0, 0, 1, 5]
    assert layout.write_index.tolist() == [0, 20, 21, 29]
    assert layout.row_span.tolist() == [0, 0, 0, 1]
    assert layout.row_offsets.tolist() == [0, 3, 4]


@pytest.mark.parametrize("block_size", [4, 16])
def test_positions_are_the_same_without_a_compiler(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged spans of shuffled slots, some of which begin before their text; slots and table may be views."""
    noise = torch.Generator().manual_seed(block_size)
    table = torch.randint(1, 99, (SLOTS, 2 * 9), generator=noise, dtype=torch.int32)[:, :9]
    found = []
    for native in ("1", "0"):
        monkeypatch.setenv("VERIFYPD_NATIVE", native)
        assert (build.loaded() is not None) == (native == "1" and "native" in BACKENDS)
        noise.manual_seed(1)
        for spans in (1, 2, 7):
            rows = torch.randint(1, 6, (spans,), generator=noise).tolist()
            slots = (torch.randperm(2 * SLOTS, generator=noise) % SLOTS)[: 2 * spans : 2]
            starts = torch.randint(-4, 9 * block_size - 6, (spans,), generator=noise)
            layout = PassLayout.build(rows, [99] * spans, slots, starts, table, block_size)
            assert layout.slots.is_contiguous(), "C reads it so"
            found.append((layout.positions.tolist(), layout.write_index.tolist()))
    assert found[:3] == found[3:]
    assert any(0 in written for _, written in found) and any(max(written) > 9 * block_size for _, written in found)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize(("slot", "start"), [(0, 35), (SLOTS, 0)])
def test_rows_outside_their_table_are_refused(slot: int, start: int, native: str, monkeypatch: Any) -> None:
    """A fault of whoever plans: an error, and no write to somebody else's block."""
    monkeypatch.setenv("VERIFYPD_NATIVE", native)
    table = torch.ones(SLOTS, 9, dtype=torch.int32)
    with pytest.raises(IndexError):
        PassLayout.build([2], [99], torch.tensor([slot]), torch.tensor([start]), table, 4)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of: auto"):
        backend("flash", "cpu")
    assert available_backends("meta") == ["torch"]
    assert backend("auto", "cpu").name == BACKENDS[0]


def test_gpus_without_e4m3_keep_such_a_cache_from_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "fp8_products", lambda device: False)
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or more"):
        choose.backend("triton", "cuda", fp8=True)
    assert choose.backend("auto", "cuda", fp8=True).name == "torch"
