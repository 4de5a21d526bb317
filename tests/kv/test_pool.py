"""Features in the blocks of a draft head's pool: what is read is what was kept last, through any table of blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifypd.kernels import build, select
from verifypd.kv.pool import FeatureCache

BLOCK = 4
TABLE = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
needs_native = pytest.mark.skipif(build.library() is None, reason="no C compiler")


def made(kernels: str, dtype: torch.dtype = torch.float32) -> FeatureCache:
    """Features are the sum of the streams, six numbers wide."""
    return FeatureCache((0, 1), True, lambda s: sum(s[1:], s[0]), 5, BLOCK, 6, dtype, select("cpu", kernels), TABLE)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def cache(request: pytest.FixtureRequest) -> FeatureCache:
    return made(request.param)


def at(slots: list[int], positions: list[int], void: bool = False) -> Any:
    """A pass of one row a slot, as far as features go."""
    return SimpleNamespace(
        slots=torch.tensor(slots), row_span=torch.arange(len(slots)), positions=torch.tensor(positions),
        write_index=torch.zeros(len(slots), dtype=torch.int64) + (not void),
    )  # fmt: skip


def keep(features: FeatureCache, slots: list[int], positions: list[int], value: float, void: bool = False) -> None:
    streams = tuple(torch.full((len(slots), 6), value / 4 * part) for part in (1, 2, 1))
    features.keep(streams, at(slots, positions, void))


def read(features: FeatureCache, slot: int, position: int) -> float:
    row = features.before(at([slot], [position + 1]))[0].tolist()
    assert row == [row[0]] * 6
    return float(row[0])


def test_a_read_sees_what_was_kept_last(cache: FeatureCache) -> None:
    keep(cache, [0, 1], [5, 2], 1.0)
    keep(cache, [0], [5], 2.0)  # a rejected draft is written over
    assert read(cache, 0, 5) == 2.0
    assert read(cache, 1, 2) == 1.0
    assert cache.data.count_nonzero() == 12, "nothing else is written"


def test_before_the_text_there_is_nothing(cache: FeatureCache) -> None:
    keep(cache, [0], [0], 3.0)
    assert not cache.before(at([0], [0])).any()


def test_a_void_row_writes_no_feature(cache: FeatureCache) -> None:
    """Padding names slot 0 and position 0, whose block somebody may share."""
    keep(cache, [0, 1], [0, 0], 1.0)
    keep(cache, [0], [0], 7.0, void=True)
    assert read(cache, 0, 0) == read(cache, 1, 0) == 1.0
    assert not cache.data[BLOCK:].eq(7.0).any(), "but for the null block"


def test_blocks_that_change_hands_keep_what_they_held(cache: FeatureCache) -> None:
    """The states of the one who left stay in its blocks, for who shares them."""
    keep(cache, [0], [6], 1.0)
    cache.table = torch.tensor([[4, 2], [2, 4]], dtype=torch.int32)
    keep(cache, [0], [6], 2.0)
    assert read(cache, 0, 6) == 2.0
    cache.table = TABLE
    assert read(cache, 0, 6) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_native
def test_both_kernels_write_the_same(dtype: torch.dtype) -> None:
    """Ragged passes over several slots, void rows among them, in rows that lie apart in memory too."""
    noise = torch.Generator().manual_seed(0)
    caches = [made(name, dtype) for name in ("torch", "native")]
    for turn in range(30):
        counts = torch.randint(1, 4, (2,), generator=noise)
        starts = torch.randint(0, 2 * BLOCK - 3, (2,), generator=noise)
        span = torch.repeat_interleave(torch.arange(2), counts)
        positions = torch.cat([start + torch.arange(int(n)) for start, n in zip(starts, counts, strict=True)])
        streams = [torch.randn(len(span), 12, generator=noise)[:, :6] for _ in range(3)]
        if turn % 2:
            streams = [stream.contiguous() for stream in streams]
        void = torch.randint(0, 3, (len(span),), generator=noise)
        layout: Any = SimpleNamespace(
            slots=torch.randperm(2, generator=noise), row_span=span, positions=positions, write_index=void
        )
        for each in caches:
            each.keep(streams, layout)
        assert torch.equal(caches[0].before(layout), caches[1].before(layout))
    assert torch.equal(caches[0].data[BLOCK:], caches[1].data[BLOCK:]) and caches[0].data.abs().sum() > 0
