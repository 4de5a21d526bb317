"""Greedy text equals transformers' greedy text, token for token, whatever the drafter and the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.heads import head_for
from tests.engine.pairs import assert_greedy, noisy_copy, preempt_every
from tests.models.checkpoints import FAMILIES, VOCAB, tiny
from verifypd import LLM, SamplingParams
from verifypd.kernels import build
from verifypd.request import Request

TOKENS, FEWER = 130, 40  # outputs of one schedule of each test, and of the others
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 40, 12, 7, 26)  # mixed, around block and chunk borders
GROUP_BY = r"(gemma\d?|llama3?|mistral|qwen\d)"  # one process makes a family's checkpoints, once
Pair = tuple[Path, Path, Path]  # verifier, draft model, draft head
DRAFTERS = ("none", "ngram", "model", "head", "both")


FIXED: dict[str, Any] = {"controller": "fixed", "measure_costs": False}


class Folders(dict[str, Pair]):
    """A family's checkpoints, made when they are first asked for."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, family: str) -> Pair:
        base = self.base / family
        verifier = tiny(family, base / "verifier")
        self[family] = (verifier, noisy_copy(verifier, base / "draft", 0.05), head_for(verifier, base / "head"))
        return self[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("families"))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random ids, with a stretch that repeats so that n-grams match; every second pair shares a prefix."""
    made = []
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        ids = [3 + (seed * 31 + (i // 2) * 17 + j * j * 7) % (VOCAB - 3) for j in range(length)]
        made.append((ids[: length // 2] * 2 + ids)[:length] if length > 8 else ids)
    return made


def run(
    folders: Pair,
    drafter: str,
    many: list[list[int]],
    tokens: int = TOKENS,
    preempt: int = 0,
    arch: str = "unified",
    **settings: Any,
) -> Any:
    verifier, draft, head = folders
    named = {"none": None, "ngram": "ngram", "model": str(draft), "head": str(head), "both": f"{head},ngram"}[drafter]
    arch = "plain" if drafter == "none" else arch
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_draft": 4,
        "max_model_len": 250,
        "batch_size": 16,
        "kv_memory": "64MB",
    }
    options |= FIXED
    with LLM(str(verifier), draft=named, arch=arch, **{**options, **settings}) as llm:
        preempt_every(llm, preempt)
        outputs = llm.generate(many, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        llm.engine.check()
        stats = llm.engine.stats
    return [output.outputs[0].token_ids for output in outputs], stats, outputs


# batch, prefill chunk, draft chunk, prefix cache, preempt every, late tickets: every pair of values occurs in some row,
# except preemption in a batch of one, which has nobody to give way to
SCHEDULES = (
    (1, 256, 13, False, 0, False),
    (16, 11, 13, True, 3, True),
    (16, 256, 13, False, 4, True),
    (1, 11, 256, True, 0, True),
    (16, 11, 256, False, 0, False),
    (16, 256, 256, True, 3, False),
)
HALVES = ((0, 1, 4), (2, 3, 5))  # of the schedules: each has every setting on and off


def check(folders: Pair, drafter: str, schedule: tuple[int, int, int, bool, int, bool], tokens: int) -> None:
    batch, chunk, draft_chunk, prefix, preempt, late = schedule
    many = prompts(16) if batch > 1 else prompts(3, seed=5)[2:]
    texts, stats, _ = run(
        folders,
        drafter,
        many,
        tokens,
        batch_size=batch,
        prefill_chunk=chunk,
        draft_chunk=draft_chunk,
        prefix_cache=prefix,
        preempt=preempt,
        late_tickets=late,
        draft_quantization="int8" if prefix else "none",
    )
    for prompt, output in zip(many, texts, strict=True):
        assert len(output) == tokens
        assert_greedy(folders[0], prompt, output)
    if drafter != "none" and (batch > 1 or tokens == TOKENS):  # look-up may find nothing in a few tokens of one text
        assert stats.drafted, "speculation must really have happened"
        assert stats.accepted or batch == 1
    assert bool(stats.preemptions) == bool(preempt)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(folders: dict[str, Pair], family: str, drafter: str) -> None:
    """Each family and each drafter meets every schedule, and each drafter every schedule in a long text."""
    turn = list(FAMILIES).index(family) + DRAFTERS.index(drafter)
    half = HALVES[turn % 2]
    longest = half[turn // 2 % 3]
    for index in sorted(half, key=lambda index: index != longest):  # others' texts are the beginnings of its own
        check(folders[family], drafter, SCHEDULES[index], TOKENS if index == longest else FEWER)


@pytest.mark.parametrize(
    ("arch", "family"),
    [*(("pdv", family) for family in FAMILIES), ("baseline", "gemma3"), ("pd", "qwen2"), ("table", "llama")],
)
@pytest.mark.parametrize("drafter", ["model", "head"])
def test_every_family_under_every_architecture(folders: dict[str, Pair], arch: str, family: str, drafter: str) -> None:
    """Unified is above; here the others in a crowd, with verdicts late and requests preempted."""
    lanes = {"verify_batch": 2, "verify_wait_ms": 50.0} if arch in ("pdv", "table") else {}
    settings = {
        "prefill_chunk": 11,
        "draft_chunk": 13,
        "late_tickets": True,
        "arch": arch,
        "batch_size": 6,
        "preempt": 11,
        **lanes,
    }
    crowd, stats, _ = run(folders[family], drafter, prompts(8, seed=1), tokens=30, **settings)
    for prompt, output in zip(prompts(8, seed=1), crowd, strict=True):
        assert len(output) == 30
        assert_greedy(folders[family][0], prompt, output)
    assert stats.drafted and stats.accepted and stats.preemptions


@pytest.mark.parametrize("drafter", ["model", "head"])
@pytest.mark.parametrize("late", [False, True])
def test_a_small_pool_preempts_and_loses_nothing(folders: dict[str, Pair], late: bool, drafter: str) -> None:
    many = prompts(8)
    texts, stats, outputs = run(folders["llama"], drafter, many, tokens=150, kv_memory=700_000, late_tickets=late)
    assert stats.preemptions
    assert sum(output.metrics.preemptions for output in outputs) == stats.preemptions
    for prompt, output in zip(many, texts, strict=True):
        assert len(output) == 150
        assert_greedy(folders["llama"][0], prompt, output)


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_a_second_request_with_the_same_prompt_uses_the_prefix_cache(folders: dict[str, Pair], drafter: str) -> None:
    verifier, *drafts = folders["qwen3"]
    prompt, draft = prompts(13)[12], drafts[drafter == "head"]
    with LLM(str(verifier), draft=str(draft), dtype="float32", max_draft=3, kv_memory="64MB", **FIXED) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        [first] = llm.generate([prompt], params)
        [second] = llm.generate([prompt], params)
        assert first.metrics.cached_tokens == 0
        assert second.metrics.cached_tokens == 32  # 40 tokens: two full blocks of 16
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        assert second.metrics.accepted_per_position == first.metrics.accepted_per_position  # drafts are the same too


def test_a_request_that_gave_way_counts_no_token_of_its_own_as_cached(folders: dict[str, Pair]) -> None:
    """It comes back and finds its prompt and its output; a continuation of another engine's output finds them too."""
    prompt, params = prompts(13)[12], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folders["qwen3"][0]), draft="ngram", dtype="float32", kv_memory="64MB", **FIXED) as llm:
        preempt_every(llm, 9)
        outputs = llm.generate([prompt, prompt[::-1]], params)
        assert outputs[1].metrics.preemptions and [output.metrics.cached_tokens for output in outputs] == [0, 0]
        written = outputs[0].outputs[0].token_ids
        again = Request("again", prompt, params, seed=0, max_length=80, order=99, output=written[:30])
        llm.engine.add(again)
        while not again.finished:
            llm.engine.step()
        assert again.output_ids == written and again.metrics.cached_tokens == len(prompt)


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_a_draft_in_int8_on_torch_kernels(folders: dict[str, Pair], drafter: str) -> None:
    many = prompts(3)
    settings = {"kernels": "torch", "attention": "torch", "draft_quantization": "int8"}
    texts, stats, _ = run(folders["llama"], drafter, many, FEWER, **settings)
    for prompt, output in zip(many, texts, strict=True):
        assert_greedy(folders["llama"][0], prompt, output)
    assert stats.accepted


def test_self_draft_is_accepted(folders: dict[str, Pair]) -> None:
    verifier, *_ = folders["llama"]
    many = prompts(4)
    same = {"draft_quantization": "none"}
    _, stats, outputs = run((verifier, verifier, verifier), "model", many, tokens=101, **same)
    assert stats.acceptance_rate >= 0.98
    for output in outputs:
        assert output.metrics.mean_accepted_length >= 0.98 * 5


def test_speculation_can_be_switched_off_and_shortened_per_request(folders: dict[str, Pair]) -> None:
    verifier, *_ = folders["llama"]
    base = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    params = [SamplingParams(**base), SamplingParams(**base, speculation=False), SamplingParams(**base, max_draft=1)]
    with LLM(str(verifier), draft=str(verifier), dtype="float32", max_draft=4, kv_memory="64MB", **FIXED) as llm:
        full, off, short = llm.generate([prompts(4)[3]] * 3, params)
    assert off.metrics.drafted == 0 and off.metrics.mean_accepted_length == 1.0
    assert len(short.metrics.drafted_per_position) == 1
    assert len(full.metrics.drafted_per_position) == 4
    assert full.outputs[0].token_ids == off.outputs[0].token_ids == short.outputs[0].token_ids


@pytest.mark.skipif(build.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_invariant_bf16_gives_the_same_text_in_any_company(folders: dict[str, Pair], temperature: float) -> None:
    verifier, draft, head = folders["llama3"]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=100, ignore_eos=True)
    many = prompts(8)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "batch_invariant": True,
        "kv_memory": "64MB",
        "max_draft": 4,
        **FIXED,
    }
    with LLM(str(verifier), draft=None, arch="plain", batch_size=1, **options) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in many]
    for name in ("ngram", str(draft), str(head)):
        with LLM(str(verifier), draft=name, batch_size=8, prefill_chunk=11, **options) as llm:
            preempt_every(llm, 5)
            crowd = [output.outputs[0].token_ids for output in llm.generate(many, params)]
            assert name == "ngram" or llm.engine.stats.accepted
        assert crowd == alone
