"""Cuts, noise and verdicts in Triton equal those of torch: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.sampling.edges import outcome
from tests.sampling.test_cuda import Cycle, same
from verifypd.request import SamplingParams
from verifypd.sampling import triton_noise, triton_state
from verifypd.sampling.case import Finish
from verifypd.sampling.philox import Role, gumbel, uniforms
from verifypd.sampling.rows import DraftVocabulary, Rows
from verifypd.sampling.sampler import propose
from verifypd.sampling.state import SamplingState
from verifypd.sampling.transforms import transform
from verifypd.sampling.triton import draft_
from verifypd.sampling.triton_noise import gumbel_noise, uniform_pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 700  # no multiple of a block


@triton.jit
def noise_kernel(out, noise, seeds, choices, indices, ROLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seed, choice, index = tl.load(seeds + row), tl.load(choices + row), tl.load(indices + row)
    u0, u1 = uniform_pair(seed, choice, index, ROLE)
    one = tl.arange(0, 1)
    tl.store(out + row * 2 + one, u0)
    tl.store(out + row * 2 + 1 + one, u1)
    token = tl.arange(0, BLOCK)
    tl.store(noise + row * BLOCK + token, gumbel_noise(seed, choice, index, token))


def test_noise_is_the_same() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 77], device=DEVICE)
    choices = torch.tensor([0, 1, 2, 0, 5, 2**31], device=DEVICE)
    indices = torch.tensor([0, 1, 1000, 2**32 - 1, 7, 8], device=DEVICE)
    out, noise = torch.zeros(6, 2, device=DEVICE), torch.zeros(6, 512, device=DEVICE)
    noise_kernel[(6,)](out, noise, seeds, choices, indices, ROLE=int(Role.RESIDUAL), BLOCK=512)
    assert torch.equal(out, uniforms(seeds, choices, indices, Role.RESIDUAL)[:, :2])
    torch.testing.assert_close(noise, gumbel(seeds, choices, indices, 512), rtol=1e-6, atol=1e-6)


def test_roles_and_columns_are_the_ones_of_the_state() -> None:
    state = SamplingState(1, 10, 1)
    names = {"TEMPERATURE": "temperature", "TOP_P": "top_p", "LOG_MIN_P": "log_min_p", "ALPHA": "alpha"}
    integers = ("TOP_K", "SEED", "CHOICE", "PROMPT_LEN", "MAX_LEN", "MODE")
    for table, each in ((state.floats, names), (state.integers, {name: name.lower() for name in integers})):
        for constant, attribute in each.items():
            getattr(state, attribute).fill_(5)
            assert table[0, getattr(triton_state, constant).value] == 5
            table.zero_()
    assert state.floats.shape[1] == triton_state.FLOATS.value
    assert state.integers.shape[1] == triton_state.INTEGERS.value
    for role in (Role.DRAFT, Role.ACCEPT, Role.RESIDUAL, Role.GUMBEL, Role.SYNTHETIC):
        assert getattr(triton_noise, f"{role.name}_ROLE").value == role
    for finish in (Finish.STOP, Finish.LENGTH, Finish.ERROR):
        assert getattr(triton_state, finish.name).value == finish


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0, "top_p": 0.5, "top_k": 3},  # greedy: feels none of them
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 699, "temperature": 1.3},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.8},
    {"min_p": 0.05, "top_p": 0.7},
    {"top_k": 10, "top_p": 0.5, "acceptance": "coupled"},
    {"top_k": 200, "top_p": 0.999},
]


def cut(kernels: str, logits: torch.Tensor, heat: bool) -> torch.Tensor:
    state = SamplingState(len(CUTS), VOCAB, 1, DEVICE, kernels)
    for slot, params in enumerate(CUTS):
        state.assign(slot, SamplingParams(**params), seed=1, prompt_len=1, max_len=9)
    ids = range(len(CUTS))
    slots = torch.arange(len(CUTS), device=DEVICE)
    rows = Rows(slots, torch.zeros_like(slots), torch.ones_like(slots))
    table = torch.zeros(len(CUTS), 4, dtype=torch.int64, device=DEVICE)
    scale = torch.linspace(0.6, 1.6, len(CUTS), device=DEVICE) if heat else None
    return transform(logits.to(DEVICE), rows, state, table, table, state.needs(ids), temperature_scale=scale).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "peaked", "masked", "heated"])
def test_what_is_kept_is_the_same_to_the_bit(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(CUTS), VOCAB, generator=generator) * 3
    if kind == "ties":
        logits = (logits * 2).round() / 2
        logits[:, ::3] *= -0.0  # zeros of either sign are level
    if kind == "flat":
        logits.fill_(1.5)
    if kind == "peaked":
        logits[:, 13] = 80.0
    if kind == "masked":
        logits[:, 5:] = -torch.inf
        logits[3:5] = -torch.inf
        logits[6, 2] = torch.nan
    expected, found = (cut(kernels, logits, kind == "heated") for kernels in ("torch", "triton"))
    assert torch.equal(found == -torch.inf, expected == -torch.inf), [
        (CUTS[row], int((expected[row] > -torch.inf).sum()), int((found[row] > -torch.inf).sum()))
        for row in range(len(CUTS))
        if not torch.equal(found[row], expected[row])
    ]
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [8, 9])
def test_verdicts_of_every_kind_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.sampling.test_cuda.VOCAB", VOCAB)
    expected, found = Cycle(DEVICE, "torch", seed), Cycle(DEVICE, "triton", seed)
    same(found.run(), expected.run())
    for name in ("tokens", "lengths", "drafts"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(found.draft_q, expected.draft_q, rtol=1e-5, atol=1e-7)
    assert torch.equal(found.state.alive, expected.state.alive)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize(("depth", "point"), [(0, False), (2, False), (4, True)])
def test_verdicts_at_the_edges(acceptance: str, depth: int, point: bool) -> None:
    found, expected = (outcome(kernels, acceptance, depth, point, 31, DEVICE) for kernels in ("triton", "torch"))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "mapped", "dtype"),
    [
        (VOCAB, False, torch.bfloat16),
        (VOCAB + 20, False, torch.float32),
        (VOCAB - 90, False, torch.bfloat16),
        (300, True, torch.float32),
    ],
)
def test_a_draft_token_in_one_launch_is_the_one_of_many(
    width: int, mapped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits as a drafter has them, narrow, padded or of other ids, with NaN and infinities among them: widened,
    cleaned, heated, cut and drawn as one after the other; void rows are skipped. Slots come in another order."""
    monkeypatch.setattr("verifypd.sampling.triton.ROW_TOKENS", 512)  # a row is read in several turns
    generator = torch.Generator().manual_seed(width)
    count = len(CUTS) + 3
    synthetic, nothing, padded = range(len(CUTS), count)  # slots; the last two are greedy
    logits = torch.randn(count, width, generator=generator) * 3
    logits[1, 5], logits[2, 7], logits[4, 8] = torch.nan, torch.inf, torch.inf
    logits[9], logits[2, 0] = torch.nan, -torch.inf
    logits[synthetic] = logits[synthetic].round()  # level ones, of which the first in the verifier's order counts
    logits[2, 100:120] = torch.inf
    logits[nothing] = torch.nan  # token 0
    logits[[synthetic, padded], VOCAB:] = 1e4  # padding, of which none is chosen
    order = [*reversed(range(count))]
    slots = torch.tensor([*order, -1], device=DEVICE)
    logits = logits[[*order, 0]].to(DEVICE, dtype)
    vocab_map = torch.randperm(VOCAB, generator=generator)[:width].to(DEVICE) if mapped else None
    scale = torch.linspace(0.6, 1.6, count).to(DEVICE)
    tokens = torch.zeros(count, 4, dtype=torch.int64, device=DEVICE)
    lengths = torch.arange(1, count + 1, device=DEVICE)
    found = []
    for at_once in (False, True):
        state = SamplingState(count, VOCAB, 2, DEVICE, "triton")
        greedy: dict[str, Any] = {"temperature": 0.0}
        for slot, params in enumerate([*CUTS, {"temperature": 0.9}, greedy, greedy]):
            alpha = 0.5 if slot == synthetic else -1.0
            state.assign(slot, SamplingParams(**params), seed=slot, prompt_len=1, max_len=9, alpha=alpha)
        drafts = torch.full((count, 2), -7, device=DEVICE)
        draft_q = torch.zeros(count, 2, VOCAB, device=DEVICE)
        if at_once:
            known = None if vocab_map is None else DraftVocabulary.of(vocab_map, VOCAB)
            draft_(logits, known, slots, 1, state, lengths, drafts, draft_q, scale)
        else:
            propose(
                logits[:-1].float(), slots[:-1], order, 1, state, tokens, lengths, drafts, draft_q,
                temperature_scale=scale, vocab_map=vocab_map,
            )  # fmt: skip
        found.append((drafts, draft_q))
    (one, one_q), (other, other_q) = found
    assert torch.equal(one, other) and (one[:, 0] == -7).all() and (one[:, 1] >= 0).all()
    assert one[nothing, 1] == 0
    assert one_q[:, 1].any() and not one_q[:, 0].any()
    # compiled, another kernel may add up in another order
    torch.testing.assert_close(other_q, one_q, rtol=0 if DEVICE == "cpu" else 1e-6, atol=0)
