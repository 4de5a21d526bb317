"""Products of up to eight rows in CUDA C++: equal to torch's on a GPU; both sides agree on their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.graphs import replayed
from tests.kernels.structures import in_python, in_source
from verifypd.kernels import nvrtc, skinny
from verifypd.kernels.base import Normed, Rows, whole
from verifypd.kernels.launch import INTERPRETED_MEMORY
from verifypd.kernels.streamed import ADDED, MODES
from verifypd.kernels.torch import TorchKernels

CUDA = torch.device("cuda")
runs = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not skinny._available(CUDA), reason="needs a Hopper GPU and NVRTC"
    ),
]
ERROR = {torch.bfloat16: 6e-3, torch.float16: 8e-4}  # of a result, against the norm of all
SHAPES = [(48, 512), (32, 768), (4112, 192), (130, 64), (2048, 5632), (20000, 256)]  # outputs, depth
reference = TorchKernels()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def close(found: Tensor, expected: Tensor, products: int = 1) -> None:
    """expected: in float64. products: one behind the other, each of which rounds."""
    assert found.shape == expected.shape
    off, most = found.double() - expected, products * ERROR[found.dtype]
    assert off.norm() / expected.norm() < most
    assert off.abs().max() < 20 * most * expected.pow(2).mean().sqrt()  # none is plainly wrong


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


def test_arguments_are_the_kernels() -> None:
    """Same fields in the same order, with types of the same size."""
    assert in_source(skinny.SOURCE) == in_python(skinny._Arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", [1, 16, 17, 96, 97, 2000])
def test_blocks_fit(mode: int, share: int) -> None:
    """In shared memory, with some rounds under way; the squares of a row stay in a warp."""
    matrices = skinny.matrices_of(mode, share)
    ahead, shared = skinny.memory(mode, matrices)
    assert ahead >= 3
    assert shared < INTERPRETED_MEMORY - 1024  # of a Hopper block
    assert mode != ADDED or matrices <= 4


def test_not_on_a_cpu() -> None:
    assert not skinny.PRODUCTS.suits(torch.zeros(1, 64).bfloat16(), torch.zeros(32, 64).bfloat16())


def test_large_weights_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose a product is follows from its rows and the bytes of its weight alone."""
    monkeypatch.setattr(skinny, "_available", lambda device: True)
    monkeypatch.setattr(skinny, "MOST_BYTES", 2**20)
    x, weights = torch.zeros(9, 512).bfloat16(), {mib: torch.zeros(mib * 1024, 512).bfloat16() for mib in (1, 2)}
    suited = {(rows, mib) for rows in range(1, 10) for mib in weights if skinny.PRODUCTS.suits(x[:rows], weights[mib])}
    assert suited == {(rows, 1) for rows in range(1, 9)}


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    with pytest.raises(nvrtc.NvrtcError, match="install a CUDA build of torch"):
        nvrtc.compiled(b"", "nothing.cu", "sm_90", {})


def test_what_cannot_be_loaded_is_said_once_and_done_without(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> nvrtc.Function:
        raise nvrtc.NvrtcError("no compiler")

    assert not nvrtc.works(load, "products")
    assert "products are not compiled here, Triton's take their place: no compiler" in caplog.text


class TestOnAGpu:
    """Against float64."""

    pytestmark = runs

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("rows", "bias"), [(1, True), (5, False), (8, True)])
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_product(self, outputs: int, depth: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
        x, weight = random(rows, depth, dtype=dtype), random(outputs, depth, dtype=dtype)
        b = random(outputs, seed=1, dtype=dtype) if bias else None
        assert skinny.PRODUCTS.suits(x, weight)
        found = skinny.PRODUCTS.linear(x, weight, b)
        close(found, product(x, weight, b))
        assert torch.equal(skinny.PRODUCTS.linear(x[:1], weight, b), found[:1])  # a row does not feel its neighbours
        for begin in (depth, 3):  # rows of a wider tensor, where sixteen bytes begin anywhere
            apart = random(rows, 3 * depth, dtype=dtype)[:, begin : begin + depth].copy_(x)
            assert torch.equal(skinny.PRODUCTS.linear(apart, weight, b), found)

    @pytest.mark.parametrize(("rows", "unit_offset"), [(1, True), (5, False), (8, False)])
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_a_chain_as_a_layer_has_it(self, outputs: int, depth: int, rows: int, unit_offset: bool) -> None:
        """Residual and norm behind a product, and a product that reads what was normed so."""
        eps = 1e-5
        x, weight, bias = random(rows, depth), random(outputs, depth) / depth**0.5, random(outputs, seed=1)
        residual, norm = random(rows, outputs, seed=2), random(outputs, seed=3)
        behind = random(64, outputs, seed=4) / outputs**0.5  # weights are older than the kernel before
        normed, stream = skinny.PRODUCTS.linear_add_norm(x, weight, bias, residual, norm, eps, unit_offset)
        expected = product(x, weight, bias) + residual.double()
        close(stream, expected)
        expected = expected / (expected.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (norm.double() + unit_offset)
        close(whole(normed), expected)
        close(pytest.importorskip("verifypd.kernels.triton").TritonKernels().whole(normed), expected)
        if skinny.PRODUCTS.suits(normed, behind):
            close(skinny.PRODUCTS.linear(normed, behind, None), expected @ behind.double().T)

    @pytest.mark.parametrize(
        ("activation", "bias", "dtype"), [("silu", False, torch.bfloat16), ("gelu_tanh", True, torch.float16)]
    )
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_gate(self, outputs: int, depth: int, activation: str, bias: bool, dtype: torch.dtype) -> None:
        rows = 3
        weight = random(2 * outputs, depth, dtype=dtype) / depth**0.5
        b = random(2 * outputs, seed=5, dtype=dtype) if bias else None
        squares = random(7, 16, seed=6).float().square() + 1
        normed = Normed(random(rows, depth, dtype=dtype), squares, 1e-6)
        found = skinny.PRODUCTS.linear_gated(normed, weight, b, activation)  # type: ignore[arg-type]
        factor = 1 / (squares.double()[:, :rows].sum(0) / depth + 1e-6).sqrt()
        both = product(normed.values.double() * factor[:, None], weight, b)
        close(found, reference.gated(both, activation))  # type: ignore[arg-type]

    @pytest.mark.parametrize("rows", [1, 5, 8])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "width", "depth"), [(3, 1, 32, 512), (30, 1, 128, 64), (32, 4, 64, 256)]
    )
    def test_queries_keys_and_values(self, heads: int, kv_heads: int, width: int, depth: int, rows: int) -> None:
        """Queries come out rotated, keys and values lie in the cache, and nothing else is written there."""
        outputs, places = (heads + 2 * kv_heads) * width, 40
        weight, bias = random(outputs, depth) / depth**0.5, random(outputs, seed=1)
        normed = Normed(random(rows, depth), random(6, 16, seed=2).float().square() + 1, 1e-5)
        angles = random(64, width // 2, seed=3).float()
        cos, sin = angles.cos(), angles.sin()
        positions = torch.tensor([0, 3, 17, 4, 63, 8, 1, 2], device="cuda")[:rows]
        write_index = torch.tensor([9, 30, 16, 0, 39, 7, 8, 12], device="cuda")[:rows]
        cache_k, cache_v = (torch.full((places, kv_heads, width), 7.0, device="cuda").bfloat16() for _ in range(2))
        blocks = (cache_k.view(5, 8, kv_heads, width), cache_v.view(5, 8, kv_heads, width))
        q = skinny.PRODUCTS.linear_qkv(normed, weight, bias, cos, sin, positions, *blocks, write_index)
        together = reference.linear(normed, weight, bias).view(rows, -1, width)
        expected, k, v = (part.clone() for part in torch.split(together, [heads, kv_heads, kv_heads], 1))
        reference.rotate_(expected, k, positions, cos, sin)
        close(q, expected.double())
        for cache, written in ((cache_k, k), (cache_v, v)):
            close(cache[write_index], written.double())
            others = torch.ones(places, dtype=torch.bool, device="cuda")
            others[write_index] = False
            assert (cache[others] == 7).all()

    def test_which_products_are_these(self) -> None:
        """Up to eight rows of the weights' dtype; a stream is left to be normed where such a product can read it."""
        triton = pytest.importorskip("verifypd.kernels.triton")
        kernels, weight = triton.TritonKernels(), random(512, 512)
        assert kernels._streamed(random(8, 512), weight) is skinny.PRODUCTS
        assert kernels._streamed(random(9, 512), weight) is None
        assert kernels._streamed(random(8, 512, dtype=torch.float16), weight) is None
        assert kernels._streamed(random(8, 500), random(512, 500)) is None
        assert triton.TritonKernels(batch_invariant=True)._streamed(random(8, 512), weight) is None
        for outputs, left in ((576, True), (520, False)):
            x, residual, norm = random(2, 512), random(2, outputs, seed=1), random(outputs, seed=2)
            normed, _ = kernels.linear_add_norm(x, random(outputs, 512), None, residual, norm, 1e-5)
            assert isinstance(normed, Normed) == left
        half, none = random(2, 512, dtype=torch.float16), torch.zeros(512, 512, device="cuda").half()
        normed, _ = kernels.linear_add_norm(half, none, None, half, none[0], 1e-5)
        assert isinstance(normed, Tensor)  # a stream times its norm may be too large for float16

    @pytest.mark.parametrize("rows", [1, 8])
    def test_products_of_both_kinds_read_each_other(self, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A large weight's product is Triton's; what one kind leaves to be normed, the other norms."""
        kernels = pytest.importorskip("verifypd.kernels.triton").TritonKernels()
        small, gate, down, last = (
            random(*shape, seed=seed) / shape[1] ** 0.5
            for seed, shape in enumerate([(512, 512), (2048, 512), (512, 1024), (512, 512)])
        )
        monkeypatch.setattr(skinny, "MOST_BYTES", small.nbytes)
        x, residual, norm = random(rows, 512, seed=5), random(rows, 512, seed=6), random(512, seed=7)
        assert kernels._streamed(x, small) is skinny.PRODUCTS and kernels._streamed(x, gate) is None
        found: list[Tensor] = []
        expected: list[Tensor] = []
        for mine, each in ((kernels, found), (reference, expected)):
            normed, stream = mine.linear_add_norm(x, small, None, residual, norm, 1e-5)
            acted = mine.linear_gated(normed, gate, None, "silu")
            normed, stream = mine.linear_add_norm(acted, down, None, stream, norm, 1e-5)
            each += [acted, stream, mine.linear(normed, last, None)]
        for one, other in zip(found, expected, strict=True):
            close(one, other.double(), products=6)  # three of each

    def test_one_behind_the_other_in_a_graph(self) -> None:
        """Kernels that start early wait for what they read: a long chain gives the same again and again."""
        weights = [random(512, 512, seed=seed) / 512**0.5 for seed in range(40)]
        x, norm = random(4, 512), torch.ones(512, device="cuda").bfloat16()

        def chain() -> Tensor:
            stream: Tensor = x
            rows: Rows = x
            for weight in weights:
                rows, stream = skinny.PRODUCTS.linear_add_norm(rows, weight, None, stream, norm, 1e-5, False)
            return stream

        replayed(chain)

    def test_what_does_not_compile_says_why(self) -> None:
        with pytest.raises(nvrtc.NvrtcError, match=r"(?s)broken\.cu did not compile.*error"):
            nvrtc.compiled(b"void f( {", "broken.cu", "sm_90", {})
