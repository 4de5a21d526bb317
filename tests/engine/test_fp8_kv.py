"""The verifier with a cache in fp8: its own text whatever the drafter and the schedule, in half the memory or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.arms import make, prompts, texts
from tests.engine.pairs import noisy_copy, preempt_every
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.errors import ConfigError
from verifypd.kv.fp8 import E4M3

Pair = tuple[Path, Path]
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}


def check(pair: Pair, count: int, drafters: tuple[str, ...]) -> None:
    """Drafts, chunks, shared prefixes and preemption change nothing; e4m3 does."""
    with make(pair, "plain", "none", batch_size=1, prefix_cache=False, prefill_chunk=256, **FP8) as llm:
        alone = texts(llm, count)
        assert llm.engine.verify.runner.cache.data.dtype == E4M3
    for drafter in drafters:
        with make(pair, "unified", drafter, late_tickets=drafter == "both", **FP8) as llm:
            preempt_every(llm, 9)
            assert texts(llm, count) == alone
            assert llm.engine.stats.accepted and llm.engine.stats.preemptions
            draft = llm.engine.drafter
            assert draft is not None and draft.runner.cache.data.dtype == torch.float32
            llm.engine.check()
    with make(pair, "plain", "none") as llm:
        assert texts(llm, count) != alone


def test_drafts_do_not_change_the_text(pair: Pair) -> None:
    check(pair, 6, ("model", "both"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_the_same_in_other_families(family: str, tmp_path: Path) -> None:
    """Soft caps and windows; norms of queries and keys."""
    verifier = tiny(family, tmp_path / "verifier")
    check((verifier, noisy_copy(verifier, tmp_path / "draft", 0.05)), 4, ("model",))


def test_a_shared_prefix_gives_the_same_text(pair: Pair) -> None:
    """What was rounded for one request is what the next one would have rounded itself."""
    long = prompts(6)[5]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with make(pair, "plain", "none", **FP8) as llm:
        first, second = (llm.generate([long], params)[0] for _ in range(2))
        assert llm.engine.stats.prompt_tokens < 2 * len(long)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_twice_the_tokens_of_sixteen_bits(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    held = []
    for kind in ("auto", "fp8"):
        with (
            caplog.at_level("INFO"),
            make(
                pair, "plain", "none", kernels="torch", dtype="float16", kv_memory=100_000, kv_cache_dtype=kind
            ) as llm,
        ):
            held.append(llm.budget.blocks)
            assert llm.engine.verify.runner.cache.nbytes <= 100_000
    assert held[1] // 2 == held[0]
    assert "float16 keys and values" in caplog.text and "fp8 keys and values" in caplog.text


def test_scales_come_from_the_model(pair: Pair) -> None:
    """Each head has its own, and the largest entries of another text still fit."""
    with make(pair, "plain", "none", **FP8) as llm:
        texts(llm, 6)
        cache = llm.engine.verify.runner.cache
    assert cache.scales is not None
    assert cache.scales.shape == (3, 2, 2) and len(cache.scales.unique()) > 1
    largest = cache.data.float().abs().amax((2, 3, 5))
    assert (largest > 32).all() and (largest < 448).all()


@pytest.mark.slow
def test_prompts_are_handed_over_as_they_are_kept(pair: Pair) -> None:
    with make(pair, "pd", **FP8) as llm:
        here = texts(llm, 6)
    with make(pair, "pd", placement="prefill=process", **FP8) as llm:
        assert texts(llm, 6) == here
        assert llm.engine.prefill is not None and llm.engine.prefill.handed_over > 50


@pytest.mark.slow
def test_ranks_scale_the_heads_they_hold(pair: Pair) -> None:
    found, scales = [], []
    for size in (1, 2):
        with make(pair, "unified", tensor_parallel_size=size, **FP8) as llm:
            found.append(texts(llm, 4))
            scales.append(llm.engine.verify.runner.cache.scales)
    assert found[0] == found[1]
    assert torch.equal(scales[0][:, :, :1], scales[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "native"}, "--kv-cache-dtype fp8 needs --attention triton or torch: native does not read"),
        ({"batch_invariant": True}, "--batch-invariant with --kv-cache-dtype fp8 needs CUDA"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype 'fp4' is not known; choose from auto, fp8"),
    ],
)
def test_what_cannot_be_is_refused(pair: Pair, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(pair[0]), draft=None, arch="plain", dtype="float32", device="cpu", **{**FP8, **settings})
