"""Weights in fp8: what they hold, products of few rows equal to those of the widened matrix, and those of many rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from verifypd.kernels.base import Normed
from verifypd.kernels.launch import fp8_products, shared_memory
from verifypd.kernels.tiles import SKINNY_MEMORY, SKINNY_ROWS
from verifypd.kernels.torch import TorchKernels, multiplies_fp8
from verifypd.kernels.triton import TritonKernels, _given
from verifypd.kernels.weights import FP8, FP8_MAX, Fp8Weight, fp8_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter gets bfloat16 wrong
ERROR = {torch.bfloat16: 1e-2, torch.float32: 3e-6}[DTYPE]
fits = DEVICE == "cpu" or (shared_memory(torch.device(DEVICE)) >= SKINNY_MEMORY and fp8_products(torch.device(DEVICE)))
here = pytest.mark.skipif(not fits, reason="the device has not the shared memory of a Hopper, or no fp8")
multiplies = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" or not fits, reason="needs a CUDA device that multiplies fp8"),
]
reference = TorchKernels()
kernels = TritonKernels()


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of bfloat16."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16().to(DEVICE, DTYPE)


def weights(outputs: int, depth: int, seed: int = 0) -> tuple[Fp8Weight, Tensor]:
    """A matrix whose rows are of different sizes, and the same widened, in float64."""
    sizes = torch.logspace(-3, 1, outputs, device=DEVICE)[:, None]
    made = Fp8Weight.quantize((random(outputs, depth, seed=seed).float() * sizes / depth**0.5).to(DTYPE))
    return made, made.dequantize().double()


def close(found: Tensor, expected: Tensor, error: float = ERROR) -> None:
    """By columns, for their sizes differ; expected: in float64."""
    assert found.shape == expected.shape
    relative = (found.double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert relative.max() < error, float(relative.max())


def test_quantising() -> None:
    """The largest entry of a row becomes 448; others move by a sixteenth at most, or by a thousandth of the scale."""
    weight = random(40, 300).float() * torch.logspace(-6, 3, 40, device=DEVICE)[:, None]
    weight[7] = 0
    packed = Fp8Weight.quantize(weight)
    assert packed.values.dtype == FP8
    largest = packed.values.float().abs().amax(1)
    assert (largest[torch.arange(40) != 7] == FP8_MAX).all()
    assert largest[7] == 0
    moved = (packed.dequantize() - weight).abs()
    assert (moved <= torch.maximum(weight.abs() / 15.9, packed.scale[:, None] / 1000)).all()
    ids = torch.tensor([3, 39, 0], device=DEVICE)
    assert torch.equal(packed.rows(ids), packed.dequantize()[ids])
    assert packed.nbytes == 40 * 304


@pytest.mark.slow
@here
@pytest.mark.parametrize(
    ("outputs", "depth", "rows", "bias"), [(48, 512, 5, True), (32, 768, 32, False), (4112, 192, 17, True)]
)
def test_product(outputs: int, depth: int, rows: int, bias: bool) -> None:
    x, (weight, wide) = random(rows, depth), weights(outputs, depth)
    b = random(outputs) if bias else None
    assert kernels._tile(x, weight) is not None
    expected = x.double() @ wide.T
    close(kernels.linear(x, weight, b), expected if b is None else expected + b.double())


@pytest.mark.slow
@here
@pytest.mark.parametrize(("outputs", "depth", "rows"), [(512, 512, 5), (4352, 64, 17)])
def test_a_chain_as_a_layer_has_it(outputs: int, depth: int, rows: int) -> None:
    """Residual and norm behind a product, and gates that read what was normed so."""
    eps = 1e-5
    x, (weight, wide), bias = random(rows, depth), weights(outputs, depth), random(outputs, seed=1)
    residual, norm = random(rows, outputs, seed=2), random(outputs, seed=3)
    normed, stream = kernels.linear_add_norm(x, weight, bias, residual, norm, eps)
    assert isinstance(normed, Normed)
    expected = x.double() @ wide.T + bias.double() + residual.double()
    close(stream, expected)
    expected = expected / (expected.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    close(kernels.whole(normed), expected)
    (gates, wide), b = weights(128, outputs, seed=4), random(128, seed=5)
    both = expected @ wide.T + b.double()
    close(
        kernels.linear_gated(normed, gates, b, "silu"), reference.gated(both, "silu"), 0.03
    )  # normed rows have more bits


@here
@pytest.mark.parametrize(("heads", "kv_heads", "width", "depth"), [(3, 1, 32, 512), (30, 1, 128, 64)])
def test_queries_keys_and_values(heads: int, kv_heads: int, width: int, depth: int) -> None:
    """The rows of a tile are not neighbours: each meets its own scale."""
    rows, outputs = 5, (heads + 2 * kv_heads) * width
    (weight, wide), b = weights(outputs, depth), random(outputs, seed=1)
    x = random(rows, depth)
    angles = random(64, width // 2, seed=3).float()
    positions, places = torch.tensor([0, 3, 17, 4, 63], device=DEVICE), torch.tensor([9, 30, 16, 1, 39], device=DEVICE)
    cache_k, cache_v = (torch.zeros(5, 8, kv_heads, width, dtype=DTYPE, device=DEVICE) for _ in range(2))
    q = kernels.linear_qkv(x, weight, b, angles.cos(), angles.sin(), positions, cache_k, cache_v, places)
    assert q is not None
    together = (x.double() @ wide.T + b.double()).view(rows, -1, width)
    expected, k, v = (part.clone() for part in together.split([heads, kv_heads, kv_heads], 1))
    reference.rotate_(expected, k, positions, angles.cos(), angles.sin())
    for found, wanted in (
        (q, expected),
        (cache_k.view(40, -1, width)[places], k),
        (cache_v.view(40, -1, width)[places], v),
    ):
        close(found.flatten(1), wanted.flatten(1), 3 * ERROR)


@here
def test_what_is_not_ours() -> None:
    """More rows, or a weight that was made for another dtype, go to torch; so does everything with batch_invariant."""
    few, _ = weights(32, 512)
    assert kernels._tile(random(SKINNY_ROWS, 512), few) is not None
    assert kernels._tile(random(SKINNY_ROWS + 1, 512), few) is None
    assert kernels._tile(random(2, 512).half(), few) is None
    invariant, x = TritonKernels(batch_invariant=True), random(40, 512)
    assert invariant._tile(x, few) is None
    together, b = invariant.linear(x, few, random(32)), random(32)
    close(together, x.double() @ few.dequantize(DTYPE).double().T + b.double())
    assert torch.equal(together[7:9], invariant.linear(x[7:9], few, b))


@pytest.mark.parametrize("normed", [False, True])
def test_rows_as_sums_of_two(normed: bool) -> None:
    """To the bit for bfloat16, but for what is 2^-22 of the largest entry; what is normed is rounded to eight bits."""
    x = random(5, 3000) * torch.logspace(-20, 8, 3000, base=2, device=DEVICE)[
        torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    ].bfloat16().to(DTYPE)
    x = x.bfloat16().to(DTYPE)
    x[1] *= 2.0**40
    x[2] *= 2.0**-40
    x[3] = 0
    squares = x.float().square().view(5, 6, 500).sum(2).T.contiguous()
    given = _given(Normed(x, squares, 1e-30) if normed else x, True)
    assert given.values.dtype == FP8 and given.squares is not None
    values = given.values.view(5, 2, 3000).double()
    found = given.squares.double().view(5, 1) * (values[:, 0] + values[:, 1] / 32)
    wide = x.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-30).sqrt() if normed else wide
    slack = expected.abs().amax(1, keepdim=True) * 2.0**-22 + expected.abs() * (2.0**-8.9 if normed else 0.0)
    assert ((found - expected).abs() <= slack).all()


def test_rows_in_fp8() -> None:
    x = random(3, 700)[:, 100:]
    x[1] *= 100
    x[2] = 0
    (values, scale), (wanted, factor) = kernels.fp8_rows(x), fp8_rows(x)
    torch.testing.assert_close(scale, factor)
    found, expected = values.float(), wanted.float()
    assert (found == expected)[expected.abs() >= 2**-6].float().mean() > 0.97
    assert (found[2] == 0).all()
    if DEVICE == "cuda":  # the interpreter gets carries and the smallest numbers wrong
        assert ((found - expected).abs() <= expected.abs() / 8 + 2**-9).all()  # the next number, where it is a near tie


@pytest.mark.skipif(DEVICE != "cpu", reason="of the CPU")
def test_a_cpu_widens_when_it_loads() -> None:
    weight, wide = weights(32, 64)
    packed = reference.pack(weight)
    assert isinstance(packed, Tensor)
    assert torch.equal(packed.double(), wide)
    x = random(3, 64)
    assert not multiplies_fp8(x, weight)
    assert torch.equal(reference.linear(x, weight), reference.linear(x, packed))


class TestWide:
    pytestmark = multiplies

    @pytest.mark.parametrize("rows", [65, 128, 1000])
    @pytest.mark.parametrize(("outputs", "depth", "bias"), [(4096, 512, True), (48, 4096, False)])
    def test_many_rows_are_rounded_too(self, outputs: int, depth: int, bias: bool, rows: int) -> None:
        """Equal to the product of what both were rounded to, within bfloat16; near to that of the rows as they came."""
        x, (weight, wide) = (
            random(rows, depth) * torch.logspace(-2, 2, rows, device=DEVICE)[:, None].to(DTYPE),
            weights(outputs, depth),
        )
        b = random(outputs) if bias else None
        assert multiplies_fp8(x, weight)
        values, scale = kernels.fp8_rows(x)
        product = values.double() * scale.double()[:, None] @ wide.T
        close(kernels.linear(x, weight, b), product if b is None else product + b.double())
        close(product, x.double() @ wide.T, 0.15)
        close(reference.linear(x, weight, b), kernels.linear(x, weight, b).double(), 0.02)

    def test_in_a_graph(self) -> None:
        x, (weight, _) = random(200, 512), weights(4096, 512)
        before = kernels.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kernels.linear(x, weight)
        graph.replay()
        assert torch.equal(found, before)
