"""The engine's draft head computes what the head with gradients computes, paged and in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.heads import head_for, make_head
from tests.models.checkpoints import FAMILIES, VOCAB, tiny
from verifypd.attention.base import PassLayout
from verifypd.attention.choose import available_backends, backend
from verifypd.distil.dense import read_features
from verifypd.distil.head import shape_for
from verifypd.errors import ConfigError, ModelError
from verifypd.kernels import select
from verifypd.kernels.weights import Int8Panels, Int8Weight, Quantization
from verifypd.kv.pool import FeatureCache, KVCache
from verifypd.models.base import Model
from verifypd.models.head import rows_of
from verifypd.models.head_loader import load_head
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables
from verifypd.runtime.runner import HeadRunner, ModelRunner

BLOCK = 8
CPU = torch.device("cpu")


def verifier_of(folder: Path, kernels: str = "torch", quantization: Quantization | None = None) -> Model:
    return load_model(
        resolve(str(folder)),
        dtype=torch.float32,
        device=CPU,
        kernels=select(CPU, kernels),
        quantization=quantization,
        max_model_len=128,
    )


def spans(rows: list[int], starts: list[int], tables: BlockTables) -> PassLayout:
    contexts = [start + count for start, count in zip(starts, rows, strict=True)]
    return PassLayout.build(
        rows, contexts, torch.arange(len(rows)), torch.tensor(starts), tables.data, tables.block_size
    )


@pytest.mark.parametrize("kernels", available_backends("cpu"))
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_paged_drafting_is_unrolling(tmp_path: Path, family: str, kernels: str) -> None:
    """Features kept pass by pass, rows caught up in pieces, then a draft: the streams that training unrolled."""
    folder = tiny(family, tmp_path / "verifier")
    model = verifier_of(folder, kernels)
    draft = load_head(resolve(str(head_for(folder, tmp_path / "head", layers=2, window=10, taught=False))), model)
    length, depth = 30, 4
    ids = torch.randint(3, VOCAB, (2, length + depth), generator=torch.Generator().manual_seed(1))

    trained = make_head(shape_for(model.config, 2, 48, None, 300, 10)).to(torch.bfloat16).float()
    hidden, captured = read_features(verifier_of(folder), ids, draft.feature_layers)
    embedded = model.embed(ids.reshape(-1)).view(hidden.shape)
    streams = list(trained.unroll(embedded, trained.project(captured, hidden), depth))

    attention = backend(kernels)
    config = model.config
    tables, own = BlockTables(2, 48, BLOCK, CPU), BlockTables(2, 48, BLOCK, CPU)
    for slot in range(2):
        tables.write(slot, range(1 + slot * 6, 7 + slot * 6))
        own.write(slot, range(12 - slot * 6, 6 - slot * 6, -1))  # the head's blocks are other ones
    tables.flush()
    own.flush()
    cache = KVCache(config.layers, 13, BLOCK, config.kv_heads, config.head_dim, torch.float32, CPU)
    runner = ModelRunner(model, attention, cache, tables)
    head_cache = KVCache(2, 13, BLOCK, draft.config.kv_heads, draft.config.head_dim, torch.float32, CPU)
    features = FeatureCache(
        draft.feature_layers,
        True,
        draft.project,
        13,
        BLOCK,
        draft.feature_width,
        torch.float32,
        draft.kernels,
        own.data,
    )
    head = HeadRunner(draft, attention, head_cache, own, features)
    for start, stop in ((0, 7), (7, 24), (24, length - 1)):  # the verifier has not read the last confirmed token
        layout = spans([stop - start] * 2, [start] * 2, tables)
        runner.forward(ids[:, start:stop].reshape(-1), layout, reader=features)
    for start, stop in ((0, 11), (9, 20), (20, length)):  # reading a row again changes nothing
        layout = spans([stop - start] * 2, [start] * 2, own)
        normed, stream = head.catch_up(ids[:, start:stop].reshape(-1), layout)
    rows = torch.tensor([length - 21, 2 * (length - 20) - 1])
    normed, stream = normed[rows], stream[rows]
    for d in range(depth):
        at = length - 1 + d
        torch.testing.assert_close(stream, streams[d][:, at], atol=2e-4, rtol=2e-3)
        assert draft.vocab_map is not None
        rows_of_head = model.kernels.embed(draft.vocab_map, model.head)
        torch.testing.assert_close(
            head.logits(normed), trained.logits(streams[d][:, at], rows_of_head), atol=2e-3, rtol=2e-3
        )
        if d + 1 < depth:
            normed, stream = head.draft(ids[:, at + 1], stream, spans([1, 1], [at + 1] * 2, own))


@pytest.mark.parametrize("kernels", available_backends("cpu"))
@torch.inference_mode()
def test_int8_rows_are_the_verifiers(tmp_path: Path, kernels: str) -> None:
    folder = tiny("llama3", tmp_path / "verifier")
    model = verifier_of(folder, kernels, quantization="int8")
    draft = load_head(resolve(str(head_for(folder, tmp_path / "head", taught=False))), model, quantization="int8")
    assert isinstance(model.head, Int8Weight | Int8Panels) and isinstance(draft.head, Int8Weight | Int8Panels)
    assert draft.vocab_map is not None
    assert torch.equal(draft.head.dequantize(), model.head.rows(draft.vocab_map))
    for count in (32, 33):  # of which native kernels on x86 make panels, and not
        ids = draft.vocab_map.flip(0)[:count]
        part = rows_of(model.head, ids, model.kernels)
        assert type(part) is (type(model.head) if count == 32 else Int8Weight)
        assert isinstance(part, Int8Weight | Int8Panels) and torch.equal(part.dequantize(), model.head.rows(ids))
    x = torch.randn(3, 64)
    atol = 2e-4 if kernels == "native" else 1e-5  # panels round x, rows do not
    torch.testing.assert_close(draft.logits(x), model.logits(x)[:, draft.vocab_map], atol=atol, rtol=1.3e-6)


@pytest.mark.parametrize("kernels", available_backends("cpu"))
@torch.inference_mode()
def test_an_int8_head_beside_a_verifier_that_is_not(tmp_path: Path, kernels: str) -> None:
    folder = tiny("llama3", tmp_path / "verifier")
    model = verifier_of(folder, kernels)
    source = resolve(str(head_for(folder, tmp_path / "head", taught=False)))
    before = model.head
    exact, packed = load_head(source, model), load_head(source, model, quantization="int8")
    layer = packed.layers[0]
    matrices = [packed.head, packed._features, packed._fc, layer.qkv, layer.output, layer.gate_up, layer.down]
    assert all(isinstance(weight, Int8Weight | Int8Panels) for weight in matrices)
    assert packed.embedding is model.embedding and model.head is before, "the verifier is as it was"
    assert not isinstance(before, Int8Weight | Int8Panels)
    vectors = exact.weight_bytes - 4 * sum(weight.shape.numel() for weight in matrices)  # norms
    assert packed.weight_bytes == vectors + sum(weight.nbytes for weight in matrices)

    rows, config = 20, exact.config
    ids = torch.randint(3, VOCAB, (rows,), generator=torch.Generator().manual_seed(1))
    streams = torch.randn(exact.streams, rows, 64, generator=torch.Generator().manual_seed(2)).unbind(0)
    tables = BlockTables(1, 48, BLOCK, CPU)
    tables.write(0, range(1, 7))
    tables.flush()
    logits = []
    for head in (exact, packed):
        cache = KVCache(config.layers, 7, BLOCK, config.kv_heads, config.head_dim, torch.float32, CPU)
        normed, _ = head.read(ids, head.project(streams), spans([rows], [0], tables), backend(kernels), cache)
        logits.append(head.logits(normed))
    assert 0 < (logits[1] - logits[0]).norm() < 0.02 * logits[0].norm()


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "verifier")
    other = tiny("llama", tmp_path / "other", hidden_size=32)
    head = resolve(str(head_for(folder, tmp_path / "head", taught=False)))
    with pytest.raises(ModelError, match="verifypd distil"):
        load_head(head, verifier_of(other))
    with pytest.raises(ConfigError, match="--draft"):
        load_model(head, dtype=torch.float32, device=CPU, kernels=select(CPU, "torch"))
