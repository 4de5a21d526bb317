"""The law of what is emitted equals the verifier's, whatever was drafted: χ² < df + 10 √(2 df), and p > 1e-6.

The sample is the joint outcome of the first output tokens; or each place of one span, given the tokens before it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.sampling.mixed import mixed_batch
from tests.sampling.toy import PROMPT, Toy, chi_square
from verifypd.request import SamplingParams
from verifypd.sampling import sampler
from verifypd.sampling.philox import Role
from verifypd.sampling.sampler import propose

TRANSFORMS = {
    "plain": {},
    "temperature 0.6": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "top_k and top_p": {"top_k": 4, "top_p": 0.9, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": {0: 1.5, 4: -2.0}},
    "allowed": {"allowed_token_ids": [0, 2, 3, 5]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [2]},
    "bad_words": {},
}
EXTRA = {"bad_words": {"bad_words_ids": ((4,), (0, 1), (5, 3))}}


def passes(found: tuple[float, float]) -> bool:
    excess, p_value = found
    return excess < 1 and p_value > 1e-6


def speculate(toy: Toy) -> None:
    toy.draft()
    toy.judge()


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_joint_law_of_the_first_three_tokens(name, acceptance):
    toy = Toy(SamplingParams(max_tokens=None, **TRANSFORMS[name]), acceptance=acceptance, **EXTRA.get(name, {}))
    if name == "min_tokens":
        toy.state.stop_ids.fill_(-1)  # forbidden early, but ending nothing: the joint law needs whole outputs
    assert passes(toy.deviation(toy.run(3, speculate)))


def along_the_span(toy: Toy, tokens: np.ndarray, counts: np.ndarray) -> dict[int, list[tuple[float, float]]]:
    """For each place in a span and each beginning of it that came up often, how its tokens fit their law."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        for place in range(count):
            groups[tuple(row[:place])].append(row[place])
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for before, drawn in groups.items():
        if len(drawn) >= 60:
            found[len(before)].append(chi_square(np.bincount(drawn, minlength=toy.vocab), toy.law(before)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("tau", [0.6, 1.0, 1.6])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_each_place_of_a_span_given_the_tokens_before_it(temperature, tau, acceptance):
    """Drafts stand at all depths here: the drafter is near the verifier."""
    near = torch.randn(5, 5, generator=torch.Generator().manual_seed(3)) * 0.5
    toy = Toy(SamplingParams(temperature=temperature), vocab=5, depth=3, acceptance=acceptance, requests=12_000)
    toy.drafter = toy.verifier + near
    toy.draft(scale=tau)
    verdicts = toy.judge()
    found = along_the_span(toy, verdicts.tokens.numpy(), verdicts.counts.numpy())
    assert set(found) == {0, 1, 2, 3}
    for results in found.values():
        assert all(passes(result) for result in results)


@pytest.mark.parametrize("tau", [0.6, 1.6])
def test_a_drafter_temperature_leaves_the_law_alone(tau):
    toy = Toy(SamplingParams(top_p=0.9, repetition_penalty=1.2))

    def step(toy: Toy) -> None:
        toy.draft(scale=tau)
        toy.judge()

    assert passes(toy.deviation(toy.run(3, step)))


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("name", ["plain", "top_p", "presence and frequency"])
def test_point_mass_drafts(name, acceptance):
    """What an n-gram drafter proposes has no distribution: it stands with p(x)."""
    toy = Toy(SamplingParams(**TRANSFORMS[name]), acceptance=acceptance)

    def step(toy: Toy) -> None:
        toy.draft_fixed((toy.tokens[toy.slots, toy.lengths - 1][:, None] + torch.tensor([1, 3])) % toy.vocab)
        toy.judge(point_mass=True)

    assert passes(toy.deviation(toy.run(3, step)))


def entropy_rule(toy, depth):
    """Draft on where the drafter is sure of itself: a function of q, not of what was drawn."""
    q = toy.draft_q[:, depth]
    return -(q * q.clamp_min(1e-30).log()).sum(-1) < 1.2


def drawn_token_rule(toy, depth):
    """Drop unlikely drafts: looks at the drawn token, and so biases the result."""
    return toy.draft_q[:, depth].gather(1, toy.drafts[:, depth, None]).squeeze(1) > 0.3


def test_draft_length_may_follow_the_drafters_distribution():
    toy = Toy(SamplingParams())
    lengths = []

    def step(toy: Toy) -> None:
        toy.draft(rule=entropy_rule)
        lengths.append(toy.draft_lens.clone())
        toy.judge()

    assert passes(toy.deviation(toy.run(3, step)))
    assert set(torch.cat(lengths).tolist()) == {0, 1, 2}


def test_a_rule_that_looks_at_the_drawn_token_is_caught():
    """Negative control: the same test fails for a biased controller."""
    toy = Toy(SamplingParams())

    def step(toy: Toy) -> None:
        toy.draft(rule=drawn_token_rule)
        toy.judge()

    excess, p_value = toy.deviation(toy.run(3, step))
    assert excess > 1
    assert p_value < 1e-6


def test_a_wrong_q_is_caught():
    """Negative control: q that is not what was drawn from."""
    toy = Toy(SamplingParams())

    def step(toy: Toy) -> None:
        toy.draft()
        toy.draft_q.fill_(1 / toy.vocab)
        toy.judge()

    assert not passes(toy.deviation(toy.run(3, step)))


def test_shared_noise_is_caught(monkeypatch):
    """Negative control: one number for drawing a draft and for drawing what replaces it."""
    monkeypatch.setattr(sampler, "Role", SimpleNamespace(DRAFT=Role.RESIDUAL))
    toy = Toy(SamplingParams())
    assert not passes(toy.deviation(toy.run(3, speculate)))


def divergence(toy: Toy) -> float:
    """Total variation between verifier and drafter after the prompt."""
    return float((toy.verifier[PROMPT[-1]].softmax(0) - toy.drafter[PROMPT[-1]].softmax(0)).abs().sum() / 2)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_acceptance_rate(acceptance):
    """1 − TV for rejection; (1 − TV) / (1 + TV) at least for coupled."""
    toy = Toy(SamplingParams(), depth=1, acceptance=acceptance, requests=20_000)
    toy.drafter = 0.5 * toy.verifier + 0.5 * toy.drafter
    toy.draft()
    rate = float(toy.judge().accepted.double().mean())
    tv, error = divergence(toy), 4 * 0.5 / np.sqrt(toy.requests)
    assert 0.1 < tv < 0.9
    if acceptance == "rejection":
        assert abs(rate - (1 - tv)) < error
    else:
        assert (1 - tv) / (1 + tv) - error < rate < 1 - tv + error


@pytest.mark.parametrize("params", [{}, {"seed": 1}, {"temperature": 0}, {"top_p": 0.8, "presence_penalty": 1.0}])
def test_a_model_that_drafts_for_itself_is_accepted(params):
    toy = Toy(SamplingParams(**params), depth=4, requests=2000)
    toy.drafter = toy.verifier
    toy.draft()
    rate = float(toy.judge().accepted.double().mean()) / 4
    assert rate >= 0.98
    if "seed" in params or "temperature" in params:
        assert rate == 1


@pytest.mark.parametrize("mapped", [True, False])
def test_a_draft_vocabulary_may_be_a_part_of_the_verifiers(mapped):
    """Four of six tokens, by map or as the first four."""
    toy = Toy(SamplingParams(repetition_penalty=1.3))
    ids = torch.tensor([5, 0, 2, 3]) if mapped else None
    part = toy.drafter[:, ids if mapped else slice(4)]

    def step(toy: Toy) -> None:
        toy.draft_lens.fill_(toy.depth)
        for depth in range(toy.depth):
            logits = part[toy.last(depth)]
            where = (toy.state, toy.tokens, toy.lengths, toy.drafts, toy.draft_q)
            propose(logits, toy.slots, toy.slot_ids, depth, *where, vocab_map=ids)
        assert set(toy.drafts.unique().tolist()) <= set(ids.tolist() if mapped else range(4))
        toy.judge()

    assert passes(toy.deviation(toy.run(3, step)))


def test_synthetic_acceptance_is_conditional():
    """α = 0.8 and four drafts: Σ αⁱ = 3.36 tokens a span; a slot may have its own α."""
    toy = Toy(SamplingParams(), depth=4, requests=8000)
    toy.state.set_alpha(range(toy.requests), [0.8] * 4000 + [0.3] * 4000)
    toy.draft()
    counts = toy.judge().counts.double()
    for half, alpha in ((counts[:4000], 0.8), (counts[4000:], 0.3)):
        expected = sum(alpha**i for i in range(5))
        assert abs(float(half.mean()) - expected) < 4 * float(half.std()) / np.sqrt(4000)
    survivors = [int((counts[:4000] > i).sum()) for i in range(5)]
    for before, after in pairwise(survivors):
        assert abs(after / before - 0.8) < 4 * 0.4 / np.sqrt(before)


@pytest.mark.slow
def test_mixed_modes_and_depths_in_one_batch():
    """Every request keeps its own law beside neighbours of other kinds."""
    toy = Toy(SamplingParams(temperature=0.9), requests=6000)
    for kind, found in mixed_batch(toy).items():
        assert passes(found), kind
