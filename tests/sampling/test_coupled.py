"""Coupled acceptance: the text is that of plain seeded sampling, whatever is drafted and whoever is in the batch."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.toy import PROMPT, Toy
from verifypd.request import SamplingParams
from verifypd.sampling.case import Spans
from verifypd.sampling.verify import judge

SEEDS, LENGTH = 50, 24
PARAMS = [{}, {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2}]


def toy(depth: int, params: dict[str, float]) -> Toy:
    return Toy(SamplingParams(seed=1, **params), requests=SEEDS, vocab=32, depth=depth)


def text(toy: Toy, draft) -> list[list[int]]:
    def step(toy: Toy) -> None:
        draft(toy)
        toy.judge(point_mass=True)

    return toy.run(LENGTH, step).tolist()


@pytest.fixture(params=PARAMS, ids=["plain", "transformed"])
def case(request):
    return request.param, text(toy(0, request.param), lambda toy: None)


def self_drafts(toy: Toy) -> None:
    toy.drafter = toy.verifier
    toy.draft()


def random_drafts(toy: Toy) -> None:
    generator = torch.Generator().manual_seed(int(toy.lengths.sum()))
    toy.draft_fixed(torch.randint(0, toy.vocab, (toy.requests, toy.depth), generator=generator))
    toy.draft_lens = torch.randint(0, toy.depth + 1, (toy.requests,), generator=generator)


def likeliest_drafts(toy: Toy) -> None:
    toy.draft_lens.fill_(toy.depth)
    for depth in range(toy.depth):
        toy.drafts[:, depth] = toy.verifier[toy.last(depth)].argmax(-1)


def unlikeliest_drafts(toy: Toy) -> None:
    toy.draft_lens.fill_(toy.depth)
    for depth in range(toy.depth):
        toy.drafts[:, depth] = toy.verifier[toy.last(depth)].argmin(-1)


@pytest.mark.parametrize("draft", [Toy.draft, self_drafts, random_drafts, likeliest_drafts, unlikeliest_drafts])
@pytest.mark.parametrize("depth", [1, 4])
def test_text_equals_plain_sampling(case, draft, depth):
    params, plain = case
    assert text(toy(depth, params), draft) == plain
    assert len({tuple(output) for output in plain}) == SEEDS


def test_drafting_for_oneself_always_stands():
    mine = toy(4, {})
    self_drafts(mine)
    assert mine.judge(point_mass=True).accepted.eq(4).all()


def test_neighbours_and_order_do_not_matter():
    """Each request alone, and all in reverse order with a greedy and a rejection request among them."""
    together = toy(3, {})
    random_drafts(together)
    drafts, lens = together.drafts.clone(), together.draft_lens.clone()
    expected = together.judge(point_mass=True)
    for slots in ([4], [9, 2], [*range(SEEDS - 1, -1, -1)]):
        other = toy(3, {})
        if len(slots) == SEEDS:
            for slot, params in ((0, {"temperature": 0}), (7, {"acceptance": "rejection"})):
                other.state.assign(slot, SamplingParams(**params), seed=5, prompt_len=len(PROMPT), max_len=99)
        other.drafts, other.draft_lens = drafts.clone(), lens.clone()
        logits = other.logits().unflatten(0, (SEEDS, 4))[slots].flatten(0, 1)
        spans = Spans.of(slots, [3] * len(slots), "cpu")
        where = (other.tokens, other.lengths, other.drafts, other.draft_lens)
        found = judge(logits, spans, other.state, *where)
        for index, slot in enumerate(slots):
            if len(slots) == SEEDS and slot in (0, 7):
                continue
            count = int(expected.counts[slot])
            assert int(found.counts[index]) == count
            assert found.tokens[index, :count].tolist() == expected.tokens[slot, :count].tolist()


def test_choices_of_one_seed_differ():
    mine = toy(0, {})
    mine.state.seed.fill_(7)
    mine.state.choice.copy_(torch.arange(SEEDS))
    outputs = mine.run(LENGTH, lambda toy: toy.judge(point_mass=True)).tolist()
    assert len({tuple(output) for output in outputs}) == SEEDS
