"""Sampling through the whole engine: seeds, acceptance modes, transforms, stops and logprobs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.engine.pairs import preempt_every
from tests.models.checkpoints import VOCAB, reference_logits
from verifypd import LLM, SamplingParams
from verifypd.errors import RequestError

PROMPT = [5, 9, 200, 31, 7, 5, 9, 200]
TRANSFORMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.08},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {7: 3.0, 8: -2.0}, "temperature": 0.6},
    "allowed": {"allowed_token_ids": list(range(40, 90))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(100, 160))},
}


def make(pair: tuple[Path, Path], drafter: str = "model", **settings: Any) -> LLM:
    head = str(pair[0].parent / "head")
    named = {"none": None, "ngram": "ngram", "model": str(pair[1]), "head": head, "both": f"{head},ngram"}[drafter]
    arch = "plain" if drafter == "none" else "unified"
    options = {"dtype": "float32", "max_draft": 3, "max_model_len": 128, "kv_memory": "64MB", "batch_size": 64}
    options |= {"controller": "fixed", "measure_costs": False}
    return LLM(str(pair[0]), draft=named, arch=arch, **{**options, **settings})


def texts(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def seeded(pair: tuple[Path, Path]) -> tuple[list[SamplingParams], list[list[int]]]:
    """Fifty requests with seeds and all transforms, and the text of each alone."""
    names = list(TRANSFORMS)
    params = [SamplingParams(**TRANSFORMS[names[s % len(names)]], seed=s, max_tokens=24) for s in range(50)]
    with make(pair, "none", batch_size=1) as llm:
        alone = [texts(llm, [PROMPT], each)[0] for each in params]
    assert len({tuple(text) for text in alone}) == 50
    return params, alone


@pytest.mark.parametrize("late", [False, True])
def test_seeded_text_is_plain_seeded_text_whatever_drafts_and_neighbours(
    pair: tuple[Path, Path], seeded: tuple[list[SamplingParams], list[list[int]]], late: bool
) -> None:
    params, alone = seeded
    for drafter in ("none", "ngram", "model", "head", "both"):
        with make(pair, drafter, batch_size=20, prefill_chunk=7, late_tickets=late) as llm:
            preempt_every(llm, 5)
            crowd = texts(llm, [PROMPT] * 50, params)
            llm.engine.check()
            if drafter in ("model", "head", "both"):
                assert llm.engine.stats.accepted
        assert crowd == alone, drafter


def test_choices_of_one_seed_differ_and_repeat(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=12)
    with make(pair) as llm:
        [first] = llm.generate([PROMPT], params)
        [again] = llm.generate([PROMPT], params)
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 4
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]


# drafter, acceptance, whether requests are preempted and verdicts late, transform: each pair of these occurs; a soak
# runs all triples without that weather
LAWS = [
    pytest.param(drafter, acceptance, bool((i // 2 + k) % 2), name, marks=[pytest.mark.soak] if (i + j + k) % 2 else [])
    for i, drafter in enumerate(("ngram", "model", "head", "both"))
    for j, acceptance in enumerate(("rejection", "coupled"))
    for k, name in enumerate(("temperature", "top_p", "penalties"))
]


@pytest.mark.parametrize(("drafter", "acceptance", "stormy", "name"), LAWS)
def test_distribution_of_each_position_is_the_verifiers(
    pair: tuple[Path, Path], drafter: str, acceptance: str, stormy: bool, name: str
) -> None:
    """Tokens drawn through the engine, pooled over prefixes, against plain sampling's own law at that prefix."""
    prompt = [*range(3, 11), *range(3, 11)]  # every allowed token has occurred: look-ups of one token always match
    draws = 1500
    shared = {**TRANSFORMS[name], "allowed_token_ids": list(range(3, 11)), "max_tokens": 3, "ignore_eos": True}
    shared.setdefault("temperature", 1.0)
    settings = {"late_tickets": stormy, "draft_quantization": "none" if stormy else "int8"}
    with make(pair, drafter, seed=3, batch_size=500, ngram_min=1, prefill_chunk=900, **settings) as llm:
        preempt_every(llm, 2 if stormy else 0)
        found = texts(llm, [prompt] * draws, SamplingParams(**shared, acceptance=acceptance))
        drafted, accepted = llm.engine.stats.drafted, llm.engine.stats.accepted
    assert drafted and 0 < accepted < drafted
    for position in range(3):
        by_prefix = Counter(tuple(text[:position]) for text in found)
        for prefix, count in by_prefix.most_common(3):
            if count < 120:
                continue
            law = _law(pair[0], prompt, prefix, shared)
            seen = np.bincount([t[position] for t in found if tuple(t[:position]) == prefix], minlength=VOCAB)
            assert seen[law == 0].sum() == 0
            kept = law * count >= 3
            expected = np.append(law[kept] * count, max(count * law[~kept].sum(), 1e-9))
            observed = np.append(seen[kept], seen[~kept].sum())
            keep = expected > 1e-6
            chi2 = (((observed - expected) ** 2) / np.maximum(expected, 1.0))[keep].sum()
            df = max(1, int(keep.sum()) - 1)
            assert chi2 < df + 10 * (2 * df) ** 0.5, (position, prefix, chi2, df)
            assert stats.chi2.sf(chi2, df) > 1e-6


def _law(folder: Path, prompt: list[int], prefix: tuple[int, ...], params: dict[str, Any]) -> np.ndarray:
    """Independent of the engine: the transformed distribution after `prompt` + `prefix`."""
    logits = reference_logits(folder, [*prompt, *prefix])[-1].double()
    allowed = torch.full_like(logits, -torch.inf)
    allowed[params["allowed_token_ids"]] = 0
    logits = logits + allowed
    penalty = params.get("repetition_penalty", 1.0)
    for token in {*prompt, *prefix}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(prefix).items():
        logits[token] -= params.get("presence_penalty", 0.0) + count * params.get("frequency_penalty", 0.0)
    p = (logits / params["temperature"]).softmax(0)
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.get("top_p", 1.0)]] = 0
    return (p / p.sum()).numpy()


def test_self_draft_acceptance_when_sampling(pair: tuple[Path, Path]) -> None:
    for acceptance in ("rejection", "coupled"):
        with make((pair[0], pair[0]), draft_quantization="none") as llm:
            llm.generate([PROMPT] * 20, SamplingParams(max_tokens=40, acceptance=acceptance))
            assert llm.engine.stats.acceptance_rate >= 0.98, acceptance


def test_synthetic_acceptance_has_the_mean_length_it_promises(pair: tuple[Path, Path]) -> None:
    with make(pair, synthetic_acceptance=0.8, max_draft=4, batch_size=16) as llm:
        params = [SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, seed=seed) for seed in range(64)]
        outputs = llm.generate([PROMPT] * 64, params)
    passes = sum(o.metrics.passes for o in outputs)
    emitted = sum(o.metrics.emitted for o in outputs)
    assert emitted / passes == pytest.approx(3.36, abs=0.12)
    positions = np.array([o.metrics.accepted_per_position for o in outputs]).sum(0)
    drafted = np.array([o.metrics.drafted_per_position for o in outputs]).sum(0)
    rates = positions / np.concatenate([drafted[:1], positions[:-1]])
    assert rates == pytest.approx([0.8] * 4, abs=0.05)


def test_synthetic_acceptance_by_request_and_drifting(pair: tuple[Path, Path], tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with make(pair, synthetic_acceptance="0.0,1.0") as llm:
        never, always = llm.generate([PROMPT] * 2, params)
    assert never.metrics.accepted == 0
    assert always.metrics.accepted == always.metrics.drafted
    drift = tmp_path / "drift.json"
    drift.write_text('{"curves": [[[0, 0.0], [29, 0.0], [30, 1.0]]]}')
    with make(pair, synthetic_acceptance=f"drift:{drift}") as llm:
        [output] = llm.generate([PROMPT], params)
    assert output.metrics.accepted >= 20, "the second half accepts everything"
    assert output.metrics.passes >= 30, "the first half accepts nothing"


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "head"])
def test_logprobs_are_the_verifiers_own(pair: tuple[Path, Path], drafter: str) -> None:
    params = SamplingParams(
        temperature=0.9, top_k=20, seed=4, max_tokens=15, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    with make(pair, drafter, prefill_chunk=3) as llm:
        [output, _] = llm.generate([PROMPT, PROMPT[:3]], [params, SamplingParams(max_tokens=15)])
    choice = output.outputs[0]
    rows = reference_logits(pair[0], [*PROMPT, *choice.token_ids]).log_softmax(-1)
    assert choice.logprobs is not None and len(choice.logprobs) == 15
    for index, (token, entries) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        row = rows[len(PROMPT) - 1 + index]
        assert entries[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entries[token].rank == int((row > row[token]).sum()) + 1
        assert {int(t) for t in row.topk(3).indices} <= set(entries)
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    for position, entries in enumerate(output.prompt_logprobs[1:], start=1):
        assert entries is not None
        assert entries[PROMPT[position]].logprob == pytest.approx(rows[position - 1][PROMPT[position]].item(), abs=1e-4)


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "head"])
@pytest.mark.parametrize("late", [False, True])
def test_stops_cut_where_plain_decoding_would(pair: tuple[Path, Path], drafter: str, late: bool) -> None:
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    with make(pair, drafter, late_tickets=late) as llm:
        [free] = llm.generate([PROMPT], SamplingParams(**base))
        ids, text = free.outputs[0].token_ids, free.outputs[0].text
        assert free.outputs[0].finish_reason == "length" and len(ids) == 60

        token = ids[17]
        [byid] = llm.generate([PROMPT], SamplingParams(**base, stop_token_ids=[token]))
        cut = ids.index(token) + 1
        assert byid.outputs[0].token_ids == ids[:cut]
        assert (byid.outputs[0].finish_reason, byid.outputs[0].stop_reason) == ("stop", token)

        word = text[20:24]
        [bytext] = llm.generate([PROMPT], SamplingParams(**base, stop=[word, "never there"]))
        choice = bytext.outputs[0]
        assert choice.text == text[: text.index(word)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", word)
        assert choice.token_ids == ids[: len(choice.token_ids)]
        [kept] = llm.generate([PROMPT], SamplingParams(**base, stop=word, include_stop_str_in_output=True))
        assert kept.outputs[0].text == text[: text.index(word) + len(word)]
        assert kept.outputs[0].token_ids == choice.token_ids, "tokens past the stop are dropped with and without drafts"
        llm.engine.check()


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_stop_string_in_the_last_tokens_is_the_reason(pair: tuple[Path, Path], drafter: str) -> None:
    base: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    with make((pair[0], pair[0]), drafter) as llm:
        [free] = llm.generate([PROMPT], SamplingParams(**base, max_tokens=40))
        text = free.outputs[0].text
        for length in range(2, 9):
            [cut] = llm.generate([PROMPT], SamplingParams(**base, max_tokens=length, stop=text[3:5]))
            choice = cut.outputs[0]
            if text[3:5] in llm.get_tokenizer().decode(free.outputs[0].token_ids[:length]):
                assert (choice.finish_reason, choice.stop_reason) == ("stop", text[3:5])
                assert choice.text == text[: text.index(text[3:5])]
            else:
                assert choice.finish_reason == "length"


def test_a_stream_is_complete_although_others_step_the_engine(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with make(pair) as llm:
        [whole] = llm.generate([PROMPT], params)
        stream = llm.stream(PROMPT, params)
        seen = [next(stream)]
        llm.generate([PROMPT[:4]], SamplingParams(max_tokens=30, ignore_eos=True))
        seen += list(stream)
    assert seen[-1].finished and seen[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_token_is_delivered_in_the_step_that_made_it(pair: tuple[Path, Path]) -> None:
    with make(pair, "none") as llm:
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(next(stream).outputs[0].token_ids) == 1
        assert llm.engine.stats.passes == 1
        stream.close()


def test_streaming_never_shows_a_part_of_a_stop_string(pair: tuple[Path, Path]) -> None:
    with make(pair) as llm:
        base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        [free] = llm.generate([PROMPT], SamplingParams(**base))
        stop = free.outputs[0].text[10:18]
        seen = [o.outputs[0].text for o in llm.stream(PROMPT, SamplingParams(**base, stop=stop))]
    final = free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert seen[-1] == final
    assert all(final.startswith(text) for text in seen)


def test_bad_words_never_appear(pair: tuple[Path, Path]) -> None:
    with make(pair) as llm:
        tokenizer = llm.get_tokenizer()
        word = tokenizer.decode([60])
        outputs = llm.generate([PROMPT] * 20, SamplingParams(max_tokens=40, bad_words=[word], logit_bias={60: 5.0}))
        ids = tokenizer.encode(word, add_special_tokens=False)
    for output in outputs:
        chosen = output.outputs[0].token_ids
        assert not any(chosen[i : i + len(ids)] == ids for i in range(len(chosen)))


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_request_that_runs_out_of_tokens_keeps_what_plain_decoding_gives(
    pair: tuple[Path, Path], drafter: str
) -> None:
    with make(pair, "none") as llm:
        [only] = llm.get_tokenizer().encode("z", add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=20, allowed_token_ids=[only], bad_words=["zzzzz"])
        [plain] = llm.generate([[only] * 8], params)
    with make(pair, drafter) as llm:
        [drafted] = llm.generate([[only] * 8], params)
        assert llm.engine.stats.accepted
    assert plain.outputs[0].token_ids == drafted.outputs[0].token_ids == [only] * 4
    assert plain.outputs[0].finish_reason == drafted.outputs[0].finish_reason == "error"


def test_a_bad_word_of_no_token_bans_nothing(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some tokenizers a space leaves nothing."""
    with make(pair) as llm:
        monkeypatch.setattr(llm.get_tokenizer(), "encode", lambda text, **more: [])
        assert llm._bad_words([" "]) == ()
        [free], [same] = (
            llm.generate([PROMPT], SamplingParams(max_tokens=12, seed=3, bad_words=words)) for words in (None, [" "])
        )
    assert same.outputs[0].token_ids == free.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5] * 128, {}, "prompt"),
        ([5], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([5], {"allowed_token_ids": [-3]}, "allowed_token_ids"),
        ([5], {"bad_words": ["xyz" * 100]}, "bad_words"),
        ({"prompt_token_ids": "abc"}, {}, "prompt"),
        (None, {}, "prompt"),
    ],
)
def test_one_bad_request_harms_nobody(pair: tuple[Path, Path], prompt: Any, params: dict[str, Any], param: str) -> None:
    with make(pair) as llm:
        with pytest.raises(RequestError) as error:
            llm.generate([PROMPT, prompt], [SamplingParams(), SamplingParams(**params)])
        assert error.value.param == param
        llm.engine.check()
        assert len(llm.generate([PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_arguments_of_another_kind_are_refused_in_words(pair: tuple[Path, Path]) -> None:
    with make(pair) as llm:
        for params in ({"temperature": 0.0}, [None]):
            with pytest.raises(RequestError, match="sampling parameters are SamplingParams, not"):
                llm.generate([PROMPT], params)  # type: ignore[arg-type]
        message = {"role": "user", "content": "Hello"}
        for messages in ("Hello", message, [message, "Hello"]):
            with pytest.raises(RequestError, match="messages are a list of mappings"):
                llm.chat(messages)  # type: ignore[arg-type]
