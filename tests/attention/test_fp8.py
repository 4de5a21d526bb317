"""A cache in e4m3: attention equals a dense softmax over what was rounded, its own rows included, and all who write
write the same. On the GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton")

from tests.attention.test_backends import MIXED, Case, dense, make_case
from tests.attention.test_triton import DEVICE, SMALL, on_device
from tests.attention.test_triton_passes import padded
from verifypd.attention import backend, tiling
from verifypd.attention import triton as module
from verifypd.attention.triton import TritonAttention, rotate_and_write_rows, write_rows
from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.kernels.base import Normed
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.triton import TritonKernels
from verifypd.kernels.weights import FP8
from verifypd.kv.fp8 import narrowed, widened
from verifypd.kv.pool import LayerCache

NAMES = ["torch", "triton", *(["native"] if build.library() is not None else [])]


def scales_for(kv_heads: int) -> Tensor:
    """Of keys and values, each head its own; some saturate."""
    powers = torch.arange(2 * kv_heads).view(2, kv_heads) % 5 - 6.0
    powers[1, -1] = -8.0  # largest 1.75
    return torch.exp2(powers)


def in_e4m3(case: Case) -> tuple[Case, Case]:
    """The case with its history in e4m3, and what it then means: every key and value rounded."""
    scales = scales_for(case.k.shape[1])
    cache = LayerCache(narrowed(case.cache.k, scales[0]), narrowed(case.cache.v, scales[1]), scales)

    def rounded(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip((k, v), scales, strict=True)
        k, v = (widened(narrowed(x, scale), scale, torch.float32) for x, scale in pairs)
        return k, v

    k, v = rounded(case.k, case.v)
    return replace(case, cache=cache), replace(case, k=k, v=v, history=[rounded(*each) for each in case.history])


def moved(case: Case) -> Case:
    """A copy where Triton runs."""
    assert case.cache.scales is not None
    cache = LayerCache(*(x.to(DEVICE, copy=True) for x in case.cache if x is not None))
    return replace(on_device(case), cache=cache)


def check(
    name: str,
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    fixed: bool = False,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> list[int]:
    """Equal to the dense softmax over rounded numbers; the splits that were used."""
    case, meant = in_e4m3(case)
    there = moved(case) if name != "native" else case
    chosen = TritonAttention(batch_invariant=fixed) if name == "triton" else backend(name)
    prepared = chosen.prepare(there.layout)
    scale = case.q.shape[-1] ** -0.5
    q, k, v = (x.to(dtype) for x in (there.q, there.k, there.v))
    out = chosen.attend(q, k, v, there.cache, there.layout, prepared, scale=scale, window=window, softcap=softcap).cpu()
    assert out.isfinite().all() and out.dtype is dtype
    for row, expected in dense(meant, scale, window, softcap).items():
        assert_close(out[row].float(), expected, rtol=10 * tolerance, atol=tolerance)
    return [cut.splits for cuts in prepared.cuts.values() for cut in cuts] if name == "triton" else []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 5.0)])
def test_mixed_spans(name: str, window: int | None, softcap: float | None) -> None:
    check(name, make_case(MIXED, **SMALL, slack=9), window, softcap)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 1, 128), (7, 1, 80), (4, 2, 20), (4, 4, 128)])
def test_heads(name: str, heads: int, kv_heads: int, width: int) -> None:
    check(name, make_case([(70, 4), (0, 18), (-1, 2)], heads, kv_heads, width))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_queries(dtype: torch.dtype) -> None:
    """Keys are rounded once, from the queries' dtype; a chunk goes through large tiles without a mask."""
    check("triton", make_case([(100, 5), (0, 1), (300, 40)], **SMALL, dtype=dtype), dtype=dtype, tolerance=1e-2)


@pytest.mark.parametrize("fixed", [False, True])
def test_splits_are_merged(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processors", lambda device: 10)
    monkeypatch.setattr(tiling, "LEAST_SPLIT", 8)
    monkeypatch.setattr(tiling, "SPLIT_TOKENS", 64)
    assert max(check("triton", make_case([(150, 3), (20, 2)], heads=4, kv_heads=4, width=64), fixed=fixed)) > 2


@pytest.mark.parametrize("name", [name for name in NAMES if name != "triton"])
@pytest.mark.parametrize("held", ["k", "v"])
def test_what_is_not_a_number_stays_so(name: str, held: str) -> None:
    """A pass that overflowed ends in an error, not in plausible words."""
    case, _ = in_e4m3(make_case([(70, 1), (5, 20)], heads=2, kv_heads=2, width=64))
    getattr(case.cache, held).view(torch.uint8).fill_(0x7F)
    chosen = backend(name)
    prepared = chosen.prepare(case.layout)
    out = chosen.attend(
        case.q, case.k, case.v, case.cache, case.layout, prepared, scale=0.125, window=None, softcap=None
    )
    assert out.isnan().all()


def test_a_padded_launch() -> None:
    """As a captured pass has it: room for more rows than there are, and a void span."""
    case, meant = in_e4m3(make_case([(30, 3), (2, 2), (90, 20)], heads=2, kv_heads=2, width=64))
    assert case.cache.scales is not None
    twin, _ = padded(case, 4)
    cache = twin.cache._replace(scales=case.cache.scales.to(DEVICE))
    chosen = TritonAttention()
    prepared = chosen.prepare(twin.layout)
    out = chosen.attend(
        twin.q, twin.k, twin.v, cache, twin.layout, prepared, scale=0.125, window=None, softcap=None
    ).cpu()
    for row, expected in dense(meant, 0.125, None, None).items():
        assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def same(cache: LayerCache, other: LayerCache) -> None:
    """But for the sign of zero, and for the null block, where void rows meet."""
    for held, expected in ((cache.k, other.k), (cache.v, other.v)):
        assert torch.equal(held[1:].float(), expected[1:].float())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_who_write_write_the_same(dtype: torch.dtype) -> None:
    """Entries of every size, from far below the smallest step to far beyond the range."""
    case, _ = in_e4m3(make_case([(70, 12), (0, 18)], heads=2, kv_heads=2, width=64))
    generator = torch.Generator().manual_seed(4)
    sizes = torch.exp2(torch.randint(-18, 14, case.k.shape, generator=generator).float())
    k, v = ((x * sizes).to(dtype).to(DEVICE) for x in (case.k, case.v))
    one, other, third = (moved(case) for _ in range(3))
    one.cache.write(k, v, one.layout.write_index)
    assert (one.cache.v.float().abs() == 448).any() and one.cache.v.float().isfinite().all()
    write_rows(k, v, other.cache, other.layout)
    same(other.cache, one.cache)
    still = torch.zeros(200, 32, device=DEVICE)  # angles: rotated by nothing
    q = torch.zeros(len(k), 2, 64, dtype=dtype, device=DEVICE)
    rotate_and_write_rows(q, k, v, third.cache, third.layout, (still.cos(), still.sin()))
    same(third.cache, one.cache)
    if "native" in NAMES:
        chosen, layout = backend("native"), case.layout
        q, k, v = (x.float().cpu() for x in (q, k, v))
        chosen.attend(q, k, v, case.cache, layout, chosen.prepare(layout), scale=1.0, window=None, softcap=None)
        same(case.cache, LayerCache(one.cache.k.cpu(), one.cache.v.cpu()))


def test_a_product_writes_what_is_written_apart() -> None:
    """Queries, keys and values in one launch. On a GPU sums may be taken in another order, and round apart."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    heads, kv_heads, width, depth = 3, 2, 32, 512
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    weight = (random((heads + 2 * kv_heads) * width, depth) / depth**0.5).to(dtype)
    x = Normed(random(5, depth).to(dtype), random(6, 16).square() + 1, 1e-5)
    angles = random(64, width // 2)
    rotary = (angles.cos(), angles.sin())
    positions, places = (torch.tensor(each, device=DEVICE) for each in ([0, 3, 17, 4, 63], [9, 30, 16, 8, 39]))
    scales = torch.exp2(torch.tensor([[-5.0, -9.0], [-4.0, -6.0]])).to(DEVICE)
    one, other = (
        LayerCache(*torch.zeros(2, 5, 8, kv_heads, width, device=DEVICE).to(FP8).unbind(0), scales) for _ in range(2)
    )
    kernels = TritonKernels()
    q = kernels.linear_qkv(x, weight, None, *rotary, positions, one.k, one.v, places, scales)
    assert q is not None
    apart, k, v = kernels.linear(x, weight).view(5, -1, width).split([heads, kv_heads, kv_heads], 1)
    TorchKernels().rotate_(apart, k, positions, *rotary)
    other.write(k, v, places)
    blocks = torch.arange(5, device=DEVICE)[None]
    for found, expected in zip(one.read(blocks, torch.float32), other.read(blocks, torch.float32), strict=True):
        assert expected.abs().sum() > 0
        assert_close(found, expected, rtol=0.13, atol=1e-3)  # a bit of e4m3
        assert (found == expected).float().mean() > (0.999 if DEVICE == "cpu" else 0.97)


def test_who_cannot_read_it_says_so() -> None:
    with pytest.raises(ConfigError, match="needs --attention native, triton or torch: flashinfer does not read"):
        backend("flashinfer", "cuda", fp8=True)
