"""The throughput controller against a hidden truth: the measured table decides what a step takes, made-up chances what
stands."""

from __future__ import annotations

import itertools
import random

import pytest
from verifypd.control.allocation import Load, allocations, joined

from tests.control.views import snapshot, view
from tests.control.world import World, true_rate
from verifypd.control import throughput
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.throughput import ThroughputController
from verifypd.simulate.tables import h200

# --- throughput: the allocation ---------------------------------------------------------------------------------------


def brute_force(curves: list[list[float]], load: Load, cost: CostModel, copied: list[bool]) -> float:
    """The best rate over all ways to choose lengths."""
    from itertools import product

    best, models = 0.0, max(1, copied.count(False))
    for lengths in product(*(range(len(curve) + 1) for curve in curves)):
        looped = [length for length, free in zip(lengths, copied, strict=True) if length and not free]
        part = len(looped) / models
        draft = cost.draft_seconds(max(looped), load.draft_rows * part, load.draft_context * part) if looped else 0.0
        seconds = cost.verify_seconds(load.rows + sum(lengths), load.context) + draft
        tokens = load.requests + sum(sum(curve[:length]) for curve, length in zip(curves, lengths, strict=True))
        best = max(best, tokens / seconds)
    return best


@pytest.mark.parametrize("mixed", [False, True])
def test_the_allocation_is_the_best_there_is(mixed: bool) -> None:
    """With drafts that are looked up beside those of a model too: they pay for rows and not for steps."""
    rng = random.Random(4)
    for trial in range(60):
        n = rng.randint(1, 4)
        curves = []
        for _ in range(n):
            alpha = rng.uniform(0.05, 0.97)
            curves.append([alpha ** (i + 1) for i in range(rng.randint(1, 4))])
        row = rng.choice((21e-6, 1e-3, 3e-3))
        cost = CostModel(
            Coefficients(floor=rng.choice((1e-3, 4.4e-3)), row=row, draft_step=rng.choice((0.1e-3, 1.2e-3)))
        )
        load = Load(n, float(n), n * 512.0, draft_context=n * 512.0, draft_rows=2.0 * n)
        copied = [mixed and rng.random() < 0.5 for _ in range(n)]
        found = max(option.rate for option in allocations(curves, load, cost, looked_up=copied))
        assert found == pytest.approx(brute_force(curves, load, cost, copied), rel=1e-2 if mixed else 2e-3), trial


def test_requests_get_what_their_own_acceptance_is_worth() -> None:
    world = World(128, lambda step, i: 0.9 if i < 64 else 0.1)
    controller = ThroughputController(h200())
    world.run(controller, 60)
    views = [view(i) for i in range(128)]
    lengths = controller.draft_lengths(views, snapshot(views))
    good = sum(lengths.get(i, 0) for i in range(64)) / 64
    bad = sum(lengths.get(i, 0) for i in range(64, 128)) / 64
    assert good >= 3 and bad < 0.5


def test_a_look_up_beside_a_model_is_as_long_as_pays_for_its_rows() -> None:
    """A long copy does not lengthen the loop of the others, nor is it cut to their length."""
    controller = ThroughputController(CostModel(Coefficients(floor=4e-3, row=0.1e-3, draft_step=2e-3)))
    for _ in range(40):
        controller.observe(Observation(0, 8, 8, 9, False, False, 1.0, "ngram"))
        controller.observe(Observation(1, 4, 1, 2, False, False, 1.0, "model"))
    views = [view(0, proposer="ngram"), view(1)]
    lengths = controller.draft_lengths(views, snapshot(views))
    assert lengths[0] == 8 and lengths.get(1, 0) <= 2
    assert controller.chosen is not None and controller.chosen.longest == lengths.get(1, 0)
    assert controller.state()["draft_length"] == 8


def test_nobody_is_asked_for_drafts_while_none_can_come() -> None:
    """Not drafting, nothing saved up for a probe and no look due: it says so, and keeps to it."""
    controller = ThroughputController(h200())
    world = World(64, lambda step, i: 0.02)
    world.run(controller, 200)
    assert not controller.speculating
    views = [view(i) for i in range(64)]
    asked = []
    for _ in range(400):
        asked.append(controller.curious)
        lengths = controller.draft_lengths(views, snapshot(views))
        assert asked[-1] or not lengths
        controller.observe_step(StepTiming(verify_requests=64, verify_rows=64, verify_seconds=8e-3, step_seconds=8e-3))
    assert 0.01 < sum(asked) / len(asked) < 0.1


def test_looks_become_rare_until_few_are_left() -> None:
    """Each of a crowd makes a look dearer; one who leaves it changes little."""
    controller = ThroughputController(h200(), probe_share=0.0)
    World(64, lambda step, i: 0.02).run(controller, 200)
    views = [view(i) for i in range(64)]

    def looks(steps: int) -> list[int]:
        found = []
        for step in range(steps):
            if controller.curious:
                found.append(step)
            controller.draft_lengths(views, snapshot(views))
            controller.observe_step(StepTiming(verify_requests=64, verify_rows=64, verify_seconds=8e-3))
        return found

    looks(300)
    found = looks(300)
    assert {later - earlier for earlier, later in itertools.pairwise(found)} == {64}
    for left, soonest, then in ((63, 64, [64, 64]), (8, 16, [32, 64]), (2, 8, [16, 32])):
        while len(views) > left:
            controller.forget(views.pop().order, 200)
        after = looks(200)
        assert after[0] <= soonest
        assert [later - earlier for earlier, later in itertools.pairwise(after)][:2] == then


def test_who_left_while_another_policy_ran_makes_no_look_rarer() -> None:
    """Nobody told it of them."""
    controller = ThroughputController(h200(), probe_share=0.0)
    World(64, lambda step, i: 0.02).run(controller, 200)
    views, found = [view(0), view(1)], []
    for step in range(300):
        if controller.curious:
            found.append(step)
        controller.draft_lengths(views, snapshot(views))
        controller.observe_step(StepTiming(verify_requests=2, verify_rows=2, verify_seconds=8e-3))
        if step == 200:
            controller.forget(63, 200)
    gaps = [later - earlier for earlier, later in itertools.pairwise(step for step in found if step >= 200)]
    assert gaps[:2] == [16, 32]


def test_steps_that_are_alike_are_learnt_from_now_and_then_and_prompts_always() -> None:
    """However often somebody new arrives and the choice is weighed."""
    controller = ThroughputController(h200())
    World(64, lambda step, i: 0.02).run(controller, 200)
    views = [view(i) for i in range(64)]
    for chunk, learnt in ((0, 10), (32, 40)):
        before = controller.cost.observations
        for step in range(40):
            controller.draft_lengths(views, snapshot(views))
            controller.observe(Observation(1000 + chunk + step, 0, 0, 1, False, False, 1.0, None))
            rows = 64 + chunk
            controller.observe_step(
                StepTiming(verify_requests=64, verify_rows=rows, chunk_rows=chunk, verify_seconds=8e-3)
            )
        assert not controller.speculating and controller.cost.observations - before == learnt


def test_the_urgent_get_longer_drafts() -> None:
    controller = ThroughputController(CostModel(Coefficients(row=100e-6, draft_step=0.02e-3)))
    views = [view(i, slo_tpot=15.0, since_output=0.09 if i < 12 else 0.001) for i in range(32)]
    lengths = controller.draft_lengths(views, snapshot(views))
    late = sum(lengths.get(i, 0) for i in range(12)) / 12
    rest = sum(lengths.get(i, 0) for i in range(12, 32)) / 20
    assert late > rest


def test_a_target_that_plain_decoding_meets_is_not_broken() -> None:
    plain, loose = ThroughputController(h200()), ThroughputController(h200())
    world = World(32, lambda step, i: 0.8 if i < 24 else 0.05)
    world.run(plain, 80)
    World(32, lambda step, i: 0.8 if i < 24 else 0.05).run(loose, 80)
    tight = [view(i, slo_tpot=8.0) for i in range(32)]
    lengths = plain.draft_lengths(tight, snapshot(tight))
    depth = max(lengths.values(), default=0)
    easy = [view(i) for i in range(32)]
    assert depth < max(loose.draft_lengths(easy, snapshot(easy)).values())


def test_prompt_chunks_in_the_pass_leave_fewer_free_rows() -> None:
    controller = ThroughputController(h200())
    World(32, lambda step, i: 0.7).run(controller, 40)
    views = [view(i) for i in range(32)]
    free = controller.draft_lengths(views, snapshot(views))
    chunk = view(40, prefill_left=5000)
    load = controller._load(views, snapshot([*views, chunk]), views)
    assert load.rows == 32 + 256 and load.mixed
    assert sum(free.values()) > 0


# --- throughput: what it converges to ---------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 16, 64, 128])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8, 0.9])
def test_converges_to_the_best_length(alpha: float, requests: int) -> None:
    world = World(requests, lambda step, i: alpha, seed=requests)
    controller = ThroughputController(h200())
    world.run(controller, 300 if requests == 1 else 40)
    rate, means = world.run(controller, 600 if requests == 1 else 60)
    best = max(true_rate(requests, alpha, length) for length in range(9))
    noise = 0.045 if requests == 1 else 0.02  # of the tokens drawn
    assert rate > best * (0.97 - noise), f"drafts {sum(means) / len(means):.2f} tokens"
    assert rate > true_rate(requests, alpha, 0) * (0.985 - noise)


@pytest.mark.parametrize(
    ("alpha", "requests", "length", "gain"),
    [(0.5, 1, 1, 1.17), (0.5, 128, 1, 1.06), (0.8, 1, 3, 1.63), (0.8, 128, 2, 1.41), (0.9, 1, 5, 2.0)],
)
def test_the_published_best_lengths(alpha: float, requests: int, length: int, gain: float) -> None:
    """Best L and gain as read off the measured table; neighbours within a percent count as the same."""
    rates = [true_rate(requests, alpha, n) for n in range(9)]
    assert max(rates) / rates[0] == pytest.approx(gain, abs=0.01)
    assert rates[length] > 0.99 * max(rates)
    world = World(requests, lambda step, i: alpha, seed=3)
    controller = ThroughputController(h200())
    world.run(controller, 400 if requests == 1 else 50)
    _, means = world.run(controller, 200 if requests == 1 else 20)
    assert sum(means) / len(means) == pytest.approx(length, abs=1.0)


def test_wrong_beliefs_about_costs_are_overcome() -> None:
    """A draft believed four times as dear as it is, and one believed four times as cheap."""
    for factor in (4.0, 0.25):
        controller = ThroughputController(CostModel(h200().coefficients.scaled(1.0, factor)))
        world = World(16, lambda step, i: 0.7)
        world.run(controller, 500)
        rate, _ = world.run(controller, 100)
        assert rate > 0.95 * max(true_rate(16, 0.7, n) for n in range(9))


def test_under_drifting_acceptance_it_beats_every_fixed_length() -> None:
    """Text that switches between copying and free prose."""

    def alpha(step: int, i: int) -> float:
        return 0.95 if step // 150 % 2 else 0.1

    rate, _ = World(1, alpha).run(ThroughputController(h200()), 1500)
    assert rate > 1.1 * max(World(1, alpha).run(FixedController(n), 1500)[0] for n in range(9))


# --- throughput: nothing, and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 32])
def test_goes_to_nothing_when_nothing_pays_and_comes_back(requests: int) -> None:
    low = World(requests, lambda step, i: 0.05 if step < 1000 else 0.85)
    controller = ThroughputController(h200())
    low.run(controller, 500)
    rate, means = low.run(controller, 500)
    assert sum(means) / len(means) < 0.06, "it still drafts"
    assert not controller.speculating
    assert rate > 0.98 * true_rate(requests, 0.05, 0)
    _, means = low.run(controller, 500)
    assert controller.speculating and sum(means[-50:]) / 50 > 2, "it has not come back"


def test_a_draft_that_lags_far_behind_must_be_worth_catching_up() -> None:
    controller = ThroughputController(h200())
    World(16, lambda step, i: 0.6).run(controller, 100)
    short = [view(0, draft_lag=20_000, max_length=530), *(view(i) for i in range(1, 16))]
    long = [view(0, draft_lag=20_000), *(view(i) for i in range(1, 16))]
    assert 0 not in controller.draft_lengths(short, snapshot(short)), "ends before it pays"
    controller._mean_output = 5000.0
    assert 0 in controller.draft_lengths(long, snapshot(long))


def test_who_would_be_left_out_is_caught_up_with_though_it_costs_more_tokens_than_it_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt among many that draft: it would get one token from each of the steps that they lengthen."""
    controller = ThroughputController(h200())
    World(64, lambda step, i: 0.8).run(controller, 100)
    controller._mean_output = 64.0
    views = [view(0, draft_lag=10_000, emitted=250), *(view(i) for i in range(1, 64))]
    assert controller.speculating and controller.stretch > 1.2
    assert 0 in controller.draft_lengths(views, snapshot(views))
    monkeypatch.setattr(throughput, "AMENDS", 0.0)
    assert 0 not in controller.draft_lengths(views, snapshot(views)), "by tokens alone it does not pay"


def test_hysteresis_keeps_it_from_flapping() -> None:
    """At the break-even acceptance it changes its mind a few times at most."""
    world = World(32, lambda step, i: 0.27)
    controller = ThroughputController(h200())
    world.run(controller, 200)
    changes, last = 0, controller.speculating
    for _ in range(400):
        world.run(controller, 1)
        changes += controller.speculating != last
        last = controller.speculating
    assert changes <= 12


@pytest.mark.parametrize(("relapses", "begins"), [(0.0, True), (4.0, False)])
def test_drafting_that_was_soon_given_up_must_promise_more(relapses: float, begins: bool) -> None:
    """Who does not draft looks like everyone; once all draft, the slowest show, and the tail's veto ends it. Again and
    again, if nothing were learnt from it."""
    controller = ThroughputController(h200())
    for trial in range(400):
        accepted = int(trial % 20 < 7)
        controller.observe(Observation(trial % 32, 1, accepted, accepted + 1, False, False, 1.0, "model"))
    controller.speculating, controller._relapses = False, relapses
    views = [view(100 + i) for i in range(32)]
    controller.draft_lengths(views, snapshot(views))
    assert 1.03 < controller.gain < 1.1
    assert controller.speculating is begins


def test_relapses_are_forgiven_in_time_and_by_drafting_that_lasts() -> None:
    controller = ThroughputController(h200())
    World(32, lambda step, i: 0.02).run(controller, 20)
    assert not controller.speculating and 0.9 < controller._relapses <= 1.0, "the hope it began with was soon given up"
    world = World(32, lambda step, i: 0.02 if step < 1500 else 0.9 if step < 2500 else 0.0)
    world.run(controller, 1500)
    assert controller._relapses < 0.1
    controller._relapses = float(throughput.RELAPSES)
    world.run(controller, 1000)
    assert controller.speculating, "a clear gain is taken all the same"
    world.run(controller, 40)
    assert not controller.speculating and controller._relapses < 0.1


def test_nobody_to_draft_for() -> None:
    controller = ThroughputController(h200())
    assert controller.draft_lengths([], snapshot([])) == {}
    silent = [view(0, promise=0), view(1, draft_limit=0)]
    assert controller.draft_lengths(silent, snapshot(silent)) == {}


def test_tokens_it_was_not_told_of_at_rest_make_its_evidence_as_old() -> None:
    told, silent = ThroughputController(h200()), ThroughputController(h200())
    for controller in (told, silent):
        for order in range(8):
            controller.observe(Observation(order, 4, 3, 4, False, True, 0.0, "model"))
        controller.speculating = False
    for order in range(8):
        for _ in range(30):
            told.observe(Observation(order, 0, 0, 1, False, True, 0.0, None))
    views = [view(i, greedy=True, emitted=34) for i in range(8)]
    chances = []
    for controller in (told, silent):
        controller.draft_lengths(views, snapshot(views))
        chances.append([controller.survival.chance(i, ("greedy", 0, "model")) for i in range(8)])
    assert chances[0] == pytest.approx(chances[1]) and told._heard == silent._heard == dict.fromkeys(range(8), 34)


def test_someone_new_is_looked_at_at_once_unless_in_a_crowd() -> None:
    controller = ThroughputController(h200(), probe_share=0.0)
    World(2, lambda step, i: 0.02).run(controller, 200)
    assert not (controller.speculating or controller.curious)

    def meet(count: int) -> None:
        views = [view(i) for i in range(count)]
        controller.meet(views)

    meet(2)
    assert not controller.curious, "both are known"
    meet(3)
    assert controller.curious
    World(3, lambda step, i: 0.02).run(controller, 200)
    meet(30)
    assert not (controller.speculating or controller.curious)


def test_how_long_others_last_is_learnt_from_those_who_leave() -> None:
    controller = ThroughputController(h200())
    for order in range(200):
        controller.forget(order, 300)
    assert controller._mean_output == pytest.approx(300.0, rel=0.01)


def test_requests_are_forgotten() -> None:
    controller = ThroughputController(h200())
    World(8, lambda step, i: 0.5).run(controller, 20)
    for order in range(8):
        controller.forget(order, 20)
    assert not controller.survival._requests and not controller._heard


def test_rows_that_cost_nothing_are_all_free() -> None:
    """A fit may find no cost of rows at all: then every position that may stand is drafted, and nothing overflows."""
    found = allocations([[0.9, 0.5, 0.01]] * 4, Load(4, 4.0, 2048.0), CostModel(Coefficients(row=0.0, draft_step=1e-6)))
    assert [option.rows for option in found] == [0.0, 4, 8, 8], "the last position hardly ever stands"


def test_to_begin_it_must_pay_for_those_too_who_are_about_to_decode() -> None:
    """Rows are dear here: drafts pay for two and not for sixteen, so the first two of sixteen do not begin."""
    controller = ThroughputController(CostModel(Coefficients(floor=15e-3, row=4e-3, draft_step=1e-3)), probe_share=0.0)
    controller.speculating = False
    few, coming = [view(0), view(1)], [view(2 + i, prefill_left=300) for i in range(14)]
    assert controller.draft_lengths(few, snapshot([*few, *coming])) == {} and not controller.speculating
    controller._idle = throughput.SELDOM
    assert controller.draft_lengths(few, snapshot(few)) and controller.speculating
    assert controller.draft_lengths(few, snapshot([*few, *coming])), "what has begun is weighed by those it is for"


@pytest.mark.parametrize("copied", [[], [True, False], [True, True]])
def test_who_is_about_to_decode_counts_like_the_mean_of_the_others(copied: list[bool]) -> None:
    load = Load(2, 2.0, 100.0, draft_context=100.0, draft_rows=4.0)
    assert joined([[0.5]], copied[:1], load, [], 2) == ([[0.5]], copied[:1], load)
    curves, flags, more = joined([[0.8, 0.6], [0.4]], copied, load, [30, 50, 70], 2)
    assert curves == [[0.8, 0.6], [0.4], *[[pytest.approx(0.6), pytest.approx(0.3)]] * 3]
    assert flags == ([*copied, *[all(copied)] * 3] if copied else [])
    assert more == Load(5, 5.0, 250.0, draft_context=250.0, draft_rows=10.0)
    assert len(allocations(curves, more, h200(), looked_up=flags)) > 1


def test_requests_that_never_draft_are_not_taken_for_coming_ones() -> None:
    controller = ThroughputController(CostModel(Coefficients(draft_step=0.1e-3)), probe_share=0.0)
    for _ in range(60):
        controller.observe(Observation(0, 4, 4, 5, False, False, 1.0, "model"))
    controller.speculating, controller._idle = False, throughput.SELDOM
    views = [view(0), *(view(i, draft_limit=0) for i in range(1, 4))]
    assert controller.draft_lengths(views[:1], snapshot(views)) and controller.speculating
