from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sampling.toy import chi_square
from verifypd.kernels import build
from verifypd.request import SamplingParams
from verifypd.sampling.case import Finish, Spans, Verdicts
from verifypd.sampling.draws import draw
from verifypd.sampling.state import SamplingState
from verifypd.sampling.torch import leading, residual
from verifypd.sampling.verify import judge

NEVER = float("-inf")
needs_compiler = pytest.mark.skipif(build.library() is None, reason="needs a C compiler")
MODES = {"greedy": {"temperature": 0}, "rejection": {}, "coupled": {"acceptance": "coupled"}}


class Slots:
    """A few slots whose verifier is certain of what comes next."""

    def __init__(self, slots: int = 1, vocab: int = 40, depth: int = 4, kernels: str = "torch") -> None:
        self.state = SamplingState(slots, vocab, depth, kernels=kernels)
        self.tokens = torch.full((slots, 50), 9)
        self.lengths = torch.full((slots,), 5)
        self.drafts = torch.zeros(slots, depth, dtype=torch.int64)
        self.draft_lens = torch.zeros(slots, dtype=torch.int64)

    def assign(self, slot: int = 0, *, max_len: int = 45, eos_ids: tuple[int, ...] = (), **params: object) -> None:
        params = {"temperature": 0, **params}
        self.state.assign(slot, SamplingParams(**params), seed=slot, prompt_len=3, max_len=max_len, eos_ids=eos_ids)

    def propose(self, drafts: list[int], slot: int = 0) -> None:
        self.drafts[slot, : len(drafts)] = torch.tensor(drafts)
        self.draft_lens[slot] = len(drafts)

    def judge(self, certain: list[list[int]], slot_ids: list[int] | None = None, **options: object) -> Verdicts:
        """certain: for each span the token that each of its rows is sure of."""
        logits = torch.stack([self.sure(token) for span in certain for token in span])
        return self.judge_logits(logits, [len(span) - 1 for span in certain], slot_ids, **options)

    def judge_logits(self, logits, depth, slot_ids=None, **options):
        spans = Spans.of(slot_ids or list(range(len(depth))), depth, "cpu")
        where = (self.tokens, self.lengths, self.drafts, self.draft_lens)
        return judge(logits, spans, self.state, *where, **options)

    def sure(self, token: int) -> torch.Tensor:
        return torch.zeros(self.state.vocab).index_fill(0, torch.tensor(token), 60.0)


def emitted(verdicts: Verdicts) -> list[list[int]]:
    return [row[:count] for row, count in zip(verdicts.tokens.tolist(), verdicts.counts.tolist(), strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_drafts_stand_as_long_as_the_verifier_agrees(mode):
    slots = Slots()
    slots.assign(**{"temperature": 1, **MODES[mode]})
    slots.propose([11, 12, 13, 14])
    verdicts = slots.judge([[11, 12, 20, 21, 22]])
    assert emitted(verdicts) == [[11, 12, 20]]
    assert (verdicts.accepted.item(), verdicts.drafted.item(), verdicts.finish.item()) == (2, 4, Finish.RUNNING)
    assert slots.lengths.item() == 8
    assert slots.tokens[0, 4:10].tolist() == [9, 11, 12, 20, 9, 9]
    assert slots.state.alive.item()


def test_all_drafts_stand_and_the_bonus_follows():
    slots = Slots()
    slots.assign()
    slots.propose([11, 12])
    assert emitted(slots.judge([[11, 12, 13]])) == [[11, 12, 13]]


def test_the_device_may_hold_fewer_drafts_than_the_span_has_rows():
    slots = Slots()
    slots.assign()
    slots.propose([11, 12, 13])
    slots.draft_lens[0] = 1
    verdicts = slots.judge([[11, 12, 13, 14]])
    assert emitted(verdicts) == [[11, 12]]
    assert (verdicts.accepted.item(), verdicts.drafted.item()) == (1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_id_inside_the_drafts_cuts_there(mode):
    slots = Slots()
    slots.assign(**{"temperature": 1, "stop_token_ids": [30, 12], **MODES[mode]})
    slots.propose([11, 12, 13])
    verdicts = slots.judge([[11, 12, 13, 14]])
    assert emitted(verdicts) == [[11, 12]]
    assert verdicts.accepted.item() == 2  # two drafts stand and are emitted; the third stood, but after the stop
    assert (verdicts.finish.item(), verdicts.stop_token.item()) == (Finish.STOP, 12)
    assert not slots.state.alive.item()
    assert slots.tokens[0, 5:9].tolist() == [11, 12, 9, 9]


def test_eos_ends_unless_ignored_and_may_be_the_correction():
    for ignore, finish in ((False, Finish.STOP), (True, Finish.RUNNING)):
        slots = Slots()
        slots.assign(eos_ids=(0, 39), ignore_eos=ignore)
        slots.propose([11, 12])
        verdicts = slots.judge([[11, 39, 1]])
        assert emitted(verdicts) == [[11, 39]]
        assert verdicts.finish.item() == finish
        assert verdicts.stop_token.item() == (-1 if ignore else 39)


def test_a_stop_id_that_was_drafted_but_fell_ends_nothing():
    slots = Slots()
    slots.assign(stop_token_ids=[13])
    slots.propose([11, 12, 13])
    verdicts = slots.judge([[11, 20, 13, 13]])
    assert emitted(verdicts) == [[11, 20]]
    assert verdicts.finish.item() == Finish.RUNNING


@pytest.mark.parametrize(("max_len", "count", "accepted"), [(6, 1, 1), (7, 2, 2), (8, 3, 2), (9, 3, 2)])
def test_the_greatest_length_cuts_inside_the_drafts(max_len, count, accepted):
    slots = Slots()
    slots.assign(max_len=max_len)
    slots.propose([11, 12])
    verdicts = slots.judge([[11, 12, 13]])
    assert (verdicts.counts.item(), verdicts.accepted.item()) == (count, accepted)
    assert verdicts.finish.item() == (Finish.LENGTH if max_len <= 8 else Finish.RUNNING)
    assert slots.lengths.item() == 5 + count


def test_a_stop_at_the_last_place_is_a_stop():
    slots = Slots()
    slots.assign(max_len=6, stop_token_ids=[11])
    assert slots.judge([[11]]).finish.item() == Finish.STOP


def test_min_tokens_keeps_stop_ids_away_row_by_row():
    """Output 2 is confirmed, min_tokens is 4: the ids are forbidden in the first two rows of the span."""
    slots = Slots()
    slots.assign(min_tokens=4, eos_ids=(7,), stop_token_ids=[8])
    slots.propose([1, 2])
    logits = torch.zeros(3, 40)
    logits[:, 7], logits[:, 8], logits[0, 1], logits[1, 2] = 9.0, 8.0, 5.0, 5.0
    assert emitted(slots.judge_logits(logits, [2])) == [[1, 2, 7]]


def test_a_dead_slot_emits_nothing_and_keeps_its_tokens():
    slots = Slots(2)
    slots.assign(0)
    slots.assign(1)
    slots.state.release(0)
    slots.propose([11], 0)
    slots.propose([11], 1)
    before = slots.tokens[0].clone()
    verdicts = slots.judge([[11, 12], [11, 12]])
    assert verdicts.counts.tolist() == [0, 2]
    assert verdicts.accepted.tolist() == [0, 1]
    assert verdicts.drafted.tolist() == [0, 1]
    assert verdicts.finish.tolist() == [0, 0]
    assert torch.equal(slots.tokens[0], before)
    assert slots.lengths.tolist() == [5, 7]


def test_nothing_is_emitted_after_the_end():
    """The host is one step behind: the next span of a request that just ended is void."""
    slots = Slots()
    slots.assign(stop_token_ids=[11])
    slots.judge([[11]])
    verdicts = slots.judge([[12]])
    assert verdicts.counts.item() == 0
    assert slots.lengths.item() == 6


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_any_token_harm_their_own_request_only(mode):
    slots = Slots(4)
    for slot in range(4):
        slots.assign(slot, **{"temperature": 1, **MODES[mode]})
        slots.propose([0, 12], slot)
    dead = torch.full((40,), float("nan"))
    some = slots.sure(0).index_fill(0, torch.tensor([1, 2, 3]), float("nan"))
    fine = [slots.sure(0), slots.sure(12), slots.sure(13)]
    rows = [*fine, dead, *fine[1:], some, *fine[1:], slots.sure(3), dead, torch.full((40,), NEVER)]
    verdicts = slots.judge_logits(torch.stack(rows), [2] * 4)
    assert emitted(verdicts) == [[0, 12, 13], [], [0, 12, 13], [3]]
    assert verdicts.finish.tolist() == [Finish.RUNNING, Finish.ERROR, Finish.RUNNING, Finish.RUNNING]
    assert verdicts.accepted.tolist() == [2, 0, 2, 0]
    assert slots.state.alive.tolist() == [True, False, True, True]
    assert slots.lengths.tolist() == [8, 5, 8, 6]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
def test_drafts_before_a_row_without_tokens_stand(mode, kernels):
    slots = Slots(kernels=kernels)
    slots.assign(**{"temperature": 1, **MODES[mode]})
    slots.propose([11, 12, 13])
    dead = torch.full((40,), float("nan"))
    verdicts = slots.judge_logits(torch.stack([slots.sure(11), slots.sure(12), dead, dead]), [3])
    assert (emitted(verdicts), verdicts.accepted.item(), verdicts.finish.item()) == ([[11, 12]], 2, Finish.ERROR)
    assert slots.tokens[0, 5:8].tolist() == [11, 12, 9] and slots.lengths.item() == 7
    assert not slots.state.alive.item()


def test_a_stop_before_a_row_without_tokens_is_a_stop():
    slots = Slots()
    slots.assign(stop_token_ids=[11])
    slots.propose([11])
    verdicts = slots.judge_logits(torch.stack([slots.sure(11), torch.full((40,), float("nan"))]), [1])
    assert (emitted(verdicts), verdicts.finish.item()) == ([[11]], Finish.STOP)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", [0, 39])
def test_tokens_at_the_ends_of_the_vocabulary(mode, token):
    slots = Slots()
    slots.assign(**{"temperature": 1, **MODES[mode]})
    slots.propose([token])
    wide = torch.nn.functional.pad(torch.stack([slots.sure(token)] * 2), (0, 24), value=99.0)  # padding never wins
    assert emitted(slots.judge_logits(wide, [1])) == [[token, token]]


def test_greedy_ties_go_to_the_lowest_id():
    slots = Slots()
    slots.assign()
    slots.propose([3])
    logits = torch.zeros(2, 40)
    logits[:, [3, 17, 39]] = 2.0
    assert emitted(slots.judge_logits(logits, [1])) == [[3, 3]]


def test_a_mask_forbids_tokens_row_by_row():
    slots = Slots()
    slots.assign()
    slots.propose([11])
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 12] = False
    verdicts = slots.judge([[11, 12]], mask=mask)
    assert emitted(verdicts) == [[11, 0]]
    packed = torch.full((2, 2), -1, dtype=torch.int32)
    packed[0, 0] = ~(1 << 11)
    slots.propose([11])
    assert emitted(slots.judge([[11, 12]], mask=packed)) == [[0]]


def test_drawn_drafts_need_their_distribution():
    slots = Slots()
    slots.assign(temperature=1)
    with pytest.raises(ValueError, match="draft_q"):
        slots.judge([[11, 12]], point_mass=[False])


def test_verdicts_travel_in_one_tensor():
    slots = Slots()
    slots.assign(stop_token_ids=[12])
    slots.propose([11, 12])
    assert slots.judge([[11, 12, 13]]).packed().tolist() == [[2, 2, 2, Finish.STOP, 12, 11, 12, 13]]


def test_drafts_stand_up_to_the_first_that_falls():
    stands = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    assert leading(stands).tolist() == [1, 3, 0]


def test_residual_is_what_q_leaves():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.9, 0.0, 0.1]])
    assert torch.allclose(residual(p, q), torch.tensor([[0.0, 0.3, 0.1]]))


@pytest.mark.parametrize("vocab", [5, 64, 300, 1000])
def test_draw_never_takes_a_token_without_weight(vocab):
    one_below = 1 - 2.0**-24
    for held in ([0], [vocab - 1], [2, 3], [1, vocab - 2]):
        weights = torch.zeros(4, vocab)
        weights[:, held] = torch.tensor([1.0, 1e-30, 3e-39, 0.7])[:, None]
        for u in ((0.0, 0.0), (one_below, one_below), (one_below, 0.0), (0.0, one_below)):
            drawn = draw(weights, torch.tensor([u] * 4)).tolist()
            assert set(drawn) <= set(held)


@pytest.mark.parametrize("vocab", [7, 700])
def test_draw_follows_the_weights(vocab):
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(vocab, generator=generator) ** 4 * 3  # not normalised
    weights[::5] = 0
    drawn = draw(weights.expand(20_000, -1), torch.rand(20_000, 2, generator=generator))
    excess, p_value = chi_square(
        np.bincount(drawn.numpy(), minlength=vocab), (weights.double() / weights.double().sum()).numpy()
    )
    assert excess < 1
    assert p_value > 1e-6


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
def test_a_draft_as_likely_as_another_token_stands_half_the_time_at_the_lowest_temperature(kernels):
    """Scores over it are 1e8, where neighbouring float32 numbers are 8 apart."""
    slots = Slots(400, kernels=kernels)
    for slot in range(400):
        slots.assign(slot, temperature=1e-5)
        slots.propose([1], slot)
    logits = torch.zeros(800, 40)
    logits[:, [1, 6]] = 1000.0
    stood = slots.judge_logits(logits, [1] * 400).accepted.sum().item()
    assert 150 < stood < 250


def test_equal_distributions_that_differ_by_rounding_still_give_a_token():
    """The draft falls (u says so), but nothing is left of p: the likeliest token is taken."""
    slots = Slots()
    slots.assign(temperature=1.0)
    slots.propose([1])
    draft_q = torch.full((1, 4, 40), 1.0)  # larger than any p: as if rounding went against it everywhere
    logits = torch.zeros(2, 40)
    logits[:, 6] = 1.0
    verdicts = slots.judge_logits(logits, [1], draft_q=draft_q)
    assert emitted(verdicts)[0][0] in (1, 6)
    assert verdicts.finish.item() == Finish.RUNNING


@pytest.mark.parametrize("ends", [True, False])
def test_synthetic_acceptance_follows_the_raw_maximum(ends):
    slots = Slots(3)
    for slot, alpha in enumerate((0.0, 1.0, -1.0)):
        slots.assign(slot, temperature=1.0, ignore_eos=not ends, eos_ids=(12,), logit_bias={30: 100.0})
        slots.state.set_alpha([slot], [alpha])
        slots.propose([11, 12], slot)
    verdicts = slots.judge([[20, 21, 22]] * 3)
    assert emitted(verdicts) == [[20], [11, 12] if ends else [11, 12, 22], [30]]
    assert verdicts.finish.tolist() == [Finish.RUNNING, Finish.STOP if ends else Finish.RUNNING, Finish.RUNNING]


def test_chunks_and_spans_of_all_depths_in_one_call():
    slots = Slots(5)
    for slot in range(5):
        slots.assign(slot)
    slots.propose([1, 2, 3], 3)
    slots.propose([4], 1)
    verdicts = slots.judge([[1, 2, 3, 4], [7], [4, 5], [8]], [3, 0, 1, 4])
    assert emitted(verdicts) == [[1, 2, 3, 4], [7], [4, 5], [8]]
    assert slots.lengths.tolist() == [6, 7, 5, 9, 6]
