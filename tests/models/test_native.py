"""A pass in one call of C gives what the family's layers give, operation by operation: to the bit, cache included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import FAMILIES, PagedRun, layout_for, load, random_ids, tiny
from tests.models.test_families import VARIANTS
from verifypd.attention.choose import available_backends, backend
from verifypd.kernels import select
from verifypd.kernels.native import NativeKernels
from verifypd.models import loader
from verifypd.models.base import Model
from verifypd.models.llama import Llama
from verifypd.models.native import NativeLayers

pytestmark = pytest.mark.skipif("native" not in available_backends("cpu"), reason="no C compiler")

Checkpoint = Callable[[str], Path]
# a chunk, then beside each other: another chunk, a void row, a decode token and verify spans
Passes = list[list[tuple[int, int, int]]]
PASSES: Passes = [[(0, 0, 37), (2, 0, 5)], [(0, 37, 12), (1, -1, 1), (2, 5, 1)], [(0, 49, 5), (2, 6, 2), (1, 0, 7)]]
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int8": {"quantization": "int8"},
}


def native(folder: Path, **options: Any) -> Model:
    model = load(folder, kernels=select("cpu", "native"), **options)
    assert model.native is not None
    return model


def paged(model: Model, dtype: torch.dtype = torch.float32) -> PagedRun:
    return PagedRun(model, attention=backend("native"), dtype=dtype)


def follow(model: Model, dtype: torch.dtype, passes: Passes, whole: bool) -> list[torch.Tensor]:
    """All that the passes give, over a cache of this dtype; `whole`: in one call of C each."""
    run = paged(model, dtype)
    layers, found = model.native, []
    model.native = layers if whole else None
    try:
        for number, spans in enumerate(passes):
            layout = layout_for(spans, run.block_table, run.cache.block_size)
            ids = torch.tensor([token for _, start, rows in spans for token in random_ids(rows, seed=start + 9)])
            capture = ((), (0,), (0, model.config.layers - 1))[number]
            with torch.inference_mode():
                x, streams = model.forward_capturing(ids, layout, run.attention, run.cache, capture)
            assert len(streams) == len(capture)
            found += [x, *streams]
    finally:
        model.native = layers
    return [*found, run.cache.data]


class Heard:
    """A reader that is no cache: it gets the streams themselves."""

    def __init__(self, layers: tuple[int, ...] = (0,), output: bool = True) -> None:
        self.layers, self.output = layers, output
        self.streams: tuple[torch.Tensor, ...] = ()

    def keep(self, streams: Any, layout: Any) -> None:
        self.streams = tuple(streams)


def same(model: Model, dtype: torch.dtype = torch.float32, passes: Passes = PASSES) -> None:
    ours, theirs = follow(model, dtype, passes, whole=True), follow(model, dtype, passes, whole=False)
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_weight(family: str, weights: str, checkpoint: Checkpoint) -> None:
    same(native(checkpoint(family), **WEIGHTS[weights]))


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_variants(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    same(native(tiny(family, tmp_path, **overrides)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    same(native(checkpoint("qwen3")), dtype)


def test_several_threads(tmp_path: Path) -> None:
    """Rows and heads enough that their norms are shared out too."""
    model, threads = native(tiny("qwen3", tmp_path, num_attention_heads=8, head_dim=128)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        same(model, passes=[[(0, 0, 120)], [(1, 0, 100), (2, 0, 3)], [(2, 3, 1)]])
    finally:
        torch.set_num_threads(threads)


def test_a_reader_gets_the_same_streams(checkpoint: Checkpoint) -> None:
    """The embedding among them, and the output only where it is read."""
    model = native(checkpoint("qwen2"))
    layers, heard = model.native, []
    for whole, output in ((True, True), (False, True), (True, False)):
        model.native, run, reader = layers if whole else None, paged(model), Heard((-1, 0, 1), output)
        for spans in PASSES:
            layout = layout_for(spans, run.block_table, run.cache.block_size)
            ids = torch.tensor([token for _, start, rows in spans for token in random_ids(rows, seed=start + 9)])
            with torch.inference_mode():
                model.forward(ids, layout, run.attention, run.cache, reader=reader)
                assert torch.equal(reader.streams[0], model.embed(ids))
        heard.append(reader.streams)
    assert [len(streams) for streams in heard] == [4, 4, 3]
    for both in zip(*heard, strict=False):
        assert torch.equal(both[0], both[1]) and torch.equal(both[0], both[2])


def test_any_reader_may_read(checkpoint: Checkpoint) -> None:
    model, heard = native(checkpoint("llama")), Heard()
    run = paged(model)
    layout = layout_for([(0, 0, 5)], run.block_table, run.cache.block_size)
    with torch.inference_mode():
        x = model.forward(torch.tensor(random_ids(5)), layout, run.attention, run.cache, reader=heard)
        _, [stream] = model.forward_capturing(torch.tensor(random_ids(5)), layout, run.attention, run.cache, (0,))
    assert torch.equal(heard.streams[1], x) and torch.equal(heard.streams[0], stream)


class OwnAttention(Llama):
    """A family that computes a part of its layer differently and says nothing of C."""

    def mix(self, *arguments: Any) -> torch.Tensor:
        return 0.5 * super().mix(*arguments)


def test_a_family_with_a_layer_of_its_own_runs_its_own(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, ids = native(checkpoint("llama")), random_ids(9)
    monkeypatch.setitem(loader.FAMILIES, "llama", OwnAttention)
    own = load(checkpoint("llama"), kernels=select("cpu", "native"))
    assert isinstance(own, OwnAttention)
    assert own.native is None
    assert not torch.allclose(paged(own).logits([(0, 0, ids)]), paged(ordinary).logits([(0, 0, ids)]), atol=1e-3)


def test_takes_no_pass_that_the_kernels_leave_to_torch(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX tiles, where torch multiplies many rows faster."""
    model = native(checkpoint("llama"))
    assert isinstance(model.kernels, NativeKernels)
    assert isinstance(model.native, NativeLayers)
    monkeypatch.setattr(model.kernels, "_torch_rows", {torch.float32: 8})
    assert model.native.takes(7)
    assert not model.native.takes(8)
    run = paged(model)
    monkeypatch.setattr(model.native, "run", None)  # would fail if it were called
    assert run.logits([(0, 0, random_ids(8))]).isfinite().all()


def test_not_without_its_attention(checkpoint: Checkpoint) -> None:
    """With torch's attention the layers go operation by operation, and come close."""
    model, ids = native(checkpoint("gemma2")), random_ids(20)
    whole, apart = paged(model).logits([(0, 0, ids)]), PagedRun(model, attention=backend("torch")).logits([(0, 0, ids)])
    torch.testing.assert_close(whole, apart, rtol=1e-4, atol=1e-4)


def test_memory_that_is_short_is_an_error(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native(checkpoint("llama"))
    assert model.native is not None
    monkeypatch.setattr(model.native, "_run", lambda *args: 1)
    with pytest.raises(MemoryError, match="working space"):
        paged(model).logits([(0, 0, random_ids(3))])
