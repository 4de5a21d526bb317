from __future__ import annotations

import torch

from tests.sampling.test_verify import Slots
from verifypd.sampling.logprobs import token_logprobs


def test_logprobs_are_of_the_raw_logits():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 40, generator=generator) * 3
    tokens = torch.tensor([0, 39, 5, 6, 7, 8])
    found = token_logprobs(logits, tokens, 3)
    expected = logits.log_softmax(-1)
    assert torch.allclose(found.chosen, expected.gather(1, tokens[:, None]).squeeze(1), atol=1e-5)
    assert torch.equal(found.top_ids, expected.topk(3).indices)
    assert torch.allclose(found.top, expected.topk(3).values, atol=1e-5)
    order = expected.argsort(-1, descending=True)
    assert found.ranks.tolist() == [order[row].tolist().index(token) + 1 for row, token in enumerate(tokens.tolist())]


def test_verdicts_carry_logprobs_for_those_who_asked():
    slots = Slots(3)
    slots.assign(0, logprobs=2, temperature=0.8, top_k=1, repetition_penalty=1.5)
    slots.assign(1)
    slots.assign(2, logprobs=0, temperature=0.8)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 40, generator=generator) * 3
    slots.propose([int(logits[0].argmax()), 3], 0)
    slots.propose([5], 1)
    verdicts = slots.judge_logits(logits, [2, 1, 0], point_mass=[True] * 3)
    found = verdicts.logprobs
    assert found.chosen.shape == (3, 3)
    assert found.top.shape == found.top_ids.shape == (3, 3, 2)
    raw = logits.log_softmax(-1)
    for place in range(int(verdicts.counts[0])):
        token = verdicts.tokens[0, place]
        assert torch.isclose(found.chosen[0, place], raw[place, token], atol=1e-5)
        assert torch.equal(found.top_ids[0, place], raw[place].topk(2).indices)
    assert torch.isclose(found.chosen[2, 0], raw[5, verdicts.tokens[2, 0]], atol=1e-5)
    assert found.ranks[2, 0] == (raw[5] > raw[5, verdicts.tokens[2, 0]]).sum() + 1
    assert found.chosen[1].eq(0).all()


def test_nobody_asked():
    slots = Slots()
    slots.assign()
    assert slots.judge([[3]]).logprobs is None
