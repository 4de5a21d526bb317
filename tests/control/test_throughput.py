"""The throughput controller against a hidden truth: the measured table decides what a step takes, made-up chances what
stands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.control.views import snapshot, view
from tests.control.world import World, true_rate
from verifypd.batch import VerifySpan
from verifypd.control.controller import FixedController
from verifypd.control.cost import DRAFT, Coefficients, CostModel
from verifypd.control.mode import Mode
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import Chunk, Reading
from verifypd.control.snapshot import RequestView
from verifypd.control.throughput import ThroughputController
from verifypd.control.tuning import PROBE_SHARE, REVIEW_EVERY
from verifypd.simulate.tables import h200

ALONE = Reading()


def beside(tokens: int, second: float = math.inf) -> Reading:
    """A prompt of so many tokens rides. second: what one of the step is worth, in seconds of decoding."""
    span = VerifySpan(99, tokens, 0, 0, emits=True, context=tokens)
    return Reading((span,), None if second == math.inf else Chunk(tokens, 0.01, 0.01 * (second - 1.0)))


def lengths(controller: ThroughputController, views: list[RequestView], riding: Reading = ALONE) -> dict[int, int]:
    return controller.draft_lengths(views, snapshot(views, mean_output=256.0), riding)


# -- what it converges to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 16, 128])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8, 0.9])
def test_it_drafts_where_it_pays_and_as_much_as_pays(alpha: float, requests: int) -> None:
    world = World(requests, lambda step, i: alpha, seed=requests)
    controller = ThroughputController(h200())
    world.run(controller, 300 if requests == 1 else 30)
    rate, means = world.run(controller, 600 if requests == 1 else 40)
    best = max(true_rate(requests, alpha, length) for length in range(9))
    noise = 0.045 if requests == 1 else 0.02  # of the tokens drawn
    least = 0.96 if (alpha, requests) == (0.3, 128) else 0.97  # there one draft gains 5 %, unseen
    assert rate > best * (least - noise), f"drafts {sum(means) / len(means):.2f} tokens"
    assert rate > true_rate(requests, alpha, 0) * (0.985 - noise)


@pytest.mark.parametrize(
    ("alpha", "requests", "length", "gain"),
    [(0.5, 1, 1, 1.22), (0.5, 128, 1, 1.22), (0.8, 1, 3, 1.74), (0.8, 128, 3, 1.59), (0.9, 1, 5, 2.10)],
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


def test_all_alike_draft_alike() -> None:
    """A loop costs its longest draft: noise in what single requests saw must not make lengths differ."""
    world, controller = World(64, lambda step, i: 0.8), ThroughputController(h200(), 4)
    world.run(controller, 60)
    found = lengths(controller, [view(i) for i in range(64)])
    assert len(found) == 64 and sum(found.values()) / 64 > 0.85 * max(found.values())


def test_requests_get_what_their_own_acceptance_is_worth() -> None:
    world = World(128, lambda step, i: 0.9 if i < 64 else 0.1)
    controller = ThroughputController(h200())
    world.run(controller, 100)
    found = lengths(controller, [view(i) for i in range(128)])
    good = sum(found.get(i, 0) for i in range(64)) / 64
    bad = sum(found.get(i, 0) for i in range(64, 128)) / 64
    assert good >= 2 and bad < 0.5 * good


def test_texts_that_differ_are_drafted_as_each_is_worth() -> None:
    """Half of the requests copy, half write freely: no one length is as good."""

    def alpha(step: int, i: int) -> float:
        return 0.97 if i % 2 else 0.15

    controller, world = ThroughputController(h200()), World(32, alpha)
    world.run(controller, 60)
    rate, _ = world.run(controller, 60)
    assert rate > 0.99 * max(World(32, alpha).run(FixedController(n), 60)[0] for n in (0, 1, 2, 3, 4, 6))


def test_beside_prompts_drafts_save_what_rows_cost_there() -> None:
    """A pass that prompts pay for gives everyone a token for next to nothing: slow drafts save less than they take."""
    controller, riding = ThroughputController(h200(), 4), beside(512)
    World(16, lambda step, i: 0.8).run(controller, 60)
    views, measured = [view(i) for i in range(16)], controller.cost.coefficients
    controller.cost.coefficients = replace(measured, draft_step=1.6e-3)
    assert lengths(controller, views)
    assert not lengths(controller, views, riding) and controller.drafting
    taken, second = controller.chosen, controller.runner_up
    assert taken.longest == 0 < second.longest and taken.per_token < second.per_token
    controller.cost.coefficients = replace(measured, draft_step=0.2e-3)
    assert lengths(controller, views, riding), "a head is fast"
    controller.cost.coefficients = replace(measured, draft_step=1.6e-3, context=0.5e-6)
    assert lengths(controller, views, riding), "long contexts are dear in any pass"


def test_beside_prompts_that_are_worth_little_drafts_save_what_rows_cost_without_them() -> None:
    """What targets say a second of the step is worth decides; and only who decodes gains from drafts, all wait."""
    controller = ThroughputController(h200(), 4)
    World(16, lambda step, i: 0.8).run(controller, 60)
    views = [view(i) for i in range(16)]
    controller.cost.coefficients = replace(controller.cost.coefficients, draft_step=1.6e-3)
    assert lengths(controller, views)
    written = [sum(lengths(controller, views, beside(512, second)).values()) for second in (1.0, 2.0, 4.0, 30.0)]
    assert written == sorted(written, reverse=True) and written[0] > 0 == written[-1], written
    why = controller.why()
    assert 0.0 < why["worth_ms"] < why["next_ms"] / why["next_tokens"]
    lengths(controller, views)
    assert controller.why()["worth_ms"] == 0.0
    waiting = [view(100 + i, prefill_left=500) for i in range(48)]
    state = snapshot([*views, *waiting], mean_output=256.0)
    assert not controller.draft_lengths(views, state, beside(512, 1.0)), "a quarter of the slots decodes"


def test_rows_that_are_dear_beside_prompts_are_not_drafted_and_the_step_after_drafts_as_before() -> None:
    controller = ThroughputController(h200(), 4)
    World(16, lambda step, i: 0.6).run(controller, 60)
    views = [view(i) for i in range(16)]
    before = lengths(controller, views)
    controller.cost.coefficients = replace(controller.cost.coefficients, steep=2e-3)
    assert not lengths(controller, views, beside(2048)) and controller.drafting
    assert lengths(controller, views) == before


# -- nothing, and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 16])
def test_it_stops_at_low_acceptance_and_notices_a_change_by_probes(requests: int) -> None:
    """Though drafts lag ever further behind while nothing is drafted: probes are saved up for."""
    low = World(requests, lambda step, i: 0.05 if step < 600 else 0.9)
    controller = ThroughputController(h200(), 4)
    low.run(controller, 200)
    rate, means = low.run(controller, 400)
    assert not controller.drafting and sum(means) / len(means) < 0.06, "it still drafts"
    assert rate > 0.98 * true_rate(requests, 0.05, 0)
    for _ in range(60):
        low.run(controller, 100)
        if controller.drafting:
            break
    _, means = low.run(controller, 50)
    assert controller.drafting and sum(means) / 50 > 2, "it has not come back"


def test_probes_stay_within_their_share_of_the_time() -> None:
    controller, spent, time = ThroughputController(h200()), 0.0, 0.0
    World(8, lambda step, i: 0.02).run(controller, 100)
    assert not controller.drafting
    before = controller.budget.probes
    for step in range(4000):
        views = [view(i, draft_lag=100 + step // 10) for i in range(8)]
        found = lengths(controller, views)
        spent += controller.cost.draft_seconds(1, sum(views[i].draft_lag for i in found), 0.0) if found else 0.0
        time += 6e-3
        controller.observe_step(StepTiming(verify_requests=8, verify_rows=8, verify_seconds=6e-3, step_seconds=6e-3))
        for i in found:
            controller.observe(Observation(i, 1, 0, 1, False, False, 1.0, "model"))
    assert not controller.drafting and controller.budget.probes > before + 10
    assert 0.5 * PROBE_SHARE * time < spent <= PROBE_SHARE * time + 5e-3


def test_nobody_is_asked_for_drafts_while_none_can_come() -> None:
    """Not drafting, nothing saved up for a probe and no review due: it says so, and keeps to it."""
    controller = ThroughputController(h200())
    World(64, lambda step, i: 0.02).run(controller, 200)
    assert not controller.drafting
    views, asked = [view(i) for i in range(64)], []
    for _ in range(400):
        asked.append(controller.may_draft)
        assert asked[-1] or not lengths(controller, views)
        if asked[-1]:
            lengths(controller, views)
        controller.observe_step(StepTiming(verify_requests=64, verify_rows=64, verify_seconds=8e-3, step_seconds=8e-3))
    assert 1 / (2 * REVIEW_EVERY) < sum(asked) / len(asked) < 4 / REVIEW_EVERY


def test_at_break_even_it_does_not_flap() -> None:
    world = World(16, lambda step, i: 0.27)
    controller = ThroughputController(h200())
    world.run(controller, 100)
    changes, last = 0, controller.drafting
    for _ in range(300):
        world.run(controller, 1)
        changes += controller.drafting != last
        last = controller.drafting
    assert changes <= 12


class Told(ThroughputController):
    """Costs are learnt from every step, as an architecture has it."""

    def observe_step(self, timing: StepTiming) -> None:
        self.cost.observe(timing)
        super().observe_step(timing)


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_wrong_beliefs_about_the_draft_are_overcome(factor: float) -> None:
    """Believed twice as dear as it is, or four times as cheap."""
    cost = CostModel(h200().coefficients)
    cost.factors[DRAFT] = factor
    controller, world = Told(cost, 4), World(32, lambda step, i: 0.8)
    for _ in range(60):
        world.run(controller, 100)
        if controller.drafting and abs(cost.factors[DRAFT] - 1.0) < 0.2:
            break
    rate, _ = world.run(controller, 100)
    assert rate > 0.95 * max(true_rate(32, 0.8, n) for n in range(5))


# -- a drafter that lags -----------------------------------------------------------------------------------------------


def test_the_debt_of_a_lagging_drafter_must_be_worth_paying() -> None:
    controller = ThroughputController(h200())
    World(16, lambda step, i: 0.6).run(controller, 100)
    rest = [view(i) for i in range(1, 16)]
    lag = 20_000
    assert 0 not in lengths(controller, [view(0, draft_lag=lag, max_length=530), *rest]), "it ends before that pays"
    assert 0 in lengths(controller, [view(0, draft_lag=lag, emitted=5000), *rest]), "it goes on for long"
    assert 0 in lengths(controller, [view(0, draft_lag=60), *rest])


def test_a_debt_may_take_up_to_twice_what_drafts_save() -> None:
    """Who has a long prompt would otherwise write one token a step, to the end, where the device is level either way:
    with 18 tokens to go drafts save what reading some 720 tokens takes."""
    controller = ThroughputController(h200())
    World(16, lambda step, i: 0.6).run(controller, 100)
    rest = [view(i) for i in range(1, 16)]
    drafted = {lag: lengths(controller, [view(0, draft_lag=lag, max_length=530), *rest]) for lag in (500, 1100, 1800)}
    assert {lag: 0 in found for lag, found in drafted.items()} == {500: True, 1100: True, 1800: False}


def test_a_debt_keeps_prompts_waiting_that_hold_a_slot() -> None:
    """They wait for the drafter to read: where documents come faster than they are read, short answers are not worth
    reading them twice."""
    controller = ThroughputController(h200())
    World(16, lambda step, i: 0.6).run(controller, 100)
    rest = [view(i) for i in range(1, 16)]
    drafted = {}
    for waiting in (0, 1, 8):
        prompts = [view(20 + i, prefill_left=2000) for i in range(waiting)]
        found = [view(0, draft_lag=1100, max_length=530), *rest]
        state = snapshot([*found, *prompts], mean_output=256.0)
        drafted[waiting] = controller.draft_lengths(found, state, ALONE)
    assert {waiting: 0 in found for waiting, found in drafted.items()} == {0: True, 1: True, 8: False}
    assert all(len(found) >= 15 for found in drafted.values()), "who has no debt drafts as before"


def test_a_drafter_without_a_cache_has_no_debt() -> None:
    controller = ThroughputController(h200())
    World(16, lambda step, i: 0.6).run(controller, 100)
    views = [view(0, draft_lag=20_000, max_length=530), *(view(i) for i in range(1, 16))]
    assert 0 in controller.draft_lengths(views, snapshot(views, drafter_has_cache=False), ALONE)


def test_what_a_head_reads_again_is_no_debt() -> None:
    """A head lacks its last draft after every verdict: that is routine, as the snapshot says."""
    controller = ThroughputController(CostModel(Coefficients(draft_row=1e-4)), 4)
    World(4, lambda step, i: 0.8).run(controller, 60)
    views = [view(i, draft_lag=5, max_length=520) for i in range(4)]
    routine = controller.draft_lengths(views, snapshot(views, routine_lag=5), ALONE)
    debt = controller.draft_lengths(views, snapshot(views, routine_lag=2), ALONE)
    assert len(routine) == 4 and len(debt) <= len(routine)


def test_a_look_up_beside_a_model_is_as_long_as_pays_for_its_rows() -> None:
    controller = ThroughputController(CostModel(Coefficients(base=4e-3, steep=0.0, row=0.05e-3, draft_step=2e-3)))
    for _ in range(60):
        controller.observe(Observation(0, 8, 8, 9, False, False, 1.0, "ngram"))
        controller.observe(Observation(1, 4, 1, 2, False, False, 1.0, "model"))
    found = lengths(controller, [view(0, proposer="ngram"), view(1)])
    assert found[0] == 8 and found.get(1, 0) <= 2
    assert controller.chosen is not None and controller.chosen.longest == found.get(1, 0)


def test_while_nothing_is_drafted_look_ups_are_overheard() -> None:
    """Texts tell how look-ups would have fared; each is counted once."""
    controller = ThroughputController(h200())
    World(8, lambda step, i: 0.02).run(controller, 200)
    assert not controller.drafting
    copies = 0
    for turn in range(1, 200):
        views = [view(i, proposer="ngram", lookups=(9 * turn, 10 * turn)) for i in range(8)]
        copies = len(controller.draft_lengths(views, snapshot(views, copier="ngram"), ALONE))
        timing = StepTiming(verify_requests=8, verify_rows=8, verify_seconds=6e-3, step_seconds=6e-3)
        controller.observe_step(timing)
        if controller.drafting:
            break
    assert controller.drafting and copies == 8


# -- what it says ------------------------------------------------------------------------------------------------------


def test_it_says_what_it_chose_and_over_what() -> None:
    controller = ThroughputController(h200())
    assert controller.why() == {}
    World(16, lambda step, i: 0.8).run(controller, 40)
    why, state = controller.why(), controller.state()
    assert why["mode"] == state["mode"] == Mode.DRAFTING.value
    assert why["ms"] / why["tokens"] <= why["next_ms"] / why["next_tokens"] and why["longest"] != why["next_longest"]
    lengths(controller, [view(i) for i in range(16)], beside(512))
    more = controller.why()
    assert more["ms"] / more["tokens"] <= more["next_ms"] / more["next_tokens"] < why["ms"] / why["tokens"]
    assert state["draft_length"] == why["longest"] > 0 and float(state["gain"]) > 1.2
    assert float(state["acceptance"]) == pytest.approx(0.8, abs=0.06)
    World(16, lambda step, i: 0.02).run(controller, 100)
    assert controller.why()["longest"] == 0 and controller.state()["draft_length"] == 0


def test_it_says_for_which_step_it_weighed_drafts() -> None:
    """While nothing is drafted that is not every step, and the record of a step says so."""
    controller, views, asked, weighed = ThroughputController(h200()), [view(i) for i in range(16)], [], []
    World(16, lambda step, i: 0.02).run(controller, 100)
    for step in range(1000, 1000 + 2 * REVIEW_EVERY):
        if controller.may_draft:
            controller.draft_lengths(views, snapshot(views, step=step, mean_output=256.0), ALONE)
            asked.append(step + 1)  # the snapshot counts the steps before it
        controller.observe_step(StepTiming(verify_requests=16, verify_rows=16, verify_seconds=1e-6))
        weighed.append(controller.why()["weighed"])
    assert sorted({each for each in weighed if each > 1000}) == asked and 1 <= len(asked) <= 3


def test_the_only_choice_has_no_runner_up() -> None:
    controller = ThroughputController(h200())
    assert lengths(controller, [view(0, draft_limit=4)]) and controller.why()["next_longest"] > 0
    assert lengths(controller, [view(0, draft_limit=1)]) and controller.why()["next_longest"] == 0, "the other is plain"
    assert lengths(controller, [view(0, draft_limit=4, draft_lag=10**9)]) == {}
    assert "ms" in controller.why() and "next_ms" not in controller.why()


def test_who_left_is_forgotten() -> None:
    controller = ThroughputController(h200())
    controller.observe(Observation(3, 2, 1, 2, False, False, 1.0, "model"))
    controller.forget(3)
    controller.forget(3)
    assert controller.acceptance.known == []
