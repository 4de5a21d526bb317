"""Attention of few rows in CUDA C++: equal to a dense softmax on a GPU; both sides agree on their arguments."""

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
from tests.kernels.structures import in_python, in_source
from verifypd.attention import arguments, short, tiling
from verifypd.attention.triton import TritonAttention

ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of a row's result, against its norm
MULTI = {"heads": 6, "kv_heads": 6, "width": 128}
GROUPED = {"heads": 32, "kv_heads": 4, "width": 64}
CONTEXTS = [1, 5, 17, 63, 64, 65, 300, 512, 2000, 4096]


def test_arguments_are_the_kernels() -> None:
    """Same fields in the same order, with types of the same size."""
    assert in_source(arguments.SHARED_SOURCE) == in_python(arguments.Arguments)


@pytest.mark.parametrize("width", short.WIDTHS)
def test_blocks_fit(width: int) -> None:
    """Two steps of a warp or more are under way; its sums fit where its keys and values were."""
    own = short.ahead(width) * short.KEYS * width * 4
    assert short.ahead(width) >= 2
    assert own * short.WARPS == short.UNDER_WAY
    assert 16 * (width + 8) * 4 <= own


def test_not_on_a_cpu() -> None:
    case = make_case([(5, 1)], **GROUPED, dtype=torch.bfloat16)
    cut = tiling.tiling(
        spans=1, rows=1, pass_rows=1, context=6, heads=32, kv_heads=4, width=64, itemsize=2, window=None,
        processors=132, shared_memory=1 << 17,
    )  # fmt: skip
    assert cut.few
    assert not short.suits(case.q.bfloat16(), case.cache, case.layout, cut, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not short._available(CUDA), reason="needs a Hopper GPU and NVRTC")
class TestOnAGpu(AgainstDense):
    """Against float64."""

    kernel = short
    error = ERROR

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("shape", "rows"), [(MULTI, 1), (MULTI, 5), (MULTI, 16), (GROUPED, 1), (GROUPED, 2)])
    def test_contexts(self, shape: dict[str, int], rows: int, dtype: torch.dtype, calls: list[int]) -> None:
        for context in CONTEXTS:
            self.check(make_case([(context - 1, rows)], **shape, dtype=dtype))
        assert len(calls) == 2 * len(CONTEXTS)
        assert min(calls) == 1 and max(calls) > 8

    @pytest.mark.parametrize("spans", [3, 8, 11])
    @pytest.mark.parametrize(("shape", "most"), [(MULTI, 5), (GROUPED, 2)])
    def test_spans_of_all_lengths(self, shape: dict[str, int], most: int, spans: int, calls: list[int]) -> None:
        """Void rows among them, and one context that is long beside the others."""
        each = [(CONTEXTS[r % 7] - 3, 1 + r % most) for r in range(spans - 1)]
        self.check(make_case([*each, (3000, most)], **shape, dtype=torch.bfloat16))
        assert len(calls) == 2

    @pytest.mark.parametrize("block_size", [1, 3, 64])
    @pytest.mark.parametrize("heads", [2, 6, 14, 32])
    def test_blocks_of_the_pool_and_shared_heads(self, heads: int, block_size: int, calls: list[int]) -> None:
        spans = [(100, 1), (-1, 1), (700, 1), (64, 1)]
        self.check(make_case(spans, heads, 2, 128, block_size, dtype=torch.bfloat16, slack=2))
        assert len(calls) == 2

    def test_short_spans_beside_a_chunk(self, calls: list[int]) -> None:
        self.check(make_case([(200, 3), (40, 60), (0, 1), (90, 5)], **MULTI, dtype=torch.bfloat16))
        assert len(calls) == 2

    @pytest.mark.parametrize("shape", [MULTI, GROUPED])
    def test_layers_in_a_graph(self, shape: dict[str, int], calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels that start early wait for what they read, and counters are set back: the same again and again, and as
        Triton's. Each layer writes other keys and values."""
        case = on_device(make_case([(500, 1), (30, 2), (2000, 1), (-1, 2)], **shape, dtype=torch.bfloat16))
        chosen = TritonAttention()
        prepared = chosen.prepare(case.layout)
        angles = torch.randn(2100, shape["width"] // 2, device=CUDA)
        k, v = case.k.bfloat16(), case.v.bfloat16()

        def layers() -> Tensor:
            layout, q = replace(case.layout), case.q.bfloat16()
            for layer in range(1, 9):
                q = chosen.attend(
                    q, k * layer, v * layer, case.cache, layout, prepared, scale=0.1, window=None, softcap=None,
                    rotary=(angles.cos(), angles.sin()),
                )  # fmt: skip
            return q

        expected = replayed(layers)
        assert len(calls) == 16
        monkeypatch.setattr(short, "suits", lambda *args: False)
        prepared = chosen.prepare(case.layout)
        other = layers().double()
        assert len(calls) == 16
        assert (expected.double() - other).norm() / other.norm() < 3e-2
