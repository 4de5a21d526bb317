"""FlashInfer as a backend: what it refuses and what it is told, anywhere; that it is right, on a GPU that has it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.attention.test_backends import MIXED, Case, dense, make_case
from tests.attention.test_triton import on_device
from tests.models.checkpoints import tiny
from verifypd import LLM
from verifypd.attention import available_backends, backend, choose
from verifypd.attention.flashinfer import STREAM_BYTES, FlashInferAttention, check_model, spans_of
from verifypd.bench.exact import teacher_forced, write_pair
from verifypd.config import EngineConfig
from verifypd.engine.build import check_flashinfer, pick_graphs
from verifypd.errors import ConfigError
from verifypd.kernels.torch import TorchKernels
from verifypd.models.hub import resolve

CUDA = torch.device("cuda")


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_it_needs_cuda(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flashinfer does not run on cpu here: it needs CUDA, Triton and the package"):
        backend("flashinfer", "cpu")
    with pytest.raises(ConfigError, match="it needs CUDA"):
        LLM(str(tiny("llama", tmp_path / "model")), device="cpu", attention="flashinfer")


def test_it_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'verifypd\[flashinfer\]'\); use one of: auto, triton, torch"):
        backend("flashinfer", "cuda")


def test_it_is_never_chosen_by_itself() -> None:
    assert "flashinfer" not in available_backends("cuda") + available_backends("cpu")


def test_it_refuses_what_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match="--batch-invariant needs --attention triton"):
        backend("flashinfer", "cuda", batch_invariant=True)
    config = EngineConfig(model="smollm2", attention="flashinfer")
    for graphs in ("start", "lazy"):
        with pytest.raises(ConfigError, match=f"--graphs {graphs} needs --attention triton"):
            pick_graphs(replace(config, graphs=graphs), CUDA, "flashinfer")
    assert [pick_graphs(replace(config, graphs=g), CUDA, "flashinfer") for g in ("auto", "off")] == ["off", "off"]


def test_it_refuses_models_it_has_no_kernel_for() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for width in (64, 128, 256):
            check_model(dtype, width)
    with pytest.raises(ConfigError, match="bfloat16 or float16, not in float32; use --dtype bfloat16"):
        check_model(torch.float32, 128)
    with pytest.raises(ConfigError, match="this model's have 96; use --attention triton"):
        check_model(torch.bfloat16, 96)


def test_memory_is_set_aside_for_every_stream(tmp_path: Path) -> None:
    source = resolve(write_pair(tmp_path, head_dim=64)[0])
    config = EngineConfig(model=source.name, attention="flashinfer")
    asides = [
        check_flashinfer(replace(config, placement=where), torch.bfloat16, [source])
        for where in ("fused", "decode=stream")
    ]
    assert asides == [STREAM_BYTES, 2 * STREAM_BYTES]
    with pytest.raises(ConfigError, match="not in float32"):
        check_flashinfer(config, torch.float32, [source])
    narrow = resolve(write_pair(tmp_path / "narrow")[0])
    with pytest.raises(ConfigError, match="this model's have 16"):
        check_flashinfer(config, torch.bfloat16, [source, narrow])


# --- what it is told --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [0, 40])
def test_runs_name_the_keys_of_every_row(slack: int) -> None:
    """Read as FlashInfer reads them, the runs of a pass give each row its own context, whatever the host's bounds."""
    case = make_case(MIXED, slack=slack)
    layout = case.layout
    case.cache.k.view(-1, *case.k.shape[1:])[layout.write_index] = case.k
    spans = spans_of(layout, case.starts)
    rows, blocks = spans.rows.tolist(), spans.blocks.tolist()
    assert rows[-1] == layout.rows and blocks[-1] == len(spans.listed)
    assert spans.listed.dtype == spans.rows.dtype == spans.blocks.dtype == spans.last.dtype == torch.int32
    found: dict[int, Tensor] = {}
    for run, last in enumerate(spans.last.tolist()):
        assert 1 <= last <= layout.block_size
        keys = case.cache.k[spans.listed[blocks[run] : blocks[run + 1]].long()].flatten(0, 1)
        keys = keys[: len(keys) - layout.block_size + last]
        count = rows[run + 1] - rows[run]
        for j in range(count):
            found[rows[run] + j] = keys[: max(len(keys) - count + j + 1, 0)]
    row = 0
    for start, count, (history, _) in zip(case.starts, layout.span_rows, case.history, strict=True):
        first = row + max(-start, 0)
        for each in range(first, row + count):  # void rows mean nothing
            assert torch.equal(found[each], torch.cat((history, case.k[first : each + 1])))
        row += count


def test_spans_without_rows_are_left_out() -> None:
    layout = make_case([(5, 2), (70, 3), (20, 1)]).layout
    spans = spans_of(replace(layout, span_rows=(2, 0, 1)), [5, 70, 20])
    assert spans.rows.tolist() == [0, 2, 3]
    assert spans.blocks.tolist() == [0, 1, 3]
    assert spans.last.tolist() == [7, 5]


# --- whether it is right ----------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs a CUDA device and FlashInfer"
)
RAGGED = [(100 * n, n) for n in range(1, 10)]  # one to nine rows
CHUNKS = [(0, 70), (300, 129), (17, 5)]
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # ‖out − ref‖ / ‖ref‖


def attend(case: Case, window: int | None = None, softcap: float | None = None) -> tuple[Tensor, Case]:
    case = on_device(case)
    dtype = case.cache.k.dtype
    chosen = FlashInferAttention()
    fused = torch.cat((case.q, case.k, case.v), 1).to(dtype)  # views, as a model has them
    q, k, v = fused.split([case.q.shape[1], case.k.shape[1], case.v.shape[1]], 1)
    prepared = chosen.prepare(case.layout)
    scale = q.shape[-1] ** -0.5
    for _ in range(2):  # the second layer of a kind has its plan
        out = chosen.attend(q, k, v, case.cache, case.layout, prepared, scale=scale, window=window, softcap=softcap)
    return out.float().cpu(), case


def check(case: Case, window: int | None = None, softcap: float | None = None) -> None:
    out, moved = attend(case, window, softcap)
    assert out.isfinite().all()
    expected = dense(case, case.q.shape[-1] ** -0.5, window, softcap)
    right, found = torch.stack(list(expected.values())), out[list(expected)]
    error = float((found - right).norm() / right.norm())
    assert error <= BOUND[moved.cache.k.dtype], error
    at = moved.layout.write_index[moved.layout.write_index >= moved.layout.block_size]
    rows = moved.layout.write_index >= moved.layout.block_size
    assert torch.equal(moved.cache.k.flatten(0, 1)[at].float(), moved.k[rows])
    assert torch.equal(moved.cache.v.flatten(0, 1)[at].float(), moved.v[rows])


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("width", [128, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (8, 8)])
@pytest.mark.parametrize("spans", [RAGGED, CHUNKS, MIXED], ids=["ragged", "chunks", "mixed"])
def test_equal_to_dense_attention(spans: list[tuple[int, int]], heads: int, kv_heads: int, width: int) -> None:
    check(make_case(spans, heads, kv_heads, width, dtype=torch.bfloat16, slack=9))


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (40, None), (None, 5.0), (40, 5.0)])
def test_windows_and_caps(window: int | None, softcap: float | None) -> None:
    check(make_case(MIXED, 8, 2, 128, dtype=torch.bfloat16, slack=9), window, softcap)


@pytest.mark.gpu
@on_a_gpu
def test_float16() -> None:
    check(make_case(MIXED, 8, 2, 128, dtype=torch.float16))


@pytest.mark.gpu
@on_a_gpu
def test_plans_follow_the_pass() -> None:
    """One backend over several passes and kinds of layers, as an engine has it."""
    chosen = FlashInferAttention()
    for spans, heads in ((RAGGED, 4), (MIXED, 8), (CHUNKS, 4), (RAGGED, 8)):
        case = make_case(spans, heads, 2, 128, dtype=torch.bfloat16)
        moved = on_device(case)
        q, k, v = (x.bfloat16() for x in (moved.q, moved.k, moved.v))
        prepared = chosen.prepare(moved.layout)
        out = chosen.attend(q, k, v, moved.cache, moved.layout, prepared, scale=0.1, window=None, softcap=None)
        expected = dense(case, 0.1, None, None)
        right, found = torch.stack(list(expected.values())), out.float().cpu()[list(expected)]
        assert float((found - right).norm() / right.norm()) <= BOUND[torch.bfloat16]


@pytest.mark.gpu
@on_a_gpu
def test_rotating_on_the_way() -> None:
    case, twin = (on_device(make_case([(70, 4), (0, 18), (-1, 2)], 8, 2, 128, dtype=torch.bfloat16)) for _ in range(2))
    angles = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)).cuda()
    rotary = (angles.cos(), angles.sin())
    TorchKernels().rotate_(twin.q, twin.k, twin.layout.positions, *rotary)
    chosen, found = FlashInferAttention(), []
    for one, given in ((case, rotary), (twin, None)):
        q, k, v = (x.bfloat16() for x in (one.q, one.k, one.v))
        prepared = chosen.prepare(one.layout)
        options: dict[str, Any] = {"scale": 0.1, "window": None, "softcap": None, "rotary": given}
        found.append(chosen.attend(q, k, v, one.cache, one.layout, prepared, **options).float())
    error = float((found[0] - found[1])[:-2].norm() / found[1][:-2].norm())  # the last two rows: one void, one real
    assert error <= 2 * BOUND[torch.bfloat16]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("placement", ["fused", "stream"])
def test_the_engine_with_it(placement: str, tmp_path: Path) -> None:
    """Greedy texts are the verifier's own, within what bfloat16 moves; drafts stand."""
    pair = write_pair(tmp_path, head_dim=64)
    found = teacher_forced(pair, device="cuda", attention="flashinfer", placement=placement)
    assert found["passed"], found
