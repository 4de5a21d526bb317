"""The Triton kernels equal torch's: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton")

from verifypd.errors import ConfigError
from verifypd.kernels import Int8Weight, select
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.triton import TritonKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter rounds to bfloat16 by cutting off, so that type is checked on a GPU
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# one rounding more or less of the narrow type
TOLERANCE = {torch.float32: (3e-6, 1e-5), torch.bfloat16: (8e-3, 1e-2), torch.float16: (1e-3, 2e-3)}
reference = TorchKernels()
kernels = TritonKernels()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[expected.dtype]
    assert found.dtype == expected.dtype
    assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 37), (16, 2048)])
def test_norms(rows: int, width: int, dtype: torch.dtype, unit_offset: bool) -> None:
    x, residual = random(rows, width, dtype=dtype), random(rows, width, seed=1, dtype=dtype)
    weight = random(width, dtype=dtype)
    close(kernels.rms_norm(x, weight, 1e-5, unit_offset), reference.rms_norm(x, weight, 1e-5, unit_offset))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    expected, added = reference.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    assert torch.equal(total, added)
    close(normed, expected)


def test_norm_of_heads_in_a_fused_tensor() -> None:
    x, weight = random(5, 7 * 16).view(5, 7, 16)[:, 2:5], random(16)
    close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 37)])
def test_gated(rows: int, width: int, dtype: torch.dtype, activation: str) -> None:
    x = random(rows, 2 * width, dtype=dtype) * 6
    x[0, :6] = torch.tensor([0.0, -0.0, 150.0, -150.0, 1e-8, -30.0])
    close(kernels.gated(x, activation), reference.gated(x, activation))  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else DTYPES[:1])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 64, 64), (5, 130, 41), (70, 33, 9)])
def test_invariant_product(rows: int, width: int, outputs: int, dtype: torch.dtype, bias: bool) -> None:
    """Right, and to the bit the same for a row alone and in any company."""
    fixed = TritonKernels(batch_invariant=True)
    x, weight = random(rows, width, dtype=dtype), random(outputs, width, dtype=dtype)
    b = random(outputs, dtype=dtype) if bias else None
    found = fixed.linear(x, weight, b)
    expected = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert float((found.double() - expected).norm() / expected.norm()) < {torch.float32: 1e-6}.get(dtype, 4e-3)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(fixed.linear(x[row : row + 1], weight, b)[0], found[row])
    packed = Int8Weight.quantize(weight)
    close(fixed.linear(x, packed), fixed.linear(x, packed.values.to(dtype)) * packed.scale.to(dtype))


def test_chosen_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(DEVICE, "triton").name == "triton"
    assert select("cpu").name != "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="it needs CUDA"):
        select("cpu", "triton")
