"""Keys and values in e4m3: what they lose, what saturates, which scales they get, and how they are moved about."""

from __future__ import annotations

import torch

from verifypd.kernels.weights import FP8, FP8_MAX
from verifypd.kv.fp8 import fitting, narrowed, widened
from verifypd.kv.pool import KVCache, block_bytes


def test_an_entry_loses_half_of_its_last_bit_and_no_more() -> None:
    scale = torch.tensor([0.25, 8.0])
    x = torch.randn(500, 2, 64, generator=torch.Generator().manual_seed(0)) * scale[:, None] * 20
    back = widened(narrowed(x, scale), scale, torch.float32)
    least = 2.0**-10 * scale[:, None]  # half of the smallest step
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, least)).all()
    assert torch.equal(widened(narrowed(back, scale), scale, torch.float32), back)  # and nothing at the second time
    assert torch.equal(back.bfloat16(), widened(narrowed(x, scale), scale, torch.bfloat16))


def test_what_is_too_large_saturates() -> None:
    x = torch.tensor([449.0, 1e30, -1e30, float("inf"), -float("inf"), 448.0])[:, None, None]
    found = widened(narrowed(x, torch.ones(1)), torch.ones(1), torch.float32).flatten()
    assert found.tolist() == [FP8_MAX, FP8_MAX, -FP8_MAX, FP8_MAX, -FP8_MAX, FP8_MAX]


def test_scales_are_powers_of_two_that_leave_room() -> None:
    largest = torch.tensor([1e-3, 0.99, 1.0, 3.7, 120.0, 5e4, 0.0])
    scales = fitting(largest)
    assert (torch.frexp(scales).mantissa == 0.5).all() and scales[-1] == 1
    held = (largest / scales)[:-1]
    assert (held >= 64).all() and (held < 128).all()


def test_a_cache_takes_the_scales_of_another() -> None:
    """By layer, by keys and values and by head; what is read is what was written, within e4m3."""
    wide = KVCache(2, 3, 4, 2, 8, torch.float32, "cpu")
    small = KVCache(2, 3, 4, 2, 8, FP8, "cpu")
    factor = torch.tensor([[[1.0, 30.0], [0.1, 2.0]], [[4.0, 4.0], [1e-3, 1e3]]])
    rows = torch.randn(2, 2, 5, 2, 8, generator=torch.Generator().manual_seed(0)) * factor[:, :, None, :, None]
    places = torch.tensor([4, 7, 11, 5, 10])
    for index in range(2):
        wide.layer(index).write(*rows[index], places)
    small.take_scales(wide.fitting_scales())
    for index in range(2):
        small.layer(index).write(*rows[index], places)
        both = (cache.layer(index).read(torch.tensor([[1, 2]]), torch.float32) for cache in (small, wide))
        for mine, full in zip(*both, strict=True):
            assert ((mine - full).abs() <= full.abs() / 16 + full.abs().amax() / 2**14).all()
            assert full.abs().sum() > 0
    assert 4 * small.nbytes == wide.nbytes == 3 * block_bytes(2, 4, 2, 8, torch.float32)
    assert small.rows.dtype == torch.uint8 and small.rows.shape == (2, 2, 12, 2, 8)
