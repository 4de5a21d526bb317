"""Attention of prompt chunks in CUDA C++: equal to a dense softmax on a GPU, and to Triton's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.attention.on_gpu import CUDA, AgainstDense
from tests.attention.test_backends import make_case
from tests.attention.test_triton import on_device
from tests.graphs import replayed
from verifypd.attention import chunks, tiling
from verifypd.attention.triton import TritonAttention

ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a row's result, against its norm
MULTI = {"heads": 3, "kv_heads": 3, "width": 128}
GROUPED = {"heads": 8, "kv_heads": 2, "width": 128}
SEVEN = {"heads": 14, "kv_heads": 2, "width": 128}  # a tile has 18 rows of seven heads


def test_blocks_fit() -> None:
    """A block of threads has its memory of a Hopper processor, and steps are whole blocks of the pool."""
    assert chunks.memory() <= 227 * 1024
    assert chunks.KEYS % 64 == 0


@pytest.mark.parametrize("shared", [1, 7])
def test_large_tiles_are_listed(shared: int) -> None:
    """Blocks go through a list, also of one tile in one part."""
    cut = tiling.tiling(
        spans=1, rows=128, pass_rows=128, context=128, heads=2 * shared, kv_heads=2, width=128, itemsize=2,
        window=None, processors=132, shared_memory=227 * 1024,
    )  # fmt: skip
    assert cut.block_m == tiling.CHUNK_TILE and cut.sorted_tiles
    assert cut.pairs >= cut.tiles
    case = make_case([(0, 128)], 2 * shared, 2, 128, dtype=torch.bfloat16)
    assert not chunks.suits(case.q.bfloat16(), case.cache, case.layout, cut, None, None)  # not on a CPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not chunks._available(CUDA), reason="needs a Hopper GPU and NVRTC")
class TestOnAGpu(AgainstDense):
    """Against float64."""

    kernel = chunks
    error = ERROR

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", [MULTI, GROUPED, SEVEN])
    def test_contexts(self, shape: dict[str, int], dtype: torch.dtype, calls: list[int]) -> None:
        """Chunks that begin and end anywhere in blocks and steps, in one part and in several."""
        spans = [(0, 128), (0, 129), (1, 200), (100, 156), (127, 130), (128, 128), (130, 300), (1000, 129), (3000, 140)]
        for span in spans:
            self.check(make_case([span], **shape, dtype=dtype))
        assert len(calls) == 2 * len(spans)
        assert max(calls) > 1

    def test_many_splits(self, calls: list[int]) -> None:
        """Contexts whose steps of keys are no multiple of their splits, in as many as key heads leave room for."""
        spans, heads = [(3000, 100), (4100, 140), (4100, 64), (6100, 100)], [(28, 4), (8, 8), (32, 8), (2, 1)]
        for span, numbers in zip(spans, heads, strict=True):
            self.check(make_case([span], *numbers, width=128, dtype=torch.bfloat16))
        assert len(calls) == 8 and min(calls) >= 6

    def test_chunks_of_all_lengths(self, calls: list[int]) -> None:
        """Several, with void rows among them, beside short spans."""
        self.check(make_case([(200, 3), (40, 160), (-5, 140), (0, 1), (700, 17), (90, 5), (2000, 500)], **GROUPED,
                             dtype=torch.bfloat16))  # fmt: skip
        assert len(calls) == 2

    def test_more_tiles_than_processors(self, calls: list[int]) -> None:
        """Blocks take one tile after the other."""
        self.check(
            make_case([(0, 1300), (64, 700), (500, 300)], heads=32, kv_heads=32, width=128, dtype=torch.bfloat16)
        )
        assert len(calls) == 2

    @pytest.mark.parametrize("block_size", [8, 32, 128])
    def test_blocks_of_the_pool(self, block_size: int, calls: list[int]) -> None:
        self.check(make_case([(77, 190), (300, 131)], 4, 2, 128, block_size, dtype=torch.bfloat16, slack=2))
        assert len(calls) == 2

    @pytest.mark.parametrize("block_size", [1, 3, 256])
    def test_other_blocks_are_tritons(self, block_size: int, calls: list[int]) -> None:
        self.check(make_case([(77, 190)], 4, 2, 128, block_size, dtype=torch.bfloat16))
        assert not calls

    def test_nothing_behind_a_context_is_read(self, calls: list[int]) -> None:
        """Another request's NaN in the last block, and in blocks that a row of the table no longer has."""
        case = make_case([(50, 150), (300, 137)], **MULTI, dtype=torch.bfloat16)
        expected = self.check(case)
        held = on_device(case)
        nan = torch.full_like(held.cache.k, torch.nan)
        written = torch.zeros(nan.shape[0] * nan.shape[1], dtype=torch.bool, device=CUDA)
        block_size = case.layout.block_size
        for r, (start, rows) in enumerate([(50, 150), (300, 137)]):
            positions = torch.arange(start + rows)
            table = case.layout.block_table[case.layout.slots[r]]
            written[(table[positions // block_size] * block_size + positions % block_size).to(CUDA)] = True
        for side in (held.cache.k, held.cache.v):
            rows = side.view(-1, *side.shape[2:])
            rows[~written] = torch.nan
        assert torch.equal(self.attend(held).cpu(), expected)
        assert len(calls) == 4

    @pytest.mark.parametrize("shape", [MULTI, GROUPED])
    def test_layers_in_a_graph(self, shape: dict[str, int], calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels that start early wait for what they read, and tickets are set back: the same again and again, and as
        Triton's. Each layer writes other keys and values."""
        case = on_device(make_case([(500, 300), (30, 129), (2000, 200), (5, 2)], **shape, dtype=torch.bfloat16))
        chosen = TritonAttention()
        prepared = chosen.prepare(case.layout)
        angles = torch.randn(2300, shape["width"] // 2, device=CUDA)
        k, v = case.k.bfloat16(), case.v.bfloat16()

        def layers() -> Tensor:
            layout, q = replace(case.layout), case.q.bfloat16()
            for layer in range(8):
                q = case.q.bfloat16() + chosen.attend(
                    q, k + layer / 8, v - layer / 8, case.cache, layout, prepared, scale=0.1, window=None, softcap=None,
                    rotary=(angles.cos(), angles.sin()),
                )  # fmt: skip
            return q

        expected = replayed(layers)
        assert len(calls) == 16
        monkeypatch.setattr(chunks, "suits", lambda *args: False)
        prepared = chosen.prepare(case.layout)
        other = layers().double()
        assert len(calls) == 16
        assert (expected.double() - other).norm() / other.norm() < 3e-2
