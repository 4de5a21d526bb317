"""On a CUDA device: the same verdicts as on the CPU, no wait for the device, and all of it inside one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.test_sync import CASES
from verifypd.request import SamplingParams
from verifypd.sampling.case import Spans, Verdicts
from verifypd.sampling.sampler import propose
from verifypd.sampling.state import SamplingState
from verifypd.sampling.verify import judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLOTS, VOCAB, DEPTH = 8, 5120, 2
SPANS = (2, 0, 1, 2, 1, 0, 2, 1)


class Cycle:
    """Drafting and judging of every kind of request, as one call."""

    def __init__(self, device: str, kernels: str = "torch", seed: int = 8) -> None:
        self.state = SamplingState(SLOTS, VOCAB, DEPTH, device, kernels)
        for slot, params in enumerate(CASES):
            words = ((1, 2), (3,)) if slot % 2 else ()
            where = {"seed": 100 * seed + slot, "prompt_len": 3, "max_len": 40, "eos_ids": [2], "bad_words_ids": words}
            self.state.assign(slot, SamplingParams(**params), **where)
        self.state.assign(7, SamplingParams(), seed=1, prompt_len=3, max_len=40, alpha=0.5)
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (SLOTS, 50), generator=generator).to(device)
        self.logits = (torch.randn(sum(SPANS) + SLOTS, VOCAB, generator=generator) * 3).to(device)
        first = [sum(SPANS[:slot]) + slot for slot in range(SLOTS)]
        rows = [[row + min(depth, SPANS[slot]) for slot, row in enumerate(first)] for depth in range(DEPTH)]
        noise = torch.randn(DEPTH, SLOTS, VOCAB, generator=generator).to(device)
        self.draft_logits = self.logits[torch.tensor(rows, device=device)] + 0.1 * noise  # near: many drafts stand
        self.lengths = torch.full((SLOTS,), 4, device=device)
        self.drafts = torch.zeros(SLOTS, DEPTH, dtype=torch.int64, device=device)
        self.draft_lens = torch.tensor(SPANS, device=device)
        self.draft_q = torch.zeros(SLOTS, DEPTH, VOCAB, device=device)
        self.slots = torch.arange(SLOTS, device=device)
        self.spans = Spans.of(range(SLOTS), SPANS, device)

    def run(self) -> Verdicts:
        self.lengths.fill_(4)
        self.state.alive.fill_(True)
        where = (self.state, self.tokens, self.lengths, self.drafts)
        for depth in range(DEPTH):
            logits = self.draft_logits[depth]
            propose(logits, self.slots, range(SLOTS), depth, *where, self.draft_q, context=10)
        return judge(self.logits, self.spans, *where, self.draft_lens, self.draft_q, context=10)


def same(found: Verdicts, expected: Verdicts) -> None:
    for span in range(SLOTS):
        count = int(expected.counts[span])
        assert found.packed()[span, : 5 + count].tolist() == expected.packed()[span, : 5 + count].tolist()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_verdicts_equal_those_of_the_cpu(kernels):
    same(Cycle("cuda", kernels).run(), Cycle("cpu").run())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_nothing_waits_for_the_device(kernels):
    cycle = Cycle("cuda", kernels)
    cycle.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle.run()
        cycle.state.assign(0, SamplingParams(logit_bias={1: 2.0}), seed=4, prompt_len=3, max_len=40, eos_ids=[1])
        cycle.state.release(0)
        Spans.of(range(SLOTS), SPANS, "cuda")
        cycle.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_whole_cycle_fits_one_graph(kernels):
    cycle = Cycle("cuda", kernels)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = cycle.run()
    torch.cuda.synchronize()
    cycle.tokens.copy_(Cycle("cuda").tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cycle.run()
    graph.replay()
    torch.cuda.synchronize()
    same(found, expected)
