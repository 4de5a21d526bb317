"""The Triton kernels equal torch's: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton")

from verifypd.errors import ConfigError
from verifypd.kernels import Int8Weight, select, skinny
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


@pytest.mark.parametrize("scale", [None, 24.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 37), (4, 2048)])
def test_embeddings(rows: int, width: int, dtype: torch.dtype, scale: float | None) -> None:
    """Normed, or beside features whose rows lie apart; what is not normed is the same to the bit."""
    table, weights = random(50, width, dtype=dtype), (random(width, dtype=dtype), random(width, seed=1, dtype=dtype))
    ids = torch.arange(7, 7 + 9 * rows, 3, device=DEVICE)[::3]  # apart
    features = random(rows, 3, width, dtype=dtype)[:, 1]
    for unit_offset in (False, True):
        normed, stream = kernels.embed_norm(ids, table, scale, weights[0], 1e-5, unit_offset, dtype)
        expected, rows_of = reference.embed_norm(ids, table, scale, weights[0], 1e-5, unit_offset, dtype)
        assert torch.equal(stream, rows_of)
        assert torch.equal(normed, kernels.rms_norm(stream, weights[0], 1e-5, unit_offset))
        close(normed, expected)
    for norms in (None, weights):
        found, kept = kernels.embed_beside(ids, table, scale, features, norms, 1e-5)
        expected, _ = reference.embed_beside(ids, table, scale, features, norms, 1e-5)
        close(found, expected)
        assert torch.equal(found[:, width:], kept)
        assert norms is not None or torch.equal(found, expected)


def test_launches_that_begin_early_wait() -> None:
    """One function gives both options: a kernel that is launched early and does not wait is a race."""
    package = Path(skinny.__file__).parent.parent
    files = [path for path in package.rglob("*.py") if "launch_pdl" in path.read_text()]
    assert [path.name for path in files] == ["launch.py"]


def test_packed_embeddings_are_read_as_ever() -> None:
    table, weight = Int8Weight.quantize(random(40, 64)), random(64)
    ids, features = torch.tensor([3, 39], device=DEVICE), random(2, 64)
    found = kernels.embed_norm(ids, table, None, weight, 1e-5, False, torch.float32)
    close(found[0], reference.embed_norm(ids, table, None, weight, 1e-5, False, torch.float32)[0])
    beside, _ = kernels.embed_beside(ids, table, None, features, (weight, weight), 1e-5)
    close(beside, reference.embed_beside(ids, table, None, features, (weight, weight), 1e-5)[0])


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
