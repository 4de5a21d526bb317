"""Every family on a CUDA device: the CPU's logits, and a forward pass that a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.models.checkpoints import PagedRun, layout_for, random_ids
from verifypd.kernels.torch import TorchKernels
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.loader import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 12,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "attn_logit_softcapping": 50.0,
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def pair(kind: str) -> tuple[PagedRun, PagedRun]:
    """The same dummy model on the CPU and on the GPU."""
    source = ModelSource(kind, ModelConfig.from_dict({**SHAPE, "model_type": kind}))
    options: dict[str, Any] = {"dtype": torch.float32, "kernels": TorchKernels(), "load_format": "dummy"}
    host, device = (load_model(source, device=d, **options) for d in ("cpu", "cuda"))
    for ours, theirs in zip(tensors(device), tensors(host), strict=True):
        theirs.mul_(8)  # logits of order one
        ours.copy_(theirs)
    return PagedRun(host), PagedRun(device)


def tensors(model: Any) -> list[torch.Tensor]:
    matrices = [getattr(layer, name) for layer in model.layers for name in ("qkv", "output", "gate_up", "down")]
    return [*matrices, model.embedding] if model.config.tie_embeddings else [*matrices, model.embedding, model.head]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
def test_logits_equal_the_cpus(kind: str) -> None:
    host, device = pair(kind)
    ids = random_ids(60)
    for spans in ([(0, 0, ids[:50]), (2, 0, ids[:7])], [(2, 7, ids[7:8]), (0, 50, ids[50:])]):
        assert (device.logits(spans).cpu() - host.logits(spans)).abs().max() <= 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_forward_in_a_graph(kind: str) -> None:
    _, run = pair(kind)
    ids = random_ids(40)
    run.logits([(0, 0, ids[:30])])
    eager = run.logits([(0, 30, ids[30:35])])
    layout = layout_for([(0, 30, 5)], run.block_table, run.cache.block_size)
    tokens = torch.zeros(5, dtype=torch.int64, device="cuda")
    prepared = run.attention.prepare(layout)
    with torch.inference_mode():
        run.model.logits(run.model.forward(tokens, layout, run.attention, run.cache, prepared))  # fills lazy tables
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run.model.logits(run.model.forward(tokens, layout, run.attention, run.cache, prepared))
        tokens.copy_(torch.tensor(ids[30:35]))
        graph.replay()
    torch.testing.assert_close(logits, eager, rtol=1e-4, atol=1e-4)
