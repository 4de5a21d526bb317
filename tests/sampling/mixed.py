"""A batch in which every third request is judged another way, over uneven spans."""

from __future__ import annotations

import numpy as np
import torch

from tests.sampling.toy import PROMPT, Toy, chi_square
from verifypd.request import SamplingParams
from verifypd.sampling.case import Spans
from verifypd.sampling.sampler import propose
from verifypd.sampling.verify import judge

KINDS = {
    "rejection": SamplingParams(temperature=0.9),
    "coupled": SamplingParams(temperature=0.9, acceptance="coupled"),
    "point": SamplingParams(temperature=0.9),
    "greedy": SamplingParams(temperature=0),
}


def mixed_batch(toy: Toy) -> dict[str, tuple[float, float]]:
    """One step of all kinds together; the fit of the first token of each."""
    kinds = list(KINDS)
    state, count = toy.state, toy.requests
    seeds = state.seed.clone()
    mirrors = {}
    for index, kind in enumerate(kinds):
        state.assign(index, KINDS[kind], seed=0, prompt_len=len(PROMPT), max_len=1000)
        mirrors[kind] = state._slots[index]
        for table in (state.floats, state.integers):
            table[index :: len(kinds)] = table[index].clone()
    state._slots[:] = [mirrors[kinds[slot % len(kinds)]] for slot in range(count)]
    state._needs.clear()
    state.seed.copy_(seeds)

    toy.draft_lens.fill_(0)
    depth = tuple((slot // len(kinds)) % 3 for slot in range(count))
    for place in range(2):
        some = [slot for slot in range(count) if depth[slot] > place]
        index = torch.tensor(some)
        logits = toy.drafter[toy.last(place)[index]]
        propose(logits, index, some, place, state, toy.tokens, toy.lengths, toy.drafts, toy.draft_q)
        toy.draft_lens[index] = place + 1
    points = torch.arange(kinds.index("point"), count, len(kinds))
    toy.drafts[points] = torch.tensor([2, 4])
    order = np.random.default_rng(3).permutation(count).tolist()
    spans = Spans.of(order, [depth[slot] for slot in order], "cpu")
    rows = [toy.verifier[toy.last(place)[slot]] for slot in order for place in range(depth[slot] + 1)]
    point_mass = [kinds[slot % len(kinds)] == "point" for slot in order]
    judge(torch.stack(rows), spans, state, toy.tokens, toy.lengths, toy.drafts, toy.draft_lens, toy.draft_q, point_mass)
    first = toy.tokens[:, len(PROMPT)].numpy()
    found = {}
    for index, kind in enumerate(kinds):
        observed = np.bincount(first[index :: len(kinds)], minlength=toy.vocab)
        law = toy.law(()) if kind != "greedy" else np.eye(toy.vocab)[int(toy.verifier[PROMPT[-1]].argmax())]
        found[kind] = chi_square(observed, law)
    return found
