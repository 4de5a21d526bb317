"""Native kernels equal the torch reference, and a row's result does not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.conftest import random
from verifypd.errors import ConfigError
from verifypd.kernels import Int8Weight, Kernels, build, select
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import HalfWeight, Int8Panels, PanelWeight, Weight

needs_native = pytest.mark.skipif(build.library() is None, reason="no C compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
reference = TorchKernels()


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select("cpu", request.param)


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
