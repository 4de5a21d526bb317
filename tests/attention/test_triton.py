"""The Triton backend equals a dense softmax and the torch backend: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bench.scripts import load

pytest.importorskip("triton")

from tests.attention.test_backends import FIRSTS, MIXED, Case, dense, make_case
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.attention import PassLayout, available_backends, backend, tiling
from verifypd.attention import triton as module
from verifypd.attention.triton import TritonAttention
from verifypd.errors import ConfigError
from verifypd.kernels.torch import TorchKernels
from verifypd.kv.pool import LayerCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "width": 64}


def on_device(case: Case) -> Case:
    """The same case where Triton runs."""
    moved = {
        f.name: getattr(case.layout, f.name).to(DEVICE)
        for f in fields(PassLayout)
        if isinstance(getattr(case.layout, f.name), Tensor)
    }
    cache = LayerCache(case.cache.k.to(DEVICE), case.cache.v.to(DEVICE))
    q, k, v = (x.to(DEVICE) for x in (case.q, case.k, case.v))
    return Case(replace(case.layout, **moved), cache, case.starts, q, k, v, case.history, case.firsts)


def attend(
    case: Case,
    *,
    window: int | None = None,
    softcap: float | None = None,
    fixed: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, module.Prepared]:
    case = on_device(case)
    chosen = TritonAttention(batch_invariant=fixed)
    prepared = chosen.prepare(case.layout)
    q, k, v = (x if dtype is None else x.to(dtype) for x in (case.q, case.k, case.v))
    scale = q.shape[-1] ** -0.5
    out = chosen.attend(q, k, v, case.cache, case.layout, prepared, scale=scale, window=window, softcap=softcap)
    return out.cpu(), prepared


def splits(prepared: module.Prepared) -> list[int]:
    return [cut.splits for cuts in prepared.cuts.values() for cut in cuts]


def check(case: Case, window: int | None = None, softcap: float | None = None, fixed: bool = False) -> list[int]:
    """Equal to the dense softmax in every row that means something; the splits that were used."""
    out, prepared = attend(case, window=window, softcap=softcap, fixed=fixed)
    assert out.isfinite().all()
    for row, expected in dense(case, case.q.shape[-1] ** -0.5, window, softcap).items():
        assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
    return splits(prepared)


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_slots_that_begin_late(window: int | None, fixed: bool) -> None:
    """Spans that begin before, within and behind what their slot holds; with several splits of a context too."""
    check(make_case(MIXED, firsts=FIRSTS, **SMALL), window, fixed=fixed)
    used = check(make_case([(700, 3), (690, 2)], firsts=[513, 691], **SMALL), window, fixed=fixed)
    assert window is not None or max(used) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    [(4, 2, 64), (2, 2, 96), (6, 1, 128), (2, 1, 256), (40, 1, 20), (7, 1, 80)],
)
def test_heads(heads: int, kv_heads: int, width: int) -> None:
    check(make_case([(70, 4), (0, 18), (3, 1), (-1, 2)], heads, kv_heads, width))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(None, 50.0), (1, None), (7, 5.0), (40, None), (1000, None)])
def test_mixed_spans(window: int | None, softcap: float | None) -> None:
    check(make_case(MIXED, **SMALL, slack=9), window, softcap)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_block_sizes(block_size: int) -> None:
    check(make_case([(100, 5), (-2, 5), (64, 17)], **SMALL, block_size=block_size, slack=2), window=30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, 20.0)])
def test_narrow_types_equal_the_torch_backend(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    spans = [(100, 5), (0, 1), (20, 18), (63, 1), (300, 40)]  # the last goes through blocks that need no mask
    case = make_case(spans, **SMALL, dtype=dtype)
    out, _ = attend(case, window=window, softcap=softcap, dtype=dtype)
    assert out.dtype is dtype
    for row, expected in dense(case, 64**-0.5, window, softcap).items():
        assert_close(out[row].float(), expected, rtol=1e-2, atol=1e-2)
    twin = on_device(make_case(spans, **SMALL, dtype=dtype))
    torch_backend = backend("torch", DEVICE)
    q, k, v = (x.to(dtype) for x in (twin.q, twin.k, twin.v))
    prepared = torch_backend.prepare(twin.layout)
    reference = torch_backend.attend(
        q, k, v, twin.cache, twin.layout, prepared, scale=64**-0.5, window=window, softcap=softcap
    )
    assert_close(out, reference.cpu(), rtol=2e-2, atol=1e-2)


def test_a_wide_cache_of_narrow_numbers() -> None:
    check(make_case([(100, 5), (0, 1), (20, 18)], **SMALL, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (110, 5.0)])
def test_splits_are_merged(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processors", lambda device: 10)
    monkeypatch.setattr(tiling, "LEAST_SPLIT", 8)
    monkeypatch.setattr(tiling, "LEAST_CHUNK_SPLIT", 8)
    assert (
        max(check(make_case([(150, 3)], heads=2, kv_heads=1, width=64), window, softcap)) > 8
    )  # several rounds of merging, empty splits
    assert (
        min(check(make_case([(100, 3), (0, 1), (40, 17), (-2, 3)], heads=2, kv_heads=1, width=64), window, softcap)) > 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 110])
def test_spans_that_fill_the_device(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of spans begin in the order of their contexts, and long contexts are shared out; slots may begin late."""
    monkeypatch.setattr(module, "processors", lambda device: 2)
    monkeypatch.setattr(tiling, "LEAST_SPLIT", 8)
    spans = [(20, 3), (300, 3), (5, 1), (-2, 3), (60, 2), (150, 3), (-1, 3)]
    for firsts in (None, [0, 270, 0, 0, 61, 9, 0]):
        case = make_case(spans, **SMALL, firsts=firsts)
        _, prepared = attend(case, window=window)
        assert all(cut.sorted_tiles for cuts in prepared.cuts.values() for cut in cuts)
        assert max(check(case, window)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
def test_partial_results_are_held_some_heads_at_a_time(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where splits are fixed, the workspace holds a range of heads; where they are not, there are fewer splits."""
    monkeypatch.setattr(tiling, "SPLIT_TOKENS", 64)
    case = make_case([(100, 20), (90, 5), (80, 17)], **SMALL)
    used = check(case, fixed=fixed)
    monkeypatch.setattr(tiling, "WORKSPACE_ELEMENTS", 1)
    assert check(case, fixed=fixed) == (used if fixed else [1, 1])


def test_keys_and_values_are_written() -> None:
    case = on_device(make_case(MIXED, **SMALL))
    before = case.cache.k.clone()
    chosen = TritonAttention()
    chosen.attend(
        case.q,
        case.k,
        case.v,
        case.cache,
        case.layout,
        chosen.prepare(case.layout),
        scale=0.1,
        window=None,
        softcap=None,
    )
    real = case.layout.write_index >= case.layout.block_size  # void rows went to the null block
    at = case.layout.write_index[real]
    assert int(real.sum()) == case.layout.rows - 6
    assert torch.equal(case.cache.k.flatten(0, 1)[at], case.k[real])
    assert torch.equal(case.cache.v.flatten(0, 1)[at], case.v[real])
    untouched = torch.ones(len(before.flatten(0, 1)), dtype=torch.bool, device=before.device)
    untouched[case.layout.write_index] = False
    assert torch.equal(case.cache.k.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


def test_a_prepared_launch_follows_the_device() -> None:
    """What a graph replays: the launch of one moment, over the starts and slots of another."""
    first, later = make_case([(300, 5), (10, 5), (0, 40)], **SMALL), make_case([(7, 5), (302, 3), (60, 42)], **SMALL)
    assert first.layout.block_table.shape == later.layout.block_table.shape
    bounds = replace(
        on_device(first).layout, span_rows=(5, 5, 42), contexts=(305, 305, 305), max_context=305
    )  # the most that either holds
    prepared = (chosen := TritonAttention()).prepare(bounds)
    case = on_device(later)
    layout = replace(case.layout, span_rows=bounds.span_rows, contexts=bounds.contexts)
    out = chosen.attend(
        case.q, case.k, case.v, case.cache, layout, prepared, scale=64**-0.5, window=None, softcap=None
    ).cpu()
    for row, expected in dense(later, 64**-0.5, None, None).items():
        assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "width", "half"), [(4, 2, 64, 32), (6, 1, 80, 40), (3, 3, 96, 20)])
def test_rotating_on_the_way(heads: int, kv_heads: int, width: int, half: int) -> None:
    """Rotation and writing in one launch give what they give one after the other."""
    case, twin = (on_device(make_case([(70, 4), (0, 18), (-1, 2)], heads, kv_heads, width)) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    angles = torch.randn(200, half, generator=generator).to(DEVICE)
    rotary = (angles.cos(), angles.sin())
    TorchKernels().rotate_(twin.q, twin.k, twin.layout.positions, *rotary)
    found = []
    for one, given in ((case, rotary), (twin, None)):
        chosen = TritonAttention()
        prepared = chosen.prepare(one.layout)
        q, k, v = one.q, one.k, one.v
        found.append(
            chosen.attend(q, k, v, one.cache, one.layout, prepared, scale=0.1, window=None, softcap=None, rotary=given)
        )
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert_close(case.cache.k[1:], twin.cache.k[1:])  # void rows meet in the null block
    assert torch.equal(case.cache.v[1:], twin.cache.v[1:])


def test_where_it_is_offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert available_backends("cuda") == ["triton", "torch"]
    assert backend("triton", DEVICE).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="does not run on cpu here"):
        backend("triton", "cpu")
    with pytest.raises(ConfigError, match="--sampler triton does not run on cpu here"):
        LLM(str(tiny("llama", tmp_path / "model")), device="cpu", sampler="triton")


@pytest.mark.slow
def test_the_engine_writes_the_same_text(tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier")
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "kv_memory": "16MB", "max_model_len": 100}
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(10, 28))]
    texts = []
    for kernels in ("torch", "triton"):
        with LLM(
            str(verifier),
            draft="ngram",
            arch="unified",
            controller="fixed",
            max_draft=3,
            measure_costs=False,
            device=DEVICE,
            attention=kernels,
            sampler=kernels,
            **options,
        ) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_benchmark_checks_and_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load("attention")
    case = {"some": [(2, 2, 40), (1, 17, 3)]}
    device = torch.device(DEVICE)
    assert all(row["ok"] for row in benchmark.check(benchmark.TINY_SHAPES, case, device))
    monkeypatch.setattr(module, "_scales", lambda scale, softcap: (scale, 0.0))
    assert not any(row["ok"] for row in benchmark.check(benchmark.TINY_SHAPES, case, device))
