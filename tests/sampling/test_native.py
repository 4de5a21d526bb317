"""Verdicts in C equal those of torch, and leave tokens, lengths and lives alike."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.edges import outcome
from tests.sampling.test_cuda import Cycle, same
from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.request import SamplingParams
from verifypd.sampling import native, native_draws
from verifypd.sampling.case import Spans
from verifypd.sampling.choose import pick_sampler
from verifypd.sampling.cuts import histogram_threshold, keep_top_p_, sorted_threshold
from verifypd.sampling.draws import best
from verifypd.sampling.philox import gumbel
from verifypd.sampling.rows import LARGEST, clean
from verifypd.sampling.state import SamplingState
from verifypd.sampling.verify import judge

NUMBERS = ("chosen", "ranks", "top_ids", "top")  # of Logprobs
pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler")


def test_they_are_of_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others compare is not torch with itself."""
    calls, real = [], native.verdicts
    monkeypatch.setattr(native, "verdicts", lambda *given: (calls.append(1), real(*given))[1])
    Cycle("cpu", "native").run()
    outcome("native", "greedy", 2, True, 31)
    assert len(calls) == 2
    Cycle("cpu", "torch").run()
    assert len(calls) == 2


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_verdicts_of_every_kind_are_the_same(seed: int) -> None:
    expected, found = Cycle("cpu", "torch", seed), Cycle("cpu", "native", seed)
    same(found.run(), expected.run())
    for name in ("tokens", "lengths", "drafts", "draft_q"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.state.alive, expected.state.alive)


def test_cuts_and_noise_are_of_c(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module, name in ((native, "top_p_threshold"), (native_draws, "gumbel")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, name=name, real=real: (calls.append(name), real(*given))[1])
    Cycle("cpu", "native").run()
    assert set(calls) == {"top_p_threshold", "gumbel"}
    calls.clear()
    Cycle("cpu", "torch").run()
    assert not calls


ROWS = {  # logits of a row, as exotic as they come
    "random": lambda generator, vocab: torch.randn(vocab, generator=generator) * 3,
    "narrow": lambda generator, vocab: torch.randn(vocab, generator=generator) * 1e-4,
    "level": lambda generator, vocab: torch.randint(-3, 3, (vocab,), generator=generator).float(),
    "all alike": lambda generator, vocab: torch.zeros(vocab),
    "one": lambda generator, vocab: torch.full((vocab,), -torch.inf).index_fill_(0, torch.tensor([vocab // 2]), 3.0),
    "none": lambda generator, vocab: torch.full((vocab,), -torch.inf),
    "far apart": lambda generator, vocab: torch.linspace(-LARGEST, LARGEST, vocab),
}


@pytest.mark.parametrize("vocab", [1, 7, 300, 5000])
def test_a_top_p_cut_is_torchs_to_the_bit(vocab: int) -> None:
    """By sorting and by histograms. A share of all keeps all that has any mass, next to nothing the likeliest."""
    generator = torch.Generator().manual_seed(vocab)
    shares = (1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0)
    x = torch.stack([make(generator, vocab) for make in ROWS.values()]).repeat_interleave(len(shares), 0)
    share = torch.tensor(shares * len(ROWS))
    cut = {}
    for find in (native_draws.top_p_threshold, histogram_threshold, sorted_threshold):
        cut[find.__name__] = x.clone()
        keep_top_p_(cut[find.__name__], share, find)
    first, *others = cut.values()
    assert all(torch.equal(first, other) for other in others)
    kept = (first > -torch.inf).sum(-1).view(len(ROWS), -1)
    held = (x > -torch.inf).sum(-1).view(len(ROWS), -1)
    assert (kept[held > 0] >= 1).all() and (kept[:, 1:] >= kept[:, :-1]).all()


@pytest.mark.parametrize("vocab", [1, 4, 255, 257, 1030])
def test_noise_is_philoxs_to_the_bit(vocab: int) -> None:
    """Of any seed, and of columns of another tensor."""
    generator = torch.Generator().manual_seed(vocab)
    keys = torch.randint(-(2**62), 2**62, (9, 3), generator=generator)
    seeds, choices, indices = keys[:, 0], keys[:, 1] % 1000, keys[:, 2] % 100_000
    noise = native_draws.gumbel(seeds, choices, indices, vocab)
    assert noise.shape == (9, vocab) and torch.equal(noise, gumbel(seeds, choices, indices, vocab))
    assert native_draws.gumbel(seeds[:0], choices[:0], indices[:0], vocab).shape == (0, vocab)


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
    """Of what is left without NaN and infinity, whatever lies in the padding; the first where nothing is left."""
    noise = torch.Generator().manual_seed(5)
    for vocab in (1, 9, 255, 256, 700, 1500):
        logits = torch.randint(-6, 7, (9, vocab + 5), generator=noise).float()
        logits[:, vocab:] = 99.0
        for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 2e30)):
            logits[row, torch.randint(vocab, (vocab // 3 + 1,), generator=noise)] = value
        logits[4, :vocab], logits[5, :vocab], logits[6, :vocab] = torch.nan, -torch.inf, torch.inf
        top, own = best(clean(logits, vocab))
        found = native.likeliest(logits, vocab)
        assert torch.equal(found[0], own) and torch.equal(found[1], top)
