"""Logits of every family equal transformers' in float32, however the sequence is cut into passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import FAMILIES, PagedRun, load, random_ids, reference_logits, tiny

LENGTH = 60  # five windows of the windowed families
Checkpoint = Callable[[str], Path]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass(family: str, checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint(family), random_ids(LENGTH)
    close(PagedRun(load(folder)).logits([(0, 0, ids)]), reference_logits(folder, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_then_decode_then_verify_span(family: str, checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint(family), random_ids(LENGTH, seed=1)
    run = PagedRun(load(folder))
    cuts = [0, 17, 18, 37, 50, 51, 52, 53, 58, LENGTH]
    ours = torch.cat([run.logits([(2, a, ids[a:b])]) for a, b in zip(cuts, cuts[1:], strict=False)])
    close(ours, reference_logits(folder, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_of_mixed_spans(family: str, checkpoint: Checkpoint) -> None:
    """A first chunk, a decode token, a verify span and a late chunk in one pass; slots out of order."""
    folder = checkpoint(family)
    run = PagedRun(load(folder))
    texts = [random_ids(n, seed=n) for n in (20, 41, 33, 57)]
    done = [0, 40, 28, 30]  # tokens already in the cache
    run.logits([(slot, 0, texts[slot][:n]) for slot, n in enumerate(done) if n])
    order = (3, 1, 0, 2)
    ours = run.logits([(slot, done[slot], texts[slot][done[slot] :]) for slot in order])
    close(ours, torch.cat([reference_logits(folder, texts[slot])[done[slot] :] for slot in order]))


def test_rejected_drafts_are_overwritten(checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint("llama"), random_ids(30)
    run = PagedRun(load(folder))
    run.logits([(0, 0, ids[:20])])
    run.logits([(0, 20, [5, 6, 7, 8])])  # a draft that does not stand
    close(run.logits([(0, 20, ids[20:])]), reference_logits(folder, ids)[20:])


def test_void_rows_harm_nobody(checkpoint: Checkpoint) -> None:
    folder, ids = checkpoint("qwen3"), random_ids(10)
    run = PagedRun(load(folder))
    logits = run.logits([(1, -1, [3]), (0, 0, ids)])
    assert logits.isfinite().all()
    close(logits[1:], reference_logits(folder, ids))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "use_sliding_window": False,
            "num_key_value_heads": 1,
        },
    ),
    ("mistral", {"sliding_window": None}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0}),
    (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_variants(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder, ids = tiny(family, tmp_path, **overrides), random_ids(LENGTH)
    run = PagedRun(load(folder))
    ours = torch.cat([run.logits([(0, 0, ids[:-3])]), run.logits([(0, LENGTH - 3, ids[-3:])])])
    close(ours, reference_logits(folder, ids))


def test_captured_residual_streams(checkpoint: Checkpoint) -> None:
    """What layers 0 and 1 hand on, without a change to the result."""
    from tests.models.checkpoints import _reference, layout_for

    folder, ids = checkpoint("gemma2"), random_ids(20)
    run = PagedRun(load(folder))
    layout = layout_for([(0, 0, len(ids))], run.block_table, run.cache.block_size)
    with torch.inference_mode():
        hidden, streams = run.model.forward_capturing(torch.tensor(ids), layout, run.attention, run.cache, (0, 1))
        theirs = _reference(folder)(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    assert len(streams) == 2
    torch.testing.assert_close(streams[0], theirs[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(streams[1], theirs[2][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, run.hidden([(0, 0, ids)]))


def test_rope_tables_cover_the_length_asked_for(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("llama"), max_model_len=512)
    assert model.max_model_len == 512
    assert model.layers[0].cos.shape[0] >= 512
