"""Native kernels equal the torch reference, and a row's result does not depend on its neighbours."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.emulation import emulated, narrow
from verifypd.errors import ConfigError
from verifypd.kernels import Int8Weight, Kernels, build, select
from verifypd.kernels.native import TYPES, NativeKernels
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import HalfWeight, Int8Panels, PanelWeight, Weight

GROUP_BY = r"(tiles|without AVX-512)"  # one process compiles the library for each, once
needs_native = pytest.mark.skipif(build.library() is None, reason="no C compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
reference = TorchKernels()


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select("cpu", request.param)


@pytest.fixture
def native() -> Kernels:
    if build.library() is None:
        pytest.skip("no C compiler")
    return select("cpu", "native", batch_invariant=True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [(1, 64, 64), (1, 577, 41), (2, 576, 100), (3, 33, 9), (5, 576, 192), (7, 3, 5), (16, 130, 67), (101, 96, 35)],
)
def test_linear(native: Kernels, rows: int, width: int, outputs: int, dtype: torch.dtype, bias: bool) -> None:
    x, weight = random(rows, width), random(outputs, width, dtype=dtype)
    b = random(outputs, dtype=dtype) if bias else None
    expected = x.double() @ weight.double().T
    if b is not None:
        expected += b.double()
    assert_close(native.linear(x, weight, b).double(), expected, rtol=1e-5, atol=1e-5 * width**0.5)
    assert_close(reference.linear(x, weight, b).double(), expected, rtol=1e-5, atol=1e-5 * width**0.5)


def test_linear_takes_row_strides(native: Kernels) -> None:
    wide, weight = random(5, 200), random(40, 96)
    assert_close(native.linear(wide[:, 50:146], weight), reference.linear(wide[:, 50:146], weight))
    across = random(96, 5).T
    assert_close(native.linear(across, weight), reference.linear(across, weight))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", [*DTYPES, torch.int8])
@pytest.mark.parametrize("width", [210, 256])  # tiles take the second
def test_linear_is_batch_invariant(native: Kernels, width: int, kind: torch.dtype, threads: int) -> None:
    x = random(120, width)
    weight = Int8Weight.quantize(random(150, width)) if kind is torch.int8 else random(150, width, dtype=kind)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([native.linear(x[i : i + 1], weight) for i in range(120)])
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 18), 97, 120):
            assert torch.equal(native.linear(x[:rows], weight), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 576, 64), (2, 33, 9), (5, 300, 41), (40, 512, 30)])
def test_int8_linear(kernels: Kernels, rows: int, width: int, outputs: int) -> None:
    x, weight = random(rows, width), Int8Weight.quantize(random(outputs, width))
    b = random(outputs)
    expected = x @ weight.dequantize().T + b
    error = (kernels.linear(x, weight, b) - expected).norm() / expected.norm()
    assert error < 1e-4  # int8 weights alone are off by about 1e-2


def test_int8_outlier_harms_its_group_only(native: Kernels) -> None:
    x, weight = random(1, 1024), Int8Weight.quantize(random(16, 1024))
    x[0, 700] = 5000.0
    expected = x @ weight.dequantize().T
    assert_close(native.linear(x, weight), expected, rtol=1e-3, atol=5.0)  # 256 entries, each within 5000 / 32512
    x[0, 700] = 0.0
    assert_close(native.linear(x, weight), x @ weight.dequantize().T, rtol=1e-4, atol=1e-2)


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
    x, packed = random(130, 1056), panels(paneling, random(208, 1056), dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([paneling.linear(x[i : i + 1], packed) for i in range(130)])
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 27), 95, 130):
            assert torch.equal(paneling.linear(x[:rows], packed), alone[:rows])
    finally:
        torch.set_num_threads(before)


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


def test_int8_weight() -> None:
    weight = random(50, 70, dtype=torch.bfloat16)
    weight[3] = 0
    packed = Int8Weight.quantize(weight)
    assert packed.shape == (50, 70)
    assert packed.nbytes == 50 * 70 + 50 * 4
    assert ((packed.dequantize() - weight.float()).abs() <= packed.scale[:, None] * 0.5001).all()
    ids = torch.tensor([[3, 4], [49, 0]])
    assert_close(packed.rows(ids), packed.dequantize()[ids])


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 37), (16, 64), (200, 400)])
def test_norms(native: Kernels, rows: int, width: int, dtype: torch.dtype, unit_offset: bool) -> None:
    x, residual, weight = random(rows, width), random(rows, width, seed=1), random(width, dtype=dtype)
    expected = reference.rms_norm(x, weight, 1e-5, unit_offset)
    assert_close(native.rms_norm(x, weight, 1e-5, unit_offset), expected)
    y, total = native.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    assert torch.equal(total, x + residual)
    assert_close(y, reference.rms_norm(x + residual, weight, 1e-5, unit_offset))
    assert torch.equal(native.rms_norm(x[:1], weight, 1e-5), native.rms_norm(x, weight, 1e-5)[:1])


def test_norm_of_heads(kernels: Kernels) -> None:
    fused = random(5, 7 * 16).view(5, 7, 16)
    x, weight = fused[:, 2:5], random(16)
    assert_close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 37), (70, 300)])
def test_gated(native: Kernels, rows: int, width: int, activation: str) -> None:
    x = random(rows, 2 * width) * 6
    x[0, :6] = torch.tensor([0.0, -0.0, 150.0, -150.0, 1e-8, -30.0])
    expected = reference.gated(x, activation)  # type: ignore[arg-type]
    assert_close(native.gated(x, activation), expected, rtol=3e-6, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("half", [32, 40, 6])
def test_rotate(kernels: Kernels, half: int) -> None:
    width, rows, q_heads, k_heads = 80, 7, 5, 2
    fused = random(rows, q_heads + 2 * k_heads, width)
    before = fused.clone()
    angles = random(100, half)
    positions = torch.tensor([0, 99, 3, 3, 50, 1, 2])
    q, k = fused[:, :q_heads], fused[:, q_heads : q_heads + k_heads]
    kernels.rotate_(q, k, positions, angles.cos(), angles.sin())
    turned = torch.complex(before[..., :half], before[..., half : 2 * half])
    turned = turned * torch.polar(torch.ones(rows, 1, half), angles[positions][:, None])
    expected = torch.cat((turned.real, turned.imag, before[..., 2 * half :]), -1)
    assert_close(fused[:, :-k_heads], expected[:, :-k_heads])
    assert torch.equal(fused[:, -k_heads:], before[:, -k_heads:])  # values stay


def test_activation_dtype() -> None:
    assert reference.activation_dtype(torch.bfloat16) is torch.bfloat16
    if build.library() is not None:
        assert select("cpu", "native").activation_dtype(torch.bfloat16) is torch.float32


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="--kernels fast is not known; use one of: auto, native, triton, torch"):
        select("cpu", "fast")
    with pytest.raises(ConfigError, match="native does not run on meta here: it needs a CPU"):
        select("meta", "native")
    assert select("meta").name == "torch"


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.float16, torch.int8, "half", "panels", "wide panels", "int8 panels"]
)
def test_embed(native: Kernels, kind: torch.dtype | str) -> None:
    """Rows of every kind of table as torch reads them, to the bit."""
    table: Weight = random(32, 48)
    if kind == "half":
        table = HalfWeight.pack(random(32, 48, dtype=torch.bfloat16))
    elif kind == "panels":
        table = PanelWeight.pack(random(32, 48, dtype=torch.bfloat16))
    elif kind == "wide panels":
        table = PanelWeight.pack(random(32, 48))
    elif kind == "int8 panels":
        table = Int8Panels.pack(Int8Weight.quantize(random(32, 48)))
    elif kind is torch.int8:
        table = Int8Weight.quantize(random(32, 48))
    elif isinstance(kind, torch.dtype):
        table = random(32, 48, dtype=kind)
    ids = torch.tensor([0, 31, 7, 7, 1])
    assert torch.equal(native.embed(ids, table), reference.embed(ids, table).float())
    with pytest.raises(IndexError, match="token id"):
        native.embed(torch.tensor([3, 32]), table)
