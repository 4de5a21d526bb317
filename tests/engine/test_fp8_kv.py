"""The verifier with a cache in fp8: its own text whatever the drafter and the schedule, in half the memory or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.arms import make, prompts, texts
from tests.engine.pairs import noisy_copy, preempt_every
from tests.models.checkpoints import load, tiny
from verifypd import LLM, SamplingParams
from verifypd.attention import PassLayout, backend
from verifypd.errors import ConfigError
from verifypd.kernels import build, weights
from verifypd.kernels.choose import select
from verifypd.runtime.inputs import BlockTables
from verifypd.runtime.runner import ModelRunner, cache_of

Pair = tuple[Path, Path]
CPU = torch.device("cpu")
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "batch_invariant": build.library() is not None}


def check(pair: Pair, count: int, drafters: tuple[str, ...]) -> None:
    """Drafts, chunks, shared prefixes and preemption change nothing; e4m3 does."""
    with make(pair, "plain", "none", batch_size=1, prefix_cache=False, prefill_chunk=256, **FP8) as llm:
        alone = texts(llm, count)
        assert llm.engine.verify.runner.cache.data.dtype == weights.FP8
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


@pytest.mark.skipif(build.library() is None, reason="needs a C compiler")
def test_passes_of_every_shape_write_the_same(tmp_path: Path) -> None:
    """To the bit, where rows do not feel their neighbours. Elsewhere an entry that lies at the edge of a step falls to
    either side, and each layer makes a hundred of it: what torch's attention gives in the end is another text."""
    model = load(tiny("llama", tmp_path, num_hidden_layers=16), kernels=select("cpu", "native", batch_invariant=True))
    ids = torch.tensor([3 + j * j * 7 % 380 for j in range(48)])
    table = torch.arange(1, 17, dtype=torch.int32)[None]
    found = []
    for rows in (48, 5, 1):
        runner = ModelRunner(model, backend("native"), cache_of(model, 17, 16, fp8=True), BlockTables(1, 256, 16, CPU))
        runner.calibrate(ids)
        for start in range(0, 48, rows):
            part = ids[start : start + rows]
            where = torch.tensor([0]), torch.tensor([start])
            runner.forward(part, PassLayout.build([len(part)], [start + len(part)], *where, table, 16))
        found.append(runner.cache.rows)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


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
    found, scales = {}, {}
    for arch, drafter, size in (("plain", "none", 1), ("plain", "none", 2), ("unified", "model", 2)):
        with make(pair, arch, drafter, tensor_parallel_size=size, **FP8) as llm:
            found[arch, size] = texts(llm, 4)
            scales[arch, size] = llm.engine.verify.runner.cache.scales
    assert found["plain", 2] == found["unified", 2]
    assert torch.equal(scales["plain", 1][:, :, :1], scales["plain", 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "flashinfer"}, "--kv-cache-dtype fp8 needs --attention native, triton or torch: flashinfer"),
        ({"attention": "torch", "batch_invariant": True}, "--batch-invariant needs kernels and attention of one kind"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype 'fp4' is not known; choose from auto, fp8"),
    ],
)
def test_what_cannot_be_is_refused(pair: Pair, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(pair[0]), draft=None, arch="plain", dtype="float32", device="cpu", **{**FP8, **settings})
