from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.reference import transformed
from verifypd.request import SamplingParams
from verifypd.sampling import draws
from verifypd.sampling.cuts import histogram_threshold, sorted_threshold
from verifypd.sampling.draws import best
from verifypd.sampling.rows import Rows
from verifypd.sampling.state import SamplingState
from verifypd.sampling.transforms import transform, unpack_mask

VOCAB, DEPTH, EOS = 24, 3, (2, 23)
TOKEN = st.integers(0, VOCAB - 1)
NUMBERS = {
    "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    "top_k": st.sampled_from([0, -1, 1, 3, 10, 1000]),
    "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    "min_p": st.sampled_from([0.0, 0.02, 0.3]),
    "presence_penalty": st.sampled_from([0.0, 0.9, -1.1]),
    "frequency_penalty": st.sampled_from([0.0, 0.7, -0.4]),
    "repetition_penalty": st.sampled_from([1.0, 1.4, 0.8]),
    "logit_bias": st.none() | st.dictionaries(TOKEN, st.sampled_from([-3.0, 2.5]), min_size=1, max_size=3),
    "allowed_token_ids": st.none() | st.lists(TOKEN, min_size=1, max_size=8, unique=True),
    "min_tokens": st.integers(0, 5),
    "stop_token_ids": st.none() | st.lists(TOKEN, min_size=1, max_size=3),
    "ignore_eos": st.booleans(),
    "seed": st.sampled_from([None, 3]),
}
PROMPTS = st.lists(TOKEN, min_size=1, max_size=5)
OUTPUTS = st.lists(TOKEN, max_size=4)
DRAFTS = st.lists(TOKEN, min_size=DEPTH, max_size=DEPTH)
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)


def params_with(*names: str) -> st.SearchStrategy[SamplingParams]:
    return st.fixed_dictionaries({name: NUMBERS[name] for name in names}).map(lambda some: SamplingParams(**some))


REQUESTS = st.lists(st.tuples(params_with(*NUMBERS), PROMPTS, OUTPUTS, DRAFTS, WORDS), min_size=1, max_size=5)


def check(requests, seed, *, mask=None, scale=1.0):
    """Spans of DEPTH + 1 rows, all slots in one batch, against the reference row by row."""
    state = SamplingState(len(requests) + 2, VOCAB, DEPTH)
    tokens = torch.full((state.slots, 20), 5)
    drafts = torch.full((state.slots, DEPTH), 7)
    slot_ids = list(range(len(requests)))[::-1]
    for slot, (params, prompt, output, draft, words) in zip(slot_ids, requests, strict=True):
        state.assign(slot, params, seed=1, prompt_len=len(prompt), max_len=99, eos_ids=EOS, bad_words_ids=words)
        tokens[slot, : len(prompt) + len(output)] = torch.tensor(prompt + output)
        drafts[slot] = torch.tensor(draft)
    lengths = torch.tensor([len(prompt) + len(output) for _, prompt, output, _, _ in requests])
    rows = Rows(
        torch.tensor(slot_ids).repeat_interleave(DEPTH + 1),
        torch.arange(DEPTH + 1).repeat(len(requests)),
        lengths.repeat_interleave(DEPTH + 1),
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows.slots), VOCAB + 3, generator=generator) * 2  # three padding columns
    before = logits.clone()
    found = transform(
        logits,
        rows,
        state,
        tokens,
        drafts,
        state.needs(slot_ids, [DEPTH] * len(slot_ids)),
        mask=mask,
        temperature_scale=None if scale == 1.0 else torch.full((len(logits),), scale),
        context=int(lengths.max()),
    )
    assert torch.equal(logits, before)
    for row in range(len(logits)):
        params, prompt, output, draft, words = requests[row // (DEPTH + 1)]
        history = output + draft[: row % (DEPTH + 1)]
        expected, margin = transformed(
            logits[row, :VOCAB].numpy(),
            params,
            prompt,
            history,
            eos_ids=EOS,
            bad_words_ids=words,
            mask=None if mask is None else mask[row, :VOCAB].numpy(),
            scale=scale,
        )
        if margin < 1e-5:
            continue  # rounding decides
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "names",
    [
        ("temperature",),
        ("top_k",),
        ("top_p",),
        ("min_p",),
        ("top_k", "top_p"),
        ("presence_penalty", "frequency_penalty"),
        ("repetition_penalty",),
        ("logit_bias", "allowed_token_ids"),
        ("min_tokens", "stop_token_ids", "ignore_eos"),
    ],
)
@settings(max_examples=12)
@given(data=st.data())
def test_each_transform_matches_the_reference(names, data):
    params = data.draw(params_with(*names))
    case = data.draw(st.tuples(st.just(params), PROMPTS, OUTPUTS, DRAFTS, st.just([])))
    check([case], data.draw(st.integers(0, 99)))


@settings(max_examples=25)
@given(PROMPTS, st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), min_size=3, max_size=3), WORDS)
def test_bad_words_match_the_reference(prompt, output, draft, words):
    check([(SamplingParams(), prompt, output, draft, words)], 1)


@pytest.mark.slow
@settings(max_examples=100)
@given(REQUESTS, st.integers(0, 9))
def test_all_transforms_together_match_the_reference(requests, seed):
    check(requests, seed)


@settings(max_examples=15)
@given(REQUESTS, st.integers(0, 9), st.sampled_from([0.6, 1.6]))
def test_drafter_scale_and_mask_match_the_reference(requests, seed, scale):
    mask = torch.rand(len(requests) * (DEPTH + 1), VOCAB + 3, generator=torch.Generator().manual_seed(seed)) < 0.7
    check(requests, seed, mask=mask, scale=scale)


def test_packed_masks_are_unpacked_lowest_bit_first():
    mask = torch.tensor([[0b101, -(2**31)]], dtype=torch.int32)
    assert unpack_mask(mask)[0].nonzero().flatten().tolist() == [0, 2, 63]


def one_row(logits: list[float], **params: object) -> torch.Tensor:
    state = SamplingState(1, len(logits), 1)
    state.assign(0, SamplingParams(**params), seed=0, prompt_len=1, max_len=9)
    zero = torch.zeros(1, dtype=torch.int64)
    rows = Rows(zero, zero, zero + 1)
    return transform(torch.tensor([logits]), rows, state, zero[None], zero[None], state.needs([0]))[0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1, 2]),  # 1 and 2 are level
        ({"top_p": 0.5}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.99}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.4}, [0]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
    ],
)
def test_level_tokens_are_kept_together(params, kept):
    x = one_row([float(np.log(w)) for w in (0.41, 0.25, 0.25, 0.05, 0.04)], **params)
    assert torch.isfinite(x).nonzero().flatten().tolist() == kept


def test_a_uniform_row_is_kept_whole_by_every_cut():
    for params in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.1}):
        assert torch.isfinite(one_row([0.5] * 40, **params)).all()


def test_top_p_is_exact_on_a_large_vocabulary():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(49_152, generator=generator) * 3
    for top_p in (0.3, 0.9, 0.999):
        x = one_row(logits.tolist(), top_p=top_p)
        p = logits.double().softmax(0)
        ordered = p.sort(descending=True).values
        keep = int((ordered.cumsum(0) < np.float32(top_p)).sum()) + 1
        assert abs(int(torch.isfinite(x).sum()) - keep) <= 1  # one token's mass is within the rounding of exp here
        assert p[torch.isfinite(x)].sum() >= top_p - 1e-6


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from([0.0, 1e-40, 1e-12, 0.1, 0.25, 0.2500001, 0.7, 1.0]) | st.floats(0, 1, width=32), max_size=30
    ),
    st.floats(1e-6, 0.999999),
)
def test_both_ways_to_the_top_p_threshold_agree(weights, share):
    weight = torch.tensor([[*weights, 1.0]])
    threshold = histogram_threshold(weight, torch.tensor([[share]]))
    assert torch.equal(threshold, sorted_threshold(weight, torch.tensor([[share]])))


def test_nan_is_excluded_and_infinity_wins():
    x = one_row([float("nan"), 1.0, float("inf"), float("-inf")], temperature=0.01, top_p=0.9)
    assert torch.isfinite(x).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("few", [0, draws.FEW])
def test_the_maximum_of_few_or_many_is_the_first_maximum(few, monkeypatch):
    monkeypatch.setattr(draws, "FEW", few)
    generator = torch.Generator().manual_seed(1)
    for vocab in (1, 7, 64, 256, 300, 1000, 49_152):
        x = torch.randint(0, 50, (9, vocab), generator=generator).float()
        x[8] = -torch.inf
        value, index = best(x)
        assert torch.equal(value, x.amax(-1))
        assert torch.equal(index, (x == x.amax(-1, keepdim=True)).int().argmax(-1))
