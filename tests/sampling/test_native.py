"""Drafts and verdicts in C: greedy and coupled tokens are torch's to the bit, drawn ones have the same law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sampling.edges import outcome
from tests.sampling.test_cuda import Cycle, same
from tests.sampling.test_distribution import EXTRA, TRANSFORMS, along_the_span, passes, speculate
from tests.sampling.toy import Toy
from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.request import SamplingParams
from verifypd.sampling import native, verify
from verifypd.sampling.case import Spans
from verifypd.sampling.choose import implementation, pick_sampler
from verifypd.sampling.draws import best, noise_keys
from verifypd.sampling.philox import gumbel
from verifypd.sampling.rows import LARGEST, DraftVocabulary, clean
from verifypd.sampling.sampler import propose
from verifypd.sampling.state import SamplingState
from verifypd.sampling.torch import TorchSampling
from verifypd.sampling.verify import judge

NUMBERS = ("chosen", "ranks", "top_ids", "top")  # of Logprobs
pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of C was called, each verdict of torch, and each time that it judged some spans for C."""
    made: list[str] = []
    for owner, name in (
        (implementation("native"), "direct"),
        (native, "propose_"),
        (TorchSampling, "judge"),
        (verify, "outcome"),
    ):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, name=name, real=real: (made.append(name), real(*given))[1])
    return made


def test_they_are_of_c(calls: list[str]) -> None:
    """What the others compare is not torch with itself."""
    Cycle("cpu", "native").run()
    assert calls == ["propose_", "propose_", "direct"]
    outcome("native", "greedy", 2, True, 31)
    assert calls[3:] == ["direct"]
    Cycle("cpu", "torch").run()
    assert calls[4:] == ["judge"]


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_verdicts_of_every_kind_are_the_same(seed: int) -> None:
    expected, found = Cycle("cpu", "torch", seed), Cycle("cpu", "native", seed)
    same(found.run(), expected.run())
    for name in ("tokens", "lengths", "drafts"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(found.draft_q, expected.draft_q, rtol=1e-5, atol=1e-12)
    assert torch.equal(found.state.alive, expected.state.alive)


ROWS = {  # logits of a row, as exotic as they come
    "random": lambda generator, vocab: torch.randn(vocab, generator=generator) * 3,
    "narrow": lambda generator, vocab: torch.randn(vocab, generator=generator) * 1e-4,
    "level": lambda generator, vocab: torch.randint(-3, 3, (vocab,), generator=generator).float(),
    "all alike": lambda generator, vocab: torch.zeros(vocab),
    "one": lambda generator, vocab: torch.full((vocab,), -torch.inf).index_fill_(0, torch.tensor([vocab // 2]), 3.0),
    "none": lambda generator, vocab: torch.full((vocab,), -torch.inf),
    "far apart": lambda generator, vocab: torch.linspace(-LARGEST, LARGEST, vocab),
    "not numbers": lambda generator, vocab: torch.full((vocab,), torch.nan).index_fill_(
        0, torch.tensor([0]), torch.inf
    ),
}
CUTS: list[dict[str, Any]] = [
    {"top_p": share} for share in (1e-6, 0.1, 0.5001, 0.9, 0.95, 0.9999)
] + [
    {"temperature": 0.3}, {"min_p": 0.05}, {"top_k": 1}, {"top_k": 40}, {"top_k": 4000},
    {"top_k": 9, "top_p": 0.7}, {"min_p": 0.01, "top_k": 30, "top_p": 0.9, "temperature": 1.7},
]  # fmt: skip


def drafted(
    kernels: str, rows: Tensor, vocab: int, vocab_map: Tensor | None, acceptance: str, scale: float
) -> tuple[Tensor, Tensor]:
    """A draft of each row under each of the cuts, and what it was drawn from."""
    count = len(rows) * len(CUTS)
    state = SamplingState(count, vocab, 1, "cpu", kernels)
    for slot in range(count):
        params = SamplingParams(acceptance=acceptance, **CUTS[slot % len(CUTS)])
        state.assign(slot, params, seed=slot, prompt_len=2, max_len=9)
    drafts, q = torch.zeros(count, 1, dtype=torch.int64), torch.full((count, 1, vocab), torch.nan)
    tokens, lengths, slots = torch.zeros(count, 9, dtype=torch.int64), torch.full((count,), 3), torch.arange(count)
    propose(
        rows.repeat_interleave(len(CUTS), 0), slots, range(count), 0, state, tokens, lengths, drafts, q,
        temperature_scale=torch.full((count,), scale), vocab_map=vocab_map,
    )  # fmt: skip
    return drafts[:, 0], q[:, 0]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("vocab", [1, 7, 300, 5000])
def test_drafts_and_what_they_were_drawn_from(vocab: int, mapped: bool) -> None:
    """Two draws of the largest vocabulary may lie at a rounding."""
    generator = torch.Generator().manual_seed(vocab)
    known = max(1, vocab // 3) if mapped else vocab
    vocab_map = DraftVocabulary.of(torch.randperm(vocab, generator=generator)[:known], vocab).names if mapped else None
    rows = torch.stack([make(generator, known) for make in ROWS.values()])
    for scale in (1.0, 0.7):
        (found, q), (expected, p) = (
            drafted(kernels, rows, vocab, vocab_map, "rejection", scale) for kernels in ("native", "torch")
        )
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)  # the last token of a cut may lie at a rounding
        assert (q.gather(1, found[:, None]) > 0).all()
        assert (found != expected).sum() <= (0 if vocab < 5000 else 2)
        found, expected = (
            drafted(kernels, rows, vocab, vocab_map, "coupled", scale)[0] for kernels in ("native", "torch")
        )
        assert torch.equal(found, expected)


def chosen(kernels: str, logits: Tensor, vocab: int, seeds: Sequence[int] | None = None, **params: Any) -> list[int]:
    """The token of each row, without drafts; seeds: the rows' numbers."""
    count = len(logits)
    state = SamplingState(count, vocab, 1, "cpu", kernels)
    for slot in range(count):
        state.assign(slot, SamplingParams(**params), seed=seeds[slot] if seeds else slot, prompt_len=1, max_len=9)
    tokens, none = torch.zeros(count, 9, dtype=torch.int64), torch.zeros(count, 1, dtype=torch.int64)
    spans = Spans.of(range(count), [0] * count, "cpu")
    return judge(logits, spans, state, tokens, torch.full((count,), 2), none, none[:, 0]).tokens[:, 0].tolist()


@pytest.mark.parametrize("cuts", [{}, {"temperature": 0.4}, {"top_p": 0.9}, {"top_k": 50}], ids=str)
@pytest.mark.parametrize("vocab", [4, 255, 257, 49_152])
def test_coupled_tokens_are_torchs(vocab: int, cuts: dict[str, Any]) -> None:
    """Noise decides nearly alone, half, or hardly."""
    generator = torch.Generator().manual_seed(vocab)
    for spread in (0.1, 2.0, 8.0):
        logits = torch.randn(40, vocab + 3, generator=generator) * spread
        found, expected = (
            chosen(kernels, logits, vocab, acceptance="coupled", **cuts) for kernels in ("native", "torch")
        )
        assert found == expected


def test_where_rounding_decides_torch_does(calls: list[str]) -> None:
    """The share that top_p asks for is that of the first token, to the bit: whether exp gives half decides."""
    logits = torch.tensor([[0.0, -0.6931472, -0.6931472]]).repeat(50, 1)
    cuts = {"acceptance": "coupled", "top_p": 0.5}
    assert chosen("native", logits, 3, **cuts) == chosen("torch", logits, 3, **cuts)
    assert calls == ["direct", "outcome", "judge"]
    calls.clear()
    chosen("native", logits, 3, **{**cuts, "top_p": 0.6})
    chosen("native", logits, 3, **{**cuts, "acceptance": "rejection"})  # the law does not see it
    assert calls == ["direct", "direct"]


def test_noise_that_is_as_good_is_torchs(calls: list[str]) -> None:
    """Two tokens with the same score after noise: rounding decides."""
    state = SamplingState(1, 2, 1, "cpu", "torch")
    state.assign(0, SamplingParams(acceptance="coupled"), seed=0, prompt_len=1, max_len=9)
    noise = gumbel(*noise_keys(torch.tensor([0]), torch.tensor([2]), state), 2)[0]
    logits = torch.stack([torch.zeros(()), noise[0] - noise[1]])[None]
    assert chosen("native", logits, 2, acceptance="coupled") == chosen("torch", logits, 2, acceptance="coupled")
    assert calls == ["direct", "outcome", "judge"]
    calls.clear()
    chosen("native", logits + torch.tensor([0.0, 1e-3]), 2, acceptance="coupled")
    assert calls == ["direct"]


def test_tokens_of_one_weight_are_told_apart_as_torch_does() -> None:
    """Their scores differ by a bit, and exp makes them one; with top_k, too, torch keeps the first alone."""
    score = np.float32(0.3)
    logits = torch.tensor([[score, np.nextafter(score, np.float32(0)), -1.0]]).repeat(50, 1)
    cuts = {"acceptance": "coupled", "top_p": 0.5}
    for more in ({}, {"top_k": 2}):
        assert chosen("native", logits, 3, **cuts, **more) == chosen("torch", logits, 3, **cuts, **more)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.9999])
def test_a_seeded_text_does_not_depend_on_who_else_is_there(share: float, calls: list[str]) -> None:
    """Cuts among hundreds of nearly equal tokens, beside requests that torch judges; few of the former are."""
    vocab, cuts = 2000, {"acceptance": "coupled", "top_p": share}
    rows = torch.randn(300, vocab, generator=torch.Generator().manual_seed(5)) * 0.01
    expected = chosen("torch", rows, vocab, **cuts)
    calls.clear()
    for r in range(0, len(rows), 5):
        assert chosen("native", rows[r : r + 1], vocab, seeds=[r], **cuts) == expected[r : r + 1]
    assert calls.count("outcome") <= 1
    close = torch.full((1, vocab), -50.0)
    close[0, :3] = torch.tensor([0.0, -0.6931472, -0.6931472])
    assert chosen("native", torch.cat([rows, close]), vocab, **cuts)[:-1] == expected


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_texts_of_thousands_are_torchs(name: str, acceptance: str) -> None:
    texts = []
    for kernels in ("torch", "native"):
        params = SamplingParams(max_tokens=None, **TRANSFORMS[name])
        toy = Toy(params, acceptance=acceptance, kernels=kernels, requests=5000, **EXTRA.get(name, {}))
        if name == "min_tokens":
            toy.state.stop_ids.fill_(-1)
        texts.append(toy.run(3, speculate))
    assert (texts[0] != texts[1]).any(1).sum() <= (2 if acceptance == "rejection" else 0)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("tau", [0.6, 1.6])
def test_the_law_of_each_place_of_a_span(tau: float, acceptance: str) -> None:
    """As of torch in test_distribution."""
    near = torch.randn(5, 5, generator=torch.Generator().manual_seed(3)) * 0.5
    toy = Toy(
        SamplingParams(temperature=0.8), vocab=5, depth=3, acceptance=acceptance, requests=12_000, kernels="native"
    )
    toy.drafter = toy.verifier + near
    toy.draft(scale=tau)
    verdicts = toy.judge()
    found = along_the_span(toy, verdicts.tokens.numpy(), verdicts.counts.numpy())
    assert set(found) == {0, 1, 2, 3}
    assert all(passes(result) for results in found.values() for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["greedy", "rejection", "coupled"])
@pytest.mark.parametrize(("depth", "point"), [(0, False), (1, True), (2, False), (4, True)])
def test_verdicts_at_the_edges(acceptance: str, depth: int, point: bool) -> None:
    for seed in range(31, 51):
        found, expected = (outcome(kernels, acceptance, depth, point, seed) for kernels in ("native", "torch"))
        assert found == expected


def test_which_sampler_a_cpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert [pick_sampler(name, cpu) for name in ("auto", "native", "torch")] == ["native", "native", "torch"]
    monkeypatch.setenv("VERIFYPD_NATIVE", "0")
    assert pick_sampler("auto", cpu) == "torch"
    with pytest.raises(ConfigError, match="--sampler native does not run on cpu here: it needs a CPU and a C compiler"):
        pick_sampler("native", cpu)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_uneven_spans_whose_rows_say_it_all(logprobs: int | None) -> None:
    """Greedy and coupled side by side, with stop ids and without, drafts beyond the vocabulary, more on the device than
    are judged."""
    for seed in range(40):
        results = []
        for kernels in ("torch", "native"):
            noise = torch.Generator().manual_seed(seed)
            count, vocab, depth = 6, 9, torch.randint(0, 4, (6,), generator=noise).tolist()
            state = SamplingState(count, vocab, 3, "cpu", kernels)
            for slot in range(count):
                params = SamplingParams(
                    temperature=float(slot % 2), acceptance="coupled", ignore_eos=seed % 2 == 0, max_tokens=8,
                    stop_token_ids=[slot] if seed % 4 == 1 else [], logprobs=logprobs,
                )  # fmt: skip
                state.assign(slot, params, seed=slot, prompt_len=2, max_len=5 + slot % 3, eos_ids=[0])
            logits = 2 * torch.randn(sum(depth) + count, vocab, generator=noise)
            tokens, lengths = torch.zeros(count, 12, dtype=torch.int64), torch.full((count,), 3)
            drafts, lens = torch.randint(-1, vocab + 2, (count, 3), generator=noise), torch.full((count,), 3)
            first = 0
            for slot in range(0, count, 2):  # many stand
                first = sum(depth[:slot]) + slot
                drafts[slot, : depth[slot]] = logits[first : first + depth[slot]].argmax(-1)
            order = torch.randperm(count, generator=noise).tolist() if seed % 3 == 0 else list(range(count))
            spans = Spans.of(order, depth, "cpu")
            verdicts = judge(logits, spans, state, tokens, lengths, drafts, lens, None, [True] * count)
            told = verdicts.packed().tolist()
            results.append([
                [row[: 5 + row[0]] for row in told], tokens.tolist(), lengths.tolist(), state.alive.tolist(),
                [getattr(verdicts.logprobs, name).tolist() for name in NUMBERS] if logprobs else None,
            ])  # fmt: skip
        assert results[0] == results[1]


def test_the_likeliest_token_is_the_first_of_the_best() -> None:
    """Of what is left without NaN and infinity, whatever lies in the padding."""
    noise = torch.Generator().manual_seed(5)
    for vocab in (2, 9, 255, 256, 700, 1500):
        logits = torch.randint(-6, 7, (6, vocab + 5), generator=noise).float()
        logits[:, vocab:] = 99.0
        for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 2e30)):
            logits[row, torch.randint(vocab, (vocab // 3 + 1,), generator=noise)] = value
        logits[4, :vocab] = torch.inf
        assert chosen("native", logits, vocab, temperature=0.0) == best(clean(logits, vocab))[1].tolist()
