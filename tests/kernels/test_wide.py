"""Products of 33 to 64 rows in CUDA C++: equal to torch's on a GPU; both sides agree on their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.structures import in_python, in_source
from tests.kernels.test_skinny import close, product, random, reference
from verifypd.kernels import wide
from verifypd.kernels.base import Normed, whole
from verifypd.kernels.launch import INTERPRETED_MEMORY

CUDA = torch.device("cuda")
runs = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not wide._available(CUDA), reason="needs a Hopper GPU and NVRTC"
    ),
]
ROWS = (33, 48, 61, 64)
# outputs, depth: more tiles than blocks, tiles that many blocks share, fewer pieces than blocks
SHAPES = [(12288, 512), (4096, 4096), (1024, 8192), (256, 128), (22016, 256)]


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "LEAST_BYTES", 0)


def test_arguments_are_the_kernels() -> None:
    """Same fields in the same order, with types of the same size."""
    assert in_source(wide.SOURCE) == in_python(wide._Arguments)


def test_blocks_fit() -> None:
    for rows in range(wide.LEAST_ROWS, wide.MOST_ROWS + 1):
        assert wide.padded(rows) >= rows
        assert wide.memory(wide.padded(rows)) + 1024 <= INTERPRETED_MEMORY  # barriers and factors come on top


@pytest.mark.parametrize("processors", [8, 132])
@pytest.mark.parametrize(
    ("tiles", "pieces"), [(1, 1), (1, 200), (32, 64), (32, 172), (96, 64), (172, 64), (16, 2), (300, 3)]
)
def test_blocks_have_all_pieces(tiles: int, pieces: int, processors: int) -> None:
    """Each has something, and together everything."""
    blocks, splits, later, early = wide.shares(tiles, pieces, processors)
    assert blocks <= processors

    def begin(block: int) -> int:  # as wide.cu has it
        if not splits:
            return tiles * pieces * block // blocks
        part = block % splits
        return block // splits * pieces + (pieces - (splits - part) * ((pieces - later) // splits) if part else 0)

    begins = [begin(block) for block in range(blocks + 1)]
    assert begins[0] == 0
    assert begins[-1] == tiles * pieces
    sizes = [b - a for a, b in zip(begins, begins[1:], strict=False)]
    assert min(sizes) >= 1
    assert all(begins[tile * splits] == tile * pieces for tile in range(tiles) if splits)
    assert not early or min(sizes) >= pieces  # who shares a tile comes to it after the next block


def test_not_on_a_cpu() -> None:
    assert not wide.PRODUCTS.suits(torch.zeros(64, 64).bfloat16(), torch.zeros(128, 64).bfloat16())


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, tiles and pieces."""
    monkeypatch.setattr(wide, "_available", lambda device: True)

    def suits(rows: int, outputs: int, depth: int) -> bool:
        return wide.PRODUCTS.suits(torch.zeros(rows, depth).bfloat16(), torch.zeros(outputs, depth).bfloat16())

    assert [rows for rows in range(1, 300) if suits(rows, 256, 64)] == list(range(wide.LEAST_ROWS, wide.MOST_ROWS + 1))
    assert not suits(64, 192, 64)
    assert not suits(64, 128, 96)
    monkeypatch.setattr(wide, "LEAST_BYTES", 2**20)
    assert not suits(64, 128, 64)


class TestOnAGpu:
    """Against float64."""

    pytestmark = runs

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_product(self, outputs: int, depth: int, rows: int, dtype: torch.dtype) -> None:
        x, weight = random(rows, depth, dtype=dtype), random(outputs, depth, dtype=dtype)
        b = random(outputs, seed=1, dtype=dtype) if rows % 2 else None
        assert wide.PRODUCTS.suits(x, weight)
        found = wide.PRODUCTS.linear(x, weight, b)
        close(found, product(x, weight, b))
        for _ in range(3):  # no sum was left for the next launch
            close(wide.PRODUCTS.linear(-2 * x, weight, b), product(-2 * x, weight, b))
            assert torch.equal(wide.PRODUCTS.linear(x, weight, b), found)
        for begin in (depth, 3):  # rows of a wider tensor, where sixteen bytes begin anywhere
            apart = random(rows, 3 * depth, dtype=dtype)[:, begin : begin + depth].copy_(x)
            assert torch.equal(wide.PRODUCTS.linear(apart, weight, b), found)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_a_chain_as_a_layer_has_it(self, outputs: int, depth: int, rows: int) -> None:
        """Residual and norm behind a product, and a product that reads what was normed so."""
        eps, unit_offset = 1e-5, bool(rows % 2)
        x, weight, bias = random(rows, depth), random(outputs, depth) / depth**0.5, random(outputs, seed=1)
        residual, norm = random(rows, outputs, seed=2), random(outputs, seed=3)
        behind = random(512, outputs, seed=4) / outputs**0.5  # weights are older than the kernel before
        normed, stream = wide.PRODUCTS.linear_add_norm(x, weight, bias, residual, norm, eps, unit_offset)
        expected = product(x, weight, bias) + residual.double()
        close(stream, expected)
        expected = expected / (expected.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (norm.double() + unit_offset)
        close(whole(normed), expected)
        close(pytest.importorskip("verifypd.kernels.triton").TritonKernels().whole(normed), expected)
        close(wide.PRODUCTS.linear(normed, behind, None), expected @ behind.double().T)

    @pytest.mark.parametrize(
        ("activation", "bias", "dtype"), [("silu", False, torch.bfloat16), ("gelu_tanh", True, torch.float16)]
    )
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_gate(self, outputs: int, depth: int, rows: int, activation: str, bias: bool, dtype: torch.dtype) -> None:
        weight = random(outputs, depth, dtype=dtype) / depth**0.5
        b = random(outputs, seed=5, dtype=dtype) if bias else None
        squares = (random(7, 256, seed=6).float().square() + 1) * depth / 14
        normed = Normed(random(rows, depth, dtype=dtype), squares, 1e-6)
        found = wide.PRODUCTS.linear_gated(normed, weight, b, activation)  # type: ignore[arg-type]
        factor = 1 / (squares.double()[:, :rows].sum(0) / depth + 1e-6).sqrt()
        both = product(normed.values.double() * factor[:, None], weight, b)
        close(found, reference.gated(both, activation), products=2)  # type: ignore[arg-type]

    @pytest.mark.parametrize("rows", [33, 48, 64])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "width", "depth"),
        [(4, 2, 64, 512), (6, 1, 128, 64), (32, 8, 128, 1024), (2, 1, 256, 256)],
    )
    def test_queries_keys_and_values(self, heads: int, kv_heads: int, width: int, depth: int, rows: int) -> None:
        """Queries come out rotated, keys and values lie in the cache, and nothing else is written there."""
        outputs, places = (heads + 2 * kv_heads) * width, 400
        weight, bias = random(outputs, depth) / depth**0.5, random(outputs, seed=1)
        normed = Normed(random(rows, depth), random(6, 256, seed=2).float().square() + 1, 1e-5)
        angles = random(300, width // 2, seed=3).float()
        cos, sin = angles.cos(), angles.sin()
        order = torch.randperm(places, generator=torch.Generator().manual_seed(rows))
        write_index, positions = order[:rows].to("cuda"), (order[-rows:] % 300).to("cuda")
        cache = torch.full((2, places, kv_heads, width), 7.0, device="cuda").bfloat16()
        q = wide.PRODUCTS.linear_qkv(normed, weight, bias, cos, sin, positions, cache[0], cache[1], write_index)
        factor = 1 / (normed.squares.double()[:, :rows].sum(0) / depth + 1e-5).sqrt()
        all_heads = product(normed.values.double() * factor[:, None], weight, bias).view(rows, -1, width)
        low, high = all_heads[:, : heads + kv_heads].chunk(2, -1)
        c, s = cos.double()[positions][:, None], sin.double()[positions][:, None]
        rotated = torch.cat([low * c - high * s, high * c + low * s], -1)
        close(q, rotated[:, :heads])
        close(cache[0, write_index], rotated[:, heads:])
        close(cache[1, write_index], all_heads[:, heads + kv_heads :])
        others = torch.ones(places, dtype=torch.bool, device="cuda").index_fill_(0, write_index, False)
        assert bool((cache[:, others] == 7.0).all())

    def test_captured_one_behind_the_other(self) -> None:
        """Each begins before the one before is done, and reads what that wrote."""
        rows, width, layers = 40, 1024, 6
        weights = [random(width, width, seed=i) / width**0.5 for i in range(layers)]
        norm, x = torch.ones(width, device="cuda").bfloat16(), random(rows, width)

        def chain() -> Tensor:
            values, stream = wide.PRODUCTS.linear_add_norm(x, weights[0], None, x, norm, 1e-5, False)
            for weight in weights[1:]:
                between = wide.PRODUCTS.linear(values, weight, None)
                values, stream = wide.PRODUCTS.linear_add_norm(between, weight, None, stream, norm, 1e-5, False)
            return whole(values)

        expected = chain().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain()
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
