"""A batch of verdicts in which everything happens that seldom does."""

from __future__ import annotations

import torch

from verifypd.request import SamplingParams
from verifypd.sampling.case import Spans
from verifypd.sampling.state import SamplingState
from verifypd.sampling.verify import judge


def outcome(kernels: str, acceptance: str, depth: int, point: bool, seed: int, device: str = "cpu") -> list[list[int]]:
    """Verdicts of nine requests with stop ids, limits, a dead slot, short drafts and hopeless rows."""
    count, vocab = 9, 40
    state = SamplingState(count, vocab, max(depth, 1), device, kernels)
    for slot in range(count):
        params = SamplingParams(
            temperature=0.0 if acceptance == "greedy" else 0.9,
            acceptance=None if acceptance == "greedy" else acceptance,
            stop_token_ids=[*range(1, 12)] if slot == 8 else [1, 2, 3][: slot % 4],  # more than are read at once
            max_tokens=20,
        )
        state.assign(slot, params, seed=seed + slot, prompt_len=3, max_len=5 if slot % 5 == 0 else 20, eos_ids=[0])
    state.release(7)
    generator = torch.Generator().manual_seed(seed)
    verifier = torch.randn(count, depth + 1, vocab, generator=generator) * 2
    verifier[4, depth // 2] = -torch.inf
    q = (verifier[:, : max(depth, 1)] + torch.randn(count, max(depth, 1), vocab, generator=generator)).softmax(-1)
    q[4] = 1 / vocab
    drafts = q.flatten(0, 1).multinomial(1, generator=generator).view(count, -1)
    if depth:  # beyond its greatest length slot 5 has no token to take; slot 6 has none and token 0 is drafted for it
        verifier[5, 0], verifier[5, 1], verifier[6, 0] = 30.0 * verifier[5, 0], -torch.inf, -torch.inf
        drafts[5, 0], drafts[6, 0] = verifier[5, 0].argmax(), 0
        for slot in (5, 6):
            q[slot, 0] = torch.nn.functional.one_hot(drafts[slot, 0], vocab)
    tokens = torch.randint(0, vocab, (count, 40), generator=generator)
    lengths, lens = torch.full((count,), 4), torch.full((count,), depth)
    lens[3] = min(depth, 1)
    tokens, lengths, drafts, lens, q = (x.to(device) for x in (tokens, lengths, drafts, lens, q))
    spans = Spans.of(range(count), [depth] * count, device)
    points = [point and slot % 2 == 0 for slot in range(count)]
    verdicts = judge(
        verifier.flatten(0, 1).to(device), spans, state, tokens, lengths, drafts, lens, q if depth else None, points
    )
    counts = verdicts.counts.tolist()
    return [row[: 5 + n] for row, n in zip(verdicts.packed().tolist(), counts, strict=True)] + [
        *tokens.tolist(),
        lengths.tolist(),
        state.alive.tolist(),
    ]
