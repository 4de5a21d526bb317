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
    return FeatureCache((0, 1), 5, BLOCK, 6, dtype, select("cpu", kernels), TABLE)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def cache(request: pytest.FixtureRequest) -> FeatureCache:
    return made(request.param)


def at(slots: list[int], positions: list[int]) -> Any:
    """A pass of one row a slot, as far as features go."""
    return SimpleNamespace(
        slots=torch.tensor(slots), row_span=torch.arange(len(slots)), positions=torch.tensor(positions)
    )


def keep(features: FeatureCache, slots: list[int], positions: list[int], value: float) -> None:
    """One row a slot, in three streams of two numbers each: value, value + 0.1, value + 0.2."""
    streams = tuple(torch.full((len(slots), 2), value + i / 10) for i in range(3))
    features.keep(streams, at(slots, positions))


def read(features: FeatureCache, slot: int, position: int) -> list[float]:
    row = features.read(at([slot], []), torch.tensor([position]))[0].tolist()
    assert row == pytest.approx([row[0]] * 2 + [row[2]] * 2 + [row[4]] * 2)
    return [round(number, 1) for number in row[::2]]


def test_a_read_sees_what_was_kept_last(cache: FeatureCache) -> None:
    keep(cache, [0, 1], [5, 2], 1.0)
    keep(cache, [0], [5], 2.0)  # a rejected draft is written over
    assert read(cache, 0, 5) == [2.0, 2.1, 2.2]
    assert read(cache, 1, 2) == [1.0, 1.1, 1.2]
    assert cache.data.count_nonzero() == 12, "nothing else is written"


def test_blocks_that_change_hands_keep_what_they_held(cache: FeatureCache) -> None:
    """The states of the one who left stay in its blocks, for who shares them."""
    keep(cache, [0], [6], 1.0)
    cache.table = torch.tensor([[4, 2], [2, 4]], dtype=torch.int32)
    keep(cache, [0], [6], 2.0)
    assert read(cache, 0, 6) == [2.0, 2.1, 2.2]
    cache.table = TABLE
    assert read(cache, 0, 6) == [1.0, 1.1, 1.2]


@pytest.mark.parametrize("widths", [(2, 2, 2), (2, 4), (6,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_native
def test_both_kernels_write_the_same(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ragged passes over several slots, streams of like and of unlike width, in rows that lie apart in memory too."""
    noise = torch.Generator().manual_seed(0)
    caches = [made(name, dtype) for name in ("torch", "native")]
    for turn in range(30):
        counts = torch.randint(1, 4, (2,), generator=noise)
        starts = torch.randint(0, 2 * BLOCK - 3, (2,), generator=noise)
        span = torch.repeat_interleave(torch.arange(2), counts)
        positions = torch.cat([start + torch.arange(int(n)) for start, n in zip(starts, counts, strict=True)])
        streams = [torch.randn(len(span), 2 * width, generator=noise)[:, :width] for width in widths]
        if turn % 2:
            streams = [stream.contiguous() for stream in streams]
        layout: Any = SimpleNamespace(slots=torch.randperm(2, generator=noise), row_span=span, positions=positions)
        for each in caches:
            each.keep(streams, layout)
    assert torch.equal(caches[0].data, caches[1].data) and caches[0].data.abs().sum() > 0
