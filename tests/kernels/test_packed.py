"""Products by tiles, and with weights packed as float16 or in panels: exact, and the same bits in every company."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.conftest import random
from tests.kernels.emulation import emulated, narrow
from verifypd.kernels import Int8Weight, Kernels, build
from verifypd.kernels.native import TYPES, NativeKernels
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import HalfWeight, Int8Panels, PanelWeight

GROUP_BY = r"(tiles|without AVX-512)"  # one process compiles the library for each, once
reference = TorchKernels()


@pytest.fixture(scope="module")
def library_with_tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library where it has AMX tiles, else one that emulates them."""
    found = build.library()
    return found if found is not None and found.vpd_takes_tiles() else emulated(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def tiling(library_with_tiles: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    monkeypatch.setattr(build, "library", lambda: library_with_tiles)
    kernels = NativeKernels(batch_invariant=True)
    assert kernels.tiles
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("width", [128, 576])
def test_tiles_are_exact(tiling: NativeKernels, width: int, kind: torch.dtype) -> None:
    """Each number of rows has tiles of its own width: the same bits all the same. An outlier takes little from the
    rest of its row."""
    x, outputs = random(17, width), 36
    x[:, 7] = 50.0
    weight = Int8Weight.quantize(random(outputs, width)) if kind is torch.int8 else random(outputs, width, dtype=kind)
    exact = (weight.dequantize() if isinstance(weight, Int8Weight) else weight).double()
    expected, whole = x.double() @ exact.T, tiling.linear(x, weight)
    assert (whole - expected).norm() / expected.norm() < 2e-5
    for rows in (1, 2, 3, 5, 6, 8, 9, 11, 16):
        assert torch.equal(tiling.linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("narrow", [False, True])
def test_tiles_keep_nan_in_its_row(tiling: NativeKernels, narrow: bool) -> None:
    x, weight = random(3, 64), random(32, 64, dtype=torch.bfloat16)
    weight = Int8Weight.quantize(weight.float()) if narrow else weight
    x[1, 5] = float("nan")
    y = tiling.linear(x, weight)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.fixture
def halving(native: Kernels) -> NativeKernels:
    assert isinstance(native, NativeKernels)
    if not native.halves:
        pytest.skip("the processor does not multiply float16")
    return native


SPREAD = torch.logspace(-25, 25, 130)[:, None]  # of the rows of x: far past what float16 holds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "outputs"), [(576, 960), (1536, 64), (200, 36), (8, 4)])
def test_half_linear(halving: NativeKernels, width: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(130, width) * SPREAD, random(outputs, width, dtype=dtype), random(outputs)
    packed = halving.pack(weight)
    assert isinstance(packed, HalfWeight)
    expected = x.double() @ weight.double().T
    error = (halving.linear(x, packed) - expected).norm() / expected.norm()
    rounded = (x.bfloat16().double() @ weight.double().T - expected).norm() / expected.norm()
    assert error < 0.75 * rounded  # less than bfloat16 takes away from x alone
    assert_close(halving.linear(x, packed, bias), halving.linear(x, packed) + bias)
    assert_close(reference.linear(x[:3], packed), reference.linear(x[:3], weight.float()))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_half_linear_is_batch_invariant(halving: NativeKernels, threads: int) -> None:
    x, packed = random(130, 328) * SPREAD, halving.pack(random(148, 328, dtype=torch.bfloat16))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([halving.linear(x[i : i + 1], packed) for i in range(130)])
    torch.set_num_threads(threads)
    try:
        for rows in (2, 3, 4, 5, 6, 7, 13, 95, 96, 97, 130):
            assert torch.equal(halving.linear(x[:rows], packed), alone[:rows])
    finally:
        torch.set_num_threads(before)


def test_half_linear_never_overflows(halving: NativeKernels) -> None:
    x, weight = torch.full((3, 1536), 3e30), torch.full((8, 1536), 250.0, dtype=torch.bfloat16)
    x[1], x[2, 5] = 0.0, torch.nan
    y = halving.linear(x, halving.pack(weight))
    assert_close(y[0], torch.full((8,), 3e30 * 250 * 1536), rtol=1e-3, atol=0)
    assert (y[1] == 0).all()
    assert y[2].isnan().all()


def test_half_weight() -> None:
    weight = random(52, 72, dtype=torch.bfloat16) * torch.logspace(-30, 30, 52)[:, None].bfloat16()
    weight[3] = 0
    packed = HalfWeight.pack(weight)
    assert packed.shape == (52, 72)
    assert packed.nbytes == 52 * 72 * 2 + 52 * 4
    assert packed.values.abs().max() < 16
    assert torch.equal(packed.dequantize(torch.bfloat16), weight)
    ids = torch.tensor([[3, 4], [51, 0]])
    assert torch.equal(packed.rows(ids), weight.float()[ids])
    assert not HalfWeight.fits(weight.float())
    assert not HalfWeight.fits(weight[:50])
    assert not HalfWeight.fits(weight[:, :70])
    assert not HalfWeight.fits(weight[0])


@pytest.fixture(scope="module")
def library_without_avx512(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return narrow(tmp_path_factory.mktemp("narrow"))


@pytest.fixture(params=["native", "without AVX-512"])
def paneling(request: pytest.FixtureRequest, native: Kernels, monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    """With vectors as wide as the processor has them, and with those of most x86 processors."""
    if request.param != "native":
        library = request.getfixturevalue("library_without_avx512")
        assert all(library.vpd_takes_panels(TYPES[dtype]) for dtype in PANELED)
        monkeypatch.setattr(build, "library", lambda: library)
        native = NativeKernels(batch_invariant=True)
    assert isinstance(native, NativeKernels)
    return native


PANELED = [torch.bfloat16, torch.float32, torch.int8]


def panels(kernels: NativeKernels, weight: Tensor, dtype: torch.dtype) -> PanelWeight | Int8Panels:
    """A float32 matrix in panels; of int8 where these kernels take such."""
    if dtype is not torch.int8:
        return PanelWeight.pack(weight.to(dtype))
    if torch.int8 not in kernels.panels:
        pytest.skip("int8 is multiplied in another order here")
    return Int8Panels.pack(Int8Weight.quantize(weight))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PANELED)
@pytest.mark.parametrize(("width", "outputs"), [(576, 960), (1040, 112), (2064, 64), (16, 16)])
def test_panel_linear(paneling: NativeKernels, width: int, outputs: int, dtype: torch.dtype) -> None:
    x, packed, bias = random(130, width), panels(paneling, random(outputs, width), dtype), random(outputs)
    expected = x.double() @ packed.dequantize().double().T
    error = (paneling.linear(x, packed) - expected).norm() / expected.norm()
    assert error < (1e-4 if dtype is torch.int8 else 2e-6)  # int8 weights alone are off by about 1e-2
    assert torch.equal(paneling.linear(x, packed, bias), paneling.linear(x, packed) + bias)
    assert_close(reference.linear(x[:3], packed), reference.linear(x[:3], packed.dequantize()))
    part = random(5, 3 * width)[:, width : 2 * width]
    assert torch.equal(paneling.linear(part, packed), paneling.linear(part.clone(), packed))


@pytest.mark.parametrize("dtype", PANELED)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_panel_linear_is_batch_invariant(paneling: NativeKernels, threads: int, dtype: torch.dtype) -> None:
    x, packed = random(260, 1056), panels(paneling, random(208, 1056), dtype)  # more rows than a thread has room for
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([paneling.linear(x[i : i + 1], packed) for i in range(260)])
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 27), 95, 130, 260):
            assert torch.equal(paneling.linear(x[:rows], packed), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", PANELED)
def test_short_rows_may_be_many(paneling: NativeKernels, dtype: torch.dtype) -> None:
    """They fit a thread's room, and their scales do not."""
    x, packed = random(1100, 16), panels(paneling, random(16, 16), dtype)
    whole = paneling.linear(x, packed)
    assert torch.equal(whole, torch.cat([paneling.linear(part, packed) for part in x.split(11)]))


def test_int8_panels_hold_the_largest_sums(paneling: NativeKernels) -> None:
    """The products of 1,024 entries at the ends of both ranges, each sum the largest of 32 bits that there is."""
    values = torch.full((16, 2048), -128, dtype=torch.int8)
    values[1] = 127
    packed = Int8Panels.pack(Int8Weight(values, torch.ones(16)))
    panels(paneling, torch.ones(16, 16), torch.int8)  # or skip
    x = torch.full((3, 2048), 3.0)
    x[1], x[2] = -3.0, 0.0
    x[2, 5] = 1e-38  # too small for integers of its own
    y = paneling.linear(x, packed)
    assert_close(y[0], x[0] @ values.float().T, rtol=1e-6, atol=0)
    assert torch.equal(y[1], -y[0]) and (y[2] == 0).all()


def test_an_outlier_harms_a_part_of_its_row_only(paneling: NativeKernels) -> None:
    x, packed = random(2, 2048), panels(paneling, random(16, 2048), torch.int8)
    exact = packed.dequantize()
    x[0, 1700] = 5000.0
    first = x.clone()
    first[:, 1024:] = 0.0
    assert_close(paneling.linear(x, packed)[0], x[0] @ exact.T, rtol=1e-3, atol=10.0)  # 1,024 within 5000 / 32766
    assert_close(paneling.linear(x, packed)[1], x[1] @ exact.T, rtol=1e-3, atol=2e-2)
    assert_close(paneling.linear(first, packed), first @ exact.T, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_int8_panels_keep_nan_in_its_row(paneling: NativeKernels, bad: float) -> None:
    x, packed = random(14, 2048), panels(paneling, random(32, 2048), torch.int8)
    x[1, 5] = bad
    y = paneling.linear(x, packed)
    assert not y[1].isfinite().any()
    y[1] = 0.0
    assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_panels_keep_nan_and_infinity_where_they_are(paneling: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = random(14, 64), random(32, 64, dtype=dtype)
    x[1, 5], weight[3, 7], weight[4, 8] = torch.nan, torch.nan, torch.inf
    y = paneling.linear(x, PanelWeight.pack(weight))
    assert y[1].isnan().all() and y[:, 3].isnan().all() and y[0, 4].isinf()
    y[1], y[:, 3:5] = 0.0, 0.0
    assert y.isfinite().all()


def test_int8_panels() -> None:
    weight = Int8Weight.quantize(random(48, 80))
    packed = Int8Panels.pack(weight)
    assert packed.shape == (48, 80) and packed.nbytes == weight.nbytes
    assert torch.equal(packed.dequantize(), weight.dequantize())
    ids = torch.tensor([[3, 4], [47, 0]])
    assert torch.equal(packed.rows(ids), weight.rows(ids))
    some = packed.some(ids)
    assert torch.equal(some.values, weight.values[ids]) and torch.equal(some.scale, weight.scale[ids])
    assert torch.equal(packed.unpacked().values, weight.values) and packed.unpacked().scale is weight.scale
    for shape in ((40, 80), (48, 72), (48, 0)):
        assert not Int8Panels.fits(Int8Weight(torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_panel_weight(dtype: torch.dtype) -> None:
    weight = random(48, 80, dtype=dtype)
    packed = PanelWeight.pack(weight)
    assert packed.shape == (48, 80) and packed.dtype is dtype
    assert packed.nbytes == weight.nbytes
    assert torch.equal(packed.dequantize(dtype), weight)
    ids = torch.tensor([[3, 4], [47, 0]])
    assert torch.equal(packed.rows(ids), weight.float()[ids])
    for other in (weight.half(), weight[:40], weight[:, :72], weight[0], weight[:, :0]):
        assert not PanelWeight.fits(other)


def test_matrices_are_packed_for_the_processor(native: Kernels) -> None:
    assert isinstance(native, NativeKernels)
    assert not (native.halves and native.panels) and not (native.tiles and native.panels - {torch.float32})
    for outputs in (40, 48):
        wide = Int8Panels if outputs == 48 and torch.int8 in native.panels else Int8Weight
        assert type(native.pack(Int8Weight.quantize(random(outputs, 80)))) is wide
    for dtype in (torch.bfloat16, torch.float32):
        half = native.halves and dtype is torch.bfloat16
        wanted = HalfWeight if half else PanelWeight if dtype in native.panels else Tensor
        assert type(native.pack(random(48, 80, dtype=dtype))) is wanted
        assert type(native.pack(random(40, 80, dtype=dtype))) is (HalfWeight if half else Tensor)
