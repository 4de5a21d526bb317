from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from verifypd.errors import RequestError
from verifypd.request import SamplingParams
from verifypd.sampling.state import Mode, SamplingState, Subset

CPU = torch.device("cpu")


def assign(state: SamplingState, slot: int, **params: object) -> None:
    state.assign(slot, SamplingParams(**params), seed=slot, prompt_len=2, max_len=9, eos_ids=(1,))


def test_subsets_read_and_write_their_rows():
    for rows in ([], [0, 1, 2, 3], [1, 2], [0, 3]):
        x = torch.arange(8.0).view(4, 2)
        subset = Subset(rows, CPU)
        assert bool(subset) == bool(rows)
        assert torch.equal(subset.of(x), x[rows])
        subset.update(x, lambda part: part.mul_(-1))
        expected = torch.arange(8.0).view(4, 2)
        expected[rows] *= -1
        assert torch.equal(x, expected)
        subset.put(x, torch.zeros(len(rows), 2))
        assert x[rows].eq(0).all()
    assert Subset([1, 2], CPU).index is None  # neighbours: a view


def test_needs_are_only_what_is_felt():
    state = SamplingState(4, 10, 2)
    assign(state, 0, temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assign(state, 1, top_k=10)
    assign(state, 2, top_p=0.5, top_k=3, repetition_penalty=1.2)
    assign(state, 3, top_p=0.5, temperature=0.5, seed=1)
    needs = state.needs([0, 1])
    assert not (needs.temperature or needs.top_k or needs.top_p or needs.min_p or needs.coupled)
    assert needs.plain
    needs = state.needs([0, 2, 3], [1, 0, 2])
    assert needs.rows == 6
    assert (needs.greedy.count, needs.rejection.count, needs.coupled.count) == (2, 1, 3)
    assert (needs.top_k.start, needs.top_k.count, needs.widest_top_k) == (2, 1, 3)
    assert (needs.top_p.start, needs.top_p.count) == (3, 3)
    assert not needs.plain
    assert needs.tried.count == 0


def test_needs_are_remembered_until_a_slot_changes():
    state = SamplingState(2, 10, 2)
    assign(state, 0)
    first = state.needs([0])
    assert state.needs([0]) is first
    state.set_alpha([0], [0.5])
    assert state.needs([0]).synthetic
    second = state.needs([0])
    state.set_alpha([0], [0.7])
    assert state.needs([0]) is second
    assert state.alpha[0] == pytest.approx(0.7)
    state.set_alpha([0], [-1])
    assert state.needs([0]).rejection


@pytest.mark.parametrize(
    ("params", "default", "mode"),
    [
        ({}, "rejection", Mode.REJECTION),
        ({}, "coupled", Mode.COUPLED),
        ({"seed": 3}, "rejection", Mode.COUPLED),
        ({"seed": 3, "acceptance": "rejection"}, "coupled", Mode.REJECTION),
        ({"acceptance": "coupled"}, "rejection", Mode.COUPLED),
        ({"temperature": 0, "acceptance": "coupled"}, "rejection", Mode.GREEDY),
    ],
)
def test_mode(params, default, mode):
    state = SamplingState(1, 10, 2)
    state.assign(0, SamplingParams(**params), seed=1, prompt_len=1, max_len=5, acceptance=default)
    needs = state.needs([0])
    subsets = {Mode.GREEDY: needs.greedy, Mode.REJECTION: needs.rejection, Mode.COUPLED: needs.coupled}
    assert [found for found, subset in subsets.items() if subset] == [mode]


def test_a_slot_forgets_its_last_request():
    state = SamplingState(3, 10, 2)
    assign(state, 0, logit_bias={1: 2.0}, stop_token_ids=[2, 3, 4, 5], min_tokens=2)
    state.assign(1, SamplingParams(allowed_token_ids=[7]), seed=1, prompt_len=1, max_len=5, bad_words_ids=[[1, 2, 3]])
    assert state.stop_ids[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert state.bias[state.bias_row[0]].tolist() == [0, 2] + [0] * 8
    assert state.bias[state.bias_row[1]].isfinite().tolist() == [token == 7 for token in range(10)]
    state.release(0)
    assert not state.alive[0]
    state.assign(0, SamplingParams(logit_bias={3: 1.0}), seed=1, prompt_len=1, max_len=5, bad_words_ids=[[4]])
    assert state.bias.shape[0] == 2
    assert state.bias_row[0] != state.bias_row[1]
    assert state.bias[state.bias_row[0]].tolist() == [0] * 3 + [1] + [0] * 6
    assert state.stop_ids[0].eq(-1).all()
    assert state.bad_words[0].tolist() == [[-1, -1, -1, 4]]
    assert state.bad_words[1].tolist() == [[-1, 1, 2, 3]]
    assert state.alive.tolist() == [True, True, False]


def test_the_table_of_bad_words_goes_back_when_nobody_uses_it():
    state = SamplingState(3, 10, 2)
    plain = SamplingParams()
    for slot, words in ((0, [[1]] * 200), (1, [[1, 2, 3, 4]])):
        state.assign(slot, plain, seed=1, prompt_len=1, max_len=5, bad_words_ids=words)
    assert state.bad_words.shape == (3, 256, 4)
    state.release(0)
    assert state.bad_words[1, 0].tolist() == [1, 2, 3, 4], "it is in use"
    state.release(1)
    assert state.bad_words.numel() == 0
    state.assign(2, plain, seed=1, prompt_len=1, max_len=5, bad_words_ids=[[4, 5]])
    assert state.bad_words.shape == (3, 1, 2) and state.bad_words[2].tolist() == [[4, 5]]
    version = state.version
    state.release(2)
    state.assign(1, plain, seed=1, prompt_len=1, max_len=5, bad_words_ids=[[6, 7]])
    assert state.version == version, "captured passes read the same table again"
    assert state.bad_words[:, 0].tolist() == [[-1, -1], [6, 7], [-1, -1]]


def test_eos_is_guarded_even_when_ignored():
    state = SamplingState(1, 10, 2)
    assign(state, 0, ignore_eos=True, stop_token_ids=[4], min_tokens=1)
    assert state.stop_ids[0].tolist() == [4, -1]
    assert state.guarded_ids[0].tolist() == [1, 4]


def test_any_64_bit_seed():
    state = SamplingState(1, 10, 2)
    for seed, held in ((2**63, -(2**63)), (2**64 - 1, -1), (-5, -5), (2**63 - 1, 2**63 - 1)):
        state.assign(0, SamplingParams(), seed=seed, prompt_len=1, max_len=5)
        assert state.seed[0].item() == held


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("logit_bias", {"logit_bias": {10: 1.0}}, ()),
        ("allowed_token_ids", {"allowed_token_ids": [-1]}, ()),
        ("bad_words", {}, ((3, 12),)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(name, params, words):
    state = SamplingState(1, 10, 2)
    with pytest.raises(RequestError, match=r"is not in 0\.\.9") as refused:
        state.assign(0, SamplingParams(**params), seed=1, prompt_len=1, max_len=5, bad_words_ids=words)
    assert refused.value.param == name


def test_what_was_replaced_stays_until_other_streams_have_passed():
    """A pass on a stream of its own may still read it; memory of the engine's stream may be taken again at once."""
    state = SamplingState(2, 10, 2)
    assign(state, 0)
    old, passed = weakref.ref(state.stop_ids), []
    assign(state, 1, stop_token_ids=[2, 3, 4, 5])  # the table grows
    assert old() is not None
    mark = SimpleNamespace(query=lambda: bool(passed))
    state.settle(lambda: [mark])
    state.settle(lambda: [mark])
    assert old() is not None, "the stream has not passed"
    passed.append(True)
    state.settle(lambda: [mark])
    assert old() is None

    old = weakref.ref(state.stop_ids)
    assign(state, 0, stop_token_ids=list(range(20)))
    state.settle()
    assert old() is None, "without other streams there is nothing to wait for"
