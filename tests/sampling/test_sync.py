"""Neither judging nor drafting ever waits for the device or makes a shape depend on its data."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sampling.toy import Toy
from verifypd.request import SamplingParams
from verifypd.sampling.case import Spans
from verifypd.sampling.state import SamplingState
from verifypd.sampling.verify import judge

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.bincount.default,
    torch.ops.aten.equal.default,
}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func not in WAITING, f"{func} waits for the device"
        if func in INDEXING:
            assert all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]), f"{func} by a mask"
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            assert torch.device(kwargs["device"]) == args[0].device, "a copy to another device"
        return func(*args, **kwargs)


EVERYTHING = {
    "top_p": 0.9,
    "min_p": 0.01,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {1: 1.0},
    "min_tokens": 3,
    "stop_token_ids": [5],
    "logprobs": 2,
}
CASES = [
    {},
    {"temperature": 0},
    {"seed": 1},
    {"top_k": 3, "top_p": 0.5},
    EVERYTHING,
    {**EVERYTHING, "seed": 1, "top_k": 4},
    {**EVERYTHING, "temperature": 0},
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("vocab", [6, 5000])
def test_nothing_waits(params, vocab):
    toy = Toy(SamplingParams(**params), requests=4, vocab=6, eos_ids=(2,), bad_words_ids=((1, 2), (3,)))
    if vocab > 6:
        toy.state = SamplingState(4, vocab, 2)
        for slot in range(4):
            toy.state.assign(slot, toy.params, seed=slot, prompt_len=3, max_len=40, bad_words_ids=((1, 2), (3,)))
        toy.verifier = toy.drafter = torch.randn(vocab, 1).expand(vocab, vocab)
        toy.draft_q = torch.zeros(4, 2, vocab)
    with NoWaiting():
        toy.draft(scale=0.9)
        toy.judge()
        toy.judge(point_mass=True)


def test_nothing_waits_in_a_mixed_batch():
    state = SamplingState(8, 6, 2)
    for slot, params in enumerate(CASES):
        state.assign(slot, SamplingParams(**params), seed=slot, prompt_len=3, max_len=40, eos_ids=[2])
    state.assign(7, SamplingParams(), seed=1, prompt_len=3, max_len=40, alpha=0.5)
    tokens, lengths = torch.ones(8, 50, dtype=torch.int64), torch.full((8,), 4)
    drafts, draft_lens = torch.ones(8, 2, dtype=torch.int64), torch.full((8,), 2)
    draft_q = torch.full((8, 2, 6), 1 / 6)
    depth = [2, 0, 1, 2, 1, 0, 2, 1]
    logits = torch.randn(sum(depth) + 8, 6)
    with NoWaiting():
        spans = Spans.of(range(8), depth, "cpu")
        point_mass = [slot % 2 == 0 for slot in range(8)]
        judge(logits, spans, state, tokens, lengths, drafts, draft_lens, draft_q, point_mass)


def test_the_guard_has_teeth():
    x = torch.arange(3)
    for wrong in (lambda: x[x > 1], lambda: bool(x.sum()), lambda: x.nonzero(), lambda: x.max().item()):
        with NoWaiting(), pytest.raises(AssertionError):
            wrong()
