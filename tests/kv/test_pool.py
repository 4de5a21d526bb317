"""Features that wait: what is read is what was kept last, wherever the blocks went meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from verifypd.kv import pool
from verifypd.kv.pool import FeatureCache, Kept

CPU = torch.device("cpu")
BLOCK = 4
TABLE = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)


def cache() -> FeatureCache:
    return FeatureCache(5, BLOCK, 6, torch.float32, CPU)


def states(slots: list[int], positions: list[int], value: float, table: Tensor = TABLE) -> Kept:
    """One row a slot, in three streams of two numbers each: value, value + 0.1, value + 0.2."""
    streams = tuple(torch.full((len(slots), 2), value + i / 10) for i in range(3))
    return Kept(table, torch.tensor(slots), torch.arange(len(slots)), torch.tensor(positions), streams)


def read(features: FeatureCache, slot: int, position: int, table: Tensor = TABLE) -> list[float]:
    row = features.read(table, torch.tensor([slot]), torch.tensor([position]))[0].tolist()
    assert row == pytest.approx([row[0]] * 2 + [row[2]] * 2 + [row[4]] * 2)
    return [round(number, 1) for number in row[::2]]


def test_a_read_sees_what_was_kept_last() -> None:
    features = cache()
    features.keep(states([0, 1], [5, 2], 1.0))
    features.keep(states([0], [5], 2.0))  # a rejected draft is written over
    assert not features.data.any(), "nothing is written before somebody reads"
    assert read(features, 0, 5) == [2.0, 2.1, 2.2]
    assert read(features, 1, 2) == [1.0, 1.1, 1.2]
    assert features.data.count_nonzero() == 12


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GATHERED", 4)
    features = cache()
    for step in range(3):
        features.keep(states([0], [step], 1.0 + step))
        assert not features.data.any()
    features.keep(states([0, 1], [3, 0], 4.0))
    assert features.data.count_nonzero() == 3 * 6, "what waited made room"
    features.keep(states([1] * 5, [1, 2, 3, 4, 5], 5.0))
    assert features.data.count_nonzero() == (3 + 2 + 5) * 6, "more than may wait is written at once"
    assert read(features, 1, 5) == [5.0, 5.1, 5.2] and read(features, 0, 3) == [4.0, 4.1, 4.2]


def test_blocks_that_change_hands_keep_what_they_held() -> None:
    """Settled before the table changes, the states of the one who left stay in its blocks, for who shares them."""
    features, table = cache(), TABLE.clone()
    features.keep(states([0], [6], 1.0, table))
    features.settle()
    table[0] = torch.tensor([4, 2])
    features.keep(states([0], [6], 2.0, table))
    assert read(features, 0, 6, table) == [2.0, 2.1, 2.2]
    assert read(features, 0, 6, TABLE) == [1.0, 1.1, 1.2]


def test_what_waited_together_is_what_each_pass_would_have_left() -> None:
    """Ragged passes over several slots, with places that come again as after a rejected draft."""
    noise = torch.Generator().manual_seed(0)
    passes = []
    for _ in range(30):
        slots = torch.randperm(2, generator=noise)
        counts = torch.randint(1, 4, (2,), generator=noise)
        starts = torch.randint(0, 2 * BLOCK - 3, (2,), generator=noise)
        span = torch.repeat_interleave(torch.arange(2), counts)
        positions = torch.cat([start + torch.arange(int(n)) for start, n in zip(starts, counts, strict=True)])
        streams = tuple(torch.randn(len(span), width, generator=noise) for width in (2, 4))
        passes.append(Kept(TABLE, slots, span, positions, streams))
    together, apart, at_once = cache(), cache(), cache()
    at_once._waits = False  # as on a device
    for each in passes:
        together.keep(each)
        at_once.keep(each)
        apart.keep(each)
        apart.settle()
    together.settle()
    assert torch.equal(together.data, apart.data) and together.data.abs().sum() > 0
    assert torch.equal(at_once.data, apart.data)
