"""Products of few rows equal torch's, with what stands around them: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton")

from verifypd.kernels import triton as module
from verifypd.kernels.base import Normed, whole
from verifypd.kernels.launch import shared_memory
from verifypd.kernels.tiles import SKINNY_MEMORY, SKINNY_ROWS, skinny_tile
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.triton import TritonKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter gets bfloat16 wrong
ERROR = {torch.bfloat16: 6e-3, torch.float32: 3e-6}[DTYPE]  # of a result, against the norm of all
SHAPES = [(48, 512), (32, 768), (4112, 192)]  # outputs, depth: a part for each warp, a depth of other parts, wide tiles
WIDTHS = [(512, 512), (4352, 64)]  # the same, of streams
fits = shared_memory(torch.device(DEVICE)) >= SKINNY_MEMORY
here = pytest.mark.skipif(not fits, reason="the device has not the shared memory of a Hopper")
reference = TorchKernels()
kernels = TritonKernels()


@pytest.fixture(autouse=True)
def _triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What skinny.py and wide.py would take on a GPU has tests of its own."""
    monkeypatch.setattr(module, "STREAMED", ())


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def close(found: Tensor, expected: Tensor) -> None:
    """Both in float64."""
    assert found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm()
    assert error < ERROR, float(error)


def wide(x: Tensor) -> Tensor:
    return x.double()


@pytest.mark.slow
@here
@pytest.mark.parametrize(("rows", "bias"), [(1, True), (5, False), (17, True), (32, False)])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_product(outputs: int, depth: int, rows: int, bias: bool) -> None:
    x, weight = random(rows, depth), random(outputs, depth)
    b = random(outputs) if bias else None
    found = kernels.linear(x, weight, b)
    close(found, wide(x) @ wide(weight).T + (0 if b is None else wide(b)))
    if outputs < 100:  # rows of a wider tensor
        assert torch.equal(kernels.linear(random(rows, 3 * depth)[:, depth : 2 * depth].copy_(x), weight, b), found)


@pytest.mark.slow
@here
@pytest.mark.parametrize(("rows", "unit_offset"), [(5, False), (17, True)])
@pytest.mark.parametrize(("outputs", "depth"), WIDTHS)
def test_a_chain_as_a_layer_has_it(outputs: int, depth: int, rows: int, unit_offset: bool) -> None:
    """Residual and norm behind a product, and products of ours that read what was normed so."""
    eps = 1e-5
    x, weight, bias = random(rows, depth), random(outputs, depth) / depth**0.5, random(outputs, seed=1)
    residual, norm = random(rows, outputs, seed=2), random(outputs, seed=3)
    normed, stream = kernels.linear_add_norm(x, weight, bias, residual, norm, eps, unit_offset)
    assert isinstance(normed, Normed)
    expected = wide(x) @ wide(weight).T + wide(bias) + wide(residual)
    close(stream, expected)
    expected = expected / (expected.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (wide(norm) + unit_offset)
    close(kernels.whole(normed), expected)
    close(whole(normed), expected)
    behind = random(64, outputs, seed=4) / outputs**0.5
    assert kernels._tile(normed, behind) is not None
    close(kernels.linear(normed, behind), expected @ wide(behind).T)
    close(reference.linear(normed, behind), expected @ wide(behind).T)


@pytest.mark.parametrize("outputs", [576, 896])
def test_a_stream_that_no_tile_reads_is_normed_at_once(outputs: int) -> None:
    """Else whoever reads it would norm it by itself."""
    x, weight, residual = random(2, 512), random(outputs, 512), random(2, outputs, seed=1)
    normed, _ = kernels.linear_add_norm(x, weight, None, residual, random(outputs, seed=2), 1e-5)
    assert isinstance(normed, Tensor)


def test_float16_streams_are_normed_at_once() -> None:
    """Three thousand times a norm of thirty is more than float16 holds, until it is divided."""
    x, weight = torch.ones(1, 512, device=DEVICE).half(), torch.zeros(512, 512, device=DEVICE).half()
    residual, norm = torch.ones(1, 512, device=DEVICE).half(), torch.full((512,), 30.0, device=DEVICE).half()
    residual[0, 0] = 3000
    normed, _ = kernels.linear_add_norm(x, weight, None, residual, norm, 1e-5)
    assert isinstance(normed, Tensor)
    assert normed.isfinite().all()


@pytest.mark.slow
@here
@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu_tanh", True)])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_gate(outputs: int, depth: int, activation: str, bias: bool) -> None:
    rows = 3
    weight = random(2 * outputs, depth) / depth**0.5
    b = random(2 * outputs, seed=5) if bias else None
    squares = random(7, 16, seed=6).float().square() + 1
    normed = Normed(random(rows, depth), squares, 1e-6)
    found = kernels.linear_gated(normed, weight, b, activation)  # type: ignore[arg-type]
    factor = 1 / (wide(squares)[:, :rows].sum(0) / depth + 1e-6).sqrt()
    both = wide(normed.values) * factor[:, None] @ wide(weight).T + (0 if b is None else wide(b))
    close(found, reference.gated(both, activation))  # type: ignore[arg-type]


@here
def test_a_normed_product_of_ours_reads_squares() -> None:
    rows, depth = 4, 512
    normed = Normed(random(rows, depth), random(9, 16, seed=1).float().square() + 1, 1e-5)
    weight = random(32, depth, seed=2) / depth**0.5
    assert kernels._tile(normed, weight) is not None
    close(kernels.linear(normed, weight), wide(whole(normed)) @ wide(weight).T)


@here
def test_what_is_not_ours() -> None:
    """Many rows, odd shapes and another dtype go to torch; with batch_invariant all do."""
    x, weight = random(SKINNY_ROWS, 512), random(32, 512)
    assert kernels._tile(x, weight) is not None
    assert kernels._tile(random(SKINNY_ROWS + 1, 512), weight) is None
    assert kernels._tile(random(2, 500), random(32, 500)) is None
    assert kernels._tile(x.to(torch.float16), weight) is None
    assert TritonKernels(batch_invariant=True)._tile(x, weight) is None
    assert_close(kernels.linear(x[:0], weight), x.new_empty(0, 32))


def test_without_the_shared_memory_all_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_memory", lambda device: SKINNY_MEMORY - 1)
    x, weight = random(4, 512), random(512, 512) / 512**0.5
    normed, stream = kernels.linear_add_norm(x, weight, None, x, x[0], 1e-5)
    assert isinstance(normed, Tensor)
    close(stream, wide(x) @ wide(weight).T + wide(x))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("outputs", [16, 2560, 4096, 12288, 32000, 28672])
@pytest.mark.parametrize("depth", [256, 512, 2048, 2752, 4096, 8192, 11008])
def test_tiles_fit(outputs: int, depth: int, gated: bool, fp8: bool) -> None:
    """In shared memory, and the parts of the depth are whole rounds. A row of fp8 is two."""
    tile = skinny_tile(SKINNY_ROWS, outputs, depth, gated, fp8)
    assert skinny_tile(SKINNY_ROWS + 1, outputs, depth, gated, fp8) is None
    if tile is None:
        assert outputs < 4096
        assert depth % 256
        return
    assert tile.parts == 1 or depth % (tile.parts * tile.depth) == 0
    under_way = tile.stages - (tile.parts > 1)
    weights, rows = tile.outputs * (2 if gated else 1), SKINNY_ROWS
    columns = weights + 2 * rows if fp8 else 2 * (weights + rows)
    assert columns * tile.depth * tile.parts * under_way <= SKINNY_MEMORY


@pytest.mark.slow
@here
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "depth"), [(3, 1, 32, 512), (30, 1, 128, 64)])
def test_queries_keys_and_values(heads: int, kv_heads: int, width: int, depth: int, bias: bool) -> None:
    """Queries come out rotated, keys and values lie in the cache; a void row is written to the null block."""
    rows, places = 5, 40
    outputs = (heads + 2 * kv_heads) * width
    weight, b = random(outputs, depth) / depth**0.5, random(outputs, seed=1) if bias else None
    normed = Normed(random(rows, depth), random(6, 16, seed=2).float().square() + 1, 1e-5)
    angles = random(64, width // 2, seed=3).float()
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 3, 17, 4, 63], device=DEVICE)
    write_index = torch.tensor([9, 30, 16, 0, 39], device=DEVICE)
    cache_k, cache_v = (torch.full((places, kv_heads, width), 7.0, dtype=DTYPE, device=DEVICE) for _ in range(2))
    blocks = (cache_k.view(5, 8, kv_heads, width), cache_v.view(5, 8, kv_heads, width))
    q = kernels.linear_qkv(normed, weight, b, cos, sin, positions, *blocks, write_index)
    assert q is not None
    together = kernels.linear(normed, weight, b).view(rows, -1, width)
    expected, k, v = (part.clone() for part in together.split([heads, kv_heads, kv_heads], 1))
    reference.rotate_(expected, k, positions, cos, sin)
    close(q, wide(expected))
    for cache, written in ((cache_k, k), (cache_v, v)):
        close(cache[write_index], wide(written))
        others = torch.ones(places, dtype=torch.bool, device=DEVICE)
        others[write_index] = False
        assert (cache[others] == 7).all()


def test_heads_that_do_not_rotate_whole_are_done_apart() -> None:
    x, weight = random(2, 512), random(96, 512)
    half = random(8, 8).float()  # of 32 dimensions 16 rotate
    cache = torch.zeros(2, 4, 1, 32, dtype=DTYPE, device=DEVICE)
    where = torch.tensor([1, 2], device=DEVICE)
    assert kernels.linear_qkv(x, weight, None, half, half, where, cache, cache, where) is None
    assert reference.linear_qkv(x, weight, None, half, half, where, cache, cache, where) is None
