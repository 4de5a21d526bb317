"""The simulator keeps the engine's books, and in it the policies hold their promises: nobody starves, priorities and
backpressure hold, and a burst of long prompts delays a running request by no more than the chunk rule says."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifypd.buckets import CHUNKS
from verifypd.control.architectures import Architecture
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel, Work
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.snapshot import Plan, Snapshot
from verifypd.errors import EngineError
from verifypd.simulate.engine import Simulation
from verifypd.simulate.report import Report
from verifypd.simulate.tables import h200
from verifypd.simulate.traffic import Acceptance, Arrival, Lengths, poisson, replay
from verifypd.simulate.world import Settings, TrueCosts, gpu_settings

FIXED = ("plain", "baseline", "pd", "pdv", "unified", "table")
EVERY = (*FIXED, "auto")
SMALL = Settings(batch_size=8, verify_batch=4, verify_wait_ms=3.0, workers=3, prefill_chunk=128, draft_chunk=128)
SHORT = Lengths(prompt_median=40, output_median=20, long_prompt=(300, 700))
NOISY = TrueCosts(noise=0.05, drift=0.1)


def make(name: str, length: int = 3) -> Architecture:
    return make_architecture(name, make_controller("throughput" if name == "auto" else "fixed", length))


class Log:
    """Every snapshot and plan of a run."""

    def __init__(self) -> None:
        self.steps: list[tuple[Snapshot, Plan]] = []

    def __call__(self, _: Simulation, snapshot: Snapshot, plan: Plan) -> None:
        self.steps.append((snapshot, plan))

    def plans(self) -> list[Plan]:
        return [plan for _, plan in self.steps if not plan.empty]


def run(
    name: str, arrivals: list[Arrival], options: Settings = SMALL, *, length: int = 3, costs: TrueCosts = NOISY
) -> tuple[Report, Log]:
    log = Log()
    return Simulation(make(name, length), arrivals, costs, options, seed=1, on_step=log).run(), log


def burst(count: int, prompt: int, output: int, at: float = 0.0) -> list[Arrival]:
    return [Arrival(at, prompt, output, (True,) * output) for _ in range(count)]


# -- without drafts, auto is plain -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rate", [2.0, math.inf])
def test_auto_without_drafts_plans_as_plain_does(rate: float) -> None:
    """Plan for plan: the same requests, the same chunks."""
    arrivals = poisson(rate, 60, Acceptance(0.7), seed=3)
    options = Settings(batch_size=8, prefill_chunk=128, draft_chunk=128)
    logs = []
    for name in ("plain", "auto"):
        logs.append(Log())
        policy = make_architecture(name, FixedController(0), CostModel(Coefficients()))
        Simulation(policy, arrivals, NOISY, options, seed=3, on_step=logs[-1]).run()
    plain, auto = logs
    assert any(snapshot.waiting for snapshot, _ in plain.steps) == (rate > 2.0)
    assert plain.plans() == auto.plans()


def test_documents_with_short_answers_are_not_read_twice() -> None:
    """A draft model that read them all would cost a tenth of the tokens a second, and save next to nothing."""
    costs, documents = h200().coefficients, Lengths(output_median=12, longest_output=32, long_share=0.6)
    for seed in (0, 1):
        arrivals, rates = poisson(math.inf, 100, Acceptance(0.8), lengths=documents, seed=seed), []
        for name in ("plain", "auto"):
            cost = CostModel(costs)
            policy = make_architecture(name, make_controller("throughput", 4, cost), cost)
            server = gpu_settings(batch_size=32)
            rates.append(Simulation(policy, arrivals, TrueCosts(costs), server, seed=seed).run().throughput)
        assert rates[1] > 0.97 * rates[0], rates


# -- nobody starves, and no token is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_every_request_ends_with_all_its_tokens(name: str, late: bool) -> None:
    arrivals = poisson(30.0, 30, Acceptance(0.6), lengths=SHORT, seed=3)
    report, _ = run(name, arrivals, replace(SMALL, late=late))
    assert [outcome.tokens for outcome in report.outcomes] == [arrival.output for arrival in arrivals]
    assert all(outcome.finished for outcome in report.outcomes)


@settings(max_examples=25)
@given(
    name=st.sampled_from(EVERY),
    rate=st.sampled_from([5.0, 60.0, math.inf]),
    alpha=st.floats(0.05, 0.95),
    batch=st.integers(1, 9),
    verify_batch=st.integers(1, 9),
    late=st.booleans(),
    has_cache=st.booleans(),
    length=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_nobody_starves(
    name: str,
    rate: float,
    alpha: float,
    batch: int,
    verify_batch: int,
    late: bool,
    has_cache: bool,
    length: int,
    seed: int,
) -> None:
    options = replace(SMALL, batch_size=batch, verify_batch=verify_batch, late=late, drafter_has_cache=has_cache)
    arrivals = poisson(rate, 12, Acceptance(alpha), lengths=SHORT, seed=seed)
    report, log = run(name, arrivals, options, length=length)
    assert all(outcome.finished for outcome in report.outcomes)
    assert sum(outcome.tokens for outcome in report.outcomes) == sum(arrival.output for arrival in arrivals)
    prompt_rows = sum(
        span.rows
        for plan in log.plans()
        for part in (plan.verify, plan.prefill)
        if part
        for span in part.spans
        if span.start is not None
    )
    assert prompt_rows == sum(arrival.prompt for arrival in arrivals), "each prompt token is computed once"


@pytest.mark.parametrize("name", EVERY)
def test_a_prompt_progresses_however_many_requests_decode(name: str) -> None:
    arrivals = [*burst(8, 20, 400), *burst(1, 600, 5, at=0.3)]
    report, _ = run(name, arrivals)
    late = report.outcomes[-1]
    assert late.last is not None
    assert late.last < max(outcome.last or 0.0 for outcome in report.outcomes[:-1])


def test_a_policy_that_plans_nothing_is_reported() -> None:
    class Lazy(Architecture):
        name = "lazy"

        def plan(self, snapshot: Snapshot) -> Plan:
            return Plan()

    with pytest.raises(EngineError, match="lazy plans nothing"):
        Simulation(Lazy(FixedController(0)), burst(1, 4, 4), NOISY, SMALL).run()


# -- priorities and backpressure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "pd", "pdv", "unified", "table", "auto"])
def test_a_better_priority_waits_less(name: str) -> None:
    arrivals = [
        replace(arrival, priority=index % 2, time=0.0)
        for index, arrival in enumerate(poisson(100.0, 40, Acceptance(0.5), lengths=SHORT, seed=5))
    ]
    report, log = run(name, arrivals)
    first = {p: [o.first or 0.0 for o in report.outcomes if o.priority == p] for p in (0, 1)}
    assert sum(first[0]) < 0.8 * sum(first[1])
    for snapshot, plan in log.steps:
        chunks = [s.slot for part in (plan.verify, plan.prefill) if part for s in part.spans if s.start is not None]
        priorities = {view.slot: view.rank[0] for view in snapshot.requests if view.prefill_left}
        if chunks:
            assert min(priorities.values()) == min(priorities[slot] for slot in chunks), (
                "the better priority goes first"
            )


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("name", ["plain", "unified", "auto"])
def test_backpressure_keeps_the_decode_queue_short(name: str, factor: float) -> None:
    """There are slots for everyone: that no more prompts end than the queue takes is the architecture's own doing."""
    options = replace(SMALL, queue_factor=factor, spare_slots=40)
    report, log = run(name, poisson(math.inf, 40, Acceptance(0.5), lengths=SHORT, seed=2), options)
    assert all(outcome.finished for outcome in report.outcomes)
    depths = [sum(not view.prefill_left for view in snapshot.requests) for snapshot, _ in log.steps]
    assert options.batch_size <= max(depths) <= math.ceil(factor * options.batch_size)
    assert all(len(plan.verify.spans) <= options.batch_size + 1 for plan in log.plans() if plan.verify)


@pytest.mark.parametrize("name", EVERY)
def test_no_more_are_admitted_than_have_slots(name: str) -> None:
    options = replace(SMALL, queue_factor=1.25)
    _, log = run(name, poisson(math.inf, 40, Acceptance(0.5), lengths=SHORT, seed=2), options)
    assert max(len(snapshot.requests) for snapshot, _ in log.steps) == 10


# -- the longest gap under a burst of long prompts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "turns"), [("plain", 1), ("unified", 1), ("pd", 1), ("pdv", 2), ("table", 2), ("auto", 2)]
)
def test_a_burst_of_long_prompts_delays_a_running_request_by_one_chunk_a_turn(name: str, turns: int) -> None:
    options = replace(SMALL, queue_factor=1.0)
    exact = TrueCosts()
    report, _ = run(name, [*burst(4, 30, 300), *burst(12, 3000, 20, at=0.2)], options, costs=exact)
    context = 8 * 3400
    chunk = options.prefill_chunk
    costs = exact.model()
    step = (
        costs.draft_seconds(8, options.draft_chunk, context)
        + costs.pass_seconds(Work(8 * 9 + chunk, context, chunk, chunk * 3000))
        + costs.pass_seconds(Work(chunk, 3000, chunk, chunk * 3000))
    )
    bound = turns * step + (options.verify_wait_ms / 1e3 if turns > 1 else 0.0)
    assert max(outcome.longest_gap for outcome in report.outcomes[:4]) <= bound
    whole = costs.pass_seconds(Work(12 * 3000, 12 * 3000, 12 * 3000, 12 * 3000 * 3000))
    assert bound < whole / 4, "the bound is far below what unchunked prompts would cost"


@pytest.mark.parametrize("name", ["plain", "unified", "pd", "auto"])
@pytest.mark.parametrize("gap", [25.0, 40.0, 60.0])
def test_the_longest_gap_in_a_burst_follows_the_target(name: str, gap: float) -> None:
    """Long prompts arrive while four requests write: a step lasts no longer than `slo_gap`, where prompts' sure share
    fits in and the backlog is small; and they are read in sizeable chunks all the same."""
    options = replace(SMALL, queue_factor=1.0, slo_gap=gap, prefill_chunk=4096, slo_ttft=2000.0)
    exact = TrueCosts(Coefficients())
    cost = CostModel(exact.coefficients)
    policy = make_architecture(name, make_controller("throughput", 3, cost), cost)
    log = Log()
    arrivals = [*burst(4, 30, 400), *burst(4, 3000, 20, at=0.2)]
    report = Simulation(policy, arrivals, exact, options, seed=1, on_step=log).run()
    assert max(outcome.longest_gap for outcome in report.outcomes[:4]) <= 1.05 * gap / 1e3
    chunks = [s.rows for p in log.plans() for b in (p.verify, p.prefill) if b for s in b.spans if s.start is not None]
    assert max(chunks) > 200


def test_a_smaller_chunk_makes_a_shorter_gap() -> None:
    gaps = []
    for chunk in (1024, 64):
        arrivals = [*burst(2, 30, 200), *burst(6, 2000, 10, at=0.1)]
        report, _ = run("unified", arrivals, replace(SMALL, prefill_chunk=chunk), costs=TrueCosts())
        gaps.append(max(outcome.longest_gap for outcome in report.outcomes[:2]))
    assert gaps[1] < 0.6 * gaps[0]


# -- plans tell the architectures apart --------------------------------------------------------------------------------


def busy_plans(name: str) -> list[Plan]:
    return run(name, poisson(40.0, 30, Acceptance(0.6), lengths=SHORT, seed=4))[1].plans()


def drafted_slots(plan: Plan) -> set[int]:
    return {span.slot for span in plan.draft.spans if span.drafts} if plan.draft else set()


def verified_slots(plan: Plan) -> set[int]:
    return {span.slot for span in plan.verify.spans if span.drafts} if plan.verify else set()


def test_baseline_batches_are_always_one() -> None:
    for plan in busy_plans("baseline"):
        assert sum(len(part.spans) for part in (plan.verify, plan.prefill) if part) == 1
        assert plan.draft is None or len(plan.draft.spans) == 1


def test_pd_drafts_and_verifies_in_one_plan_and_prefills_apart() -> None:
    plans = busy_plans("pd")
    assert all(drafted_slots(plan) == verified_slots(plan) for plan in plans)
    assert any(len(drafted_slots(plan)) > 1 for plan in plans)
    assert any(plan.prefill for plan in plans)
    assert all(span.start is None for plan in plans if plan.verify for span in plan.verify.spans)


def test_pdv_verifies_many_while_others_draft() -> None:
    plans = busy_plans("pdv")
    assert any(
        len(verified_slots(plan)) > 1 and drafted_slots(plan) and not verified_slots(plan) & drafted_slots(plan)
        for plan in plans
    )


def test_unified_never_hands_over() -> None:
    plans = busy_plans("unified")
    assert all(plan.prefill is None for plan in plans)
    assert all(drafted_slots(plan) == verified_slots(plan) for plan in plans)
    kinds = [{span.start is None for span in plan.verify.spans} for plan in plans if plan.verify]
    assert {True, False} in kinds, "prompt chunks ride with verify spans"


# -- the simulator itself ----------------------------------------------------------------------------------------------


def test_one_request_alone_takes_what_its_passes_cost() -> None:
    seconds, costs = a_pass()
    report, _ = run("plain", burst(1, 100, 11), replace(SMALL, drafter=None), costs=costs)
    assert report.seconds == pytest.approx(11 * seconds)
    [outcome] = report.outcomes
    assert outcome.first == pytest.approx(seconds)
    assert outcome.tpot == pytest.approx(seconds)
    assert outcome.met(500.0) and report.throughput == pytest.approx(1 / seconds)


def test_tokens_a_pass_follow_acceptance() -> None:
    """α = 0.8 and L = 4: 3.36 tokens a span, 0.59 of the drafts."""
    acceptance = Acceptance(0.8, spread=0.0, swing=0.0)
    lengths = Lengths(output_median=5000, output_sigma=0.0, longest_output=5000, prompt_median=20, long_share=0.0)
    report, log = run("unified", poisson(50.0, 8, acceptance, lengths=lengths, seed=1), length=4)
    assert report.accepted / report.drafted == pytest.approx(0.59, abs=0.02)
    spans = sum(len(verified_slots(plan)) for plan in log.plans())
    assert report.accepted / spans == pytest.approx(2.36, abs=0.06)


def test_verdicts_one_step_late_change_times_not_tokens() -> None:
    arrivals = poisson(40.0, 20, Acceptance(0.6), lengths=SHORT, seed=8)
    prompt, late = (run("unified", arrivals, replace(SMALL, late=late))[0] for late in (False, True))
    assert [o.tokens for o in prompt.outcomes] == [o.tokens for o in late.outcomes]
    assert prompt.accepted <= late.drafted


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_the_books_hold_whatever_the_device_decided(name: str, late: bool) -> None:
    """The host's bounds enclose the device's length, and the draft never reads more than there is."""
    ahead = 0

    def watch(simulation: Simulation, snapshot: Snapshot, plan: Plan) -> None:
        nonlocal ahead
        for view in snapshot.requests:
            request = simulation.running[view.slot]
            if request.alive:
                assert view.length_floor <= request.device_length <= view.length_bound
                ahead += request.device_length > request.confirmed
        for span in plan.draft.spans if plan.draft else ():
            assert 0 <= span.rows <= simulation.running[span.slot].draft_lag

    arrivals = poisson(40.0, 20, Acceptance(0.6), lengths=SHORT, seed=8)
    Simulation(make(name), arrivals, NOISY, replace(SMALL, late=late), seed=1, on_step=watch).run()
    assert bool(ahead) == late


@pytest.mark.parametrize("late", [False, True])
def test_a_snapshot_is_a_pure_read_and_its_counters_only_grow(late: bool) -> None:
    seen: list[Snapshot] = []

    def watch(simulation: Simulation, snapshot: Snapshot, plan: Plan) -> None:
        assert simulation.snapshot() == simulation.snapshot()
        seen.append(snapshot)

    arrivals = poisson(40.0, 12, Acceptance(0.6), lengths=SHORT, seed=8)
    Simulation(make("auto"), arrivals, NOISY, replace(SMALL, late=late), seed=1, on_step=watch).run()
    for counter in ("step", "now", "emitted", "verdicts"):
        values = [getattr(snapshot, counter) for snapshot in seen]
        assert values == sorted(values) and values[-1] > 0


def a_pass() -> tuple[float, TrueCosts]:
    """Seconds of any small pass, and the costs of which that is true."""
    each = Coefficients(context=0.0, chunk_context=0.0)
    return each.base, TrueCosts(each)


@pytest.mark.parametrize("share", [0.25, 2.0])
def test_the_host_plans_while_the_device_runs(share: float) -> None:
    """Where verdicts are late, a step costs the longer of both.

    The host finds a token when its pass has run and the next step is planned.
    """
    seconds, costs = a_pass()
    options = replace(SMALL, drafter=None, late=True, host_seconds=share * seconds)
    report, _ = run("plain", replay([(0.0, 100, 11)], 0.0), options, costs=costs)
    [outcome] = report.outcomes
    assert outcome.first == pytest.approx((share + max(1.0, share)) * seconds)
    assert outcome.gaps[:-1] == pytest.approx([max(1.0, share) * seconds] * 9)  # behind the last there is no next step


def test_who_arrives_while_a_step_is_running_is_in_the_one_after_the_next() -> None:
    """The next step has been launched by then."""
    seconds, costs = a_pass()
    options = replace(SMALL, drafter=None, late=True)
    arrivals = replay([(0.0, 100, 40), (10.5 * seconds, 100, 5)], 0.0)
    report, _ = run("plain", arrivals, options, costs=costs)
    first = report.outcomes[1].first
    assert first is not None and first / seconds == pytest.approx(13.0)


def test_the_host_is_waited_for_where_verdicts_are_prompt() -> None:
    seconds, costs = a_pass()
    options = replace(SMALL, drafter=None, host_seconds=0.25 * seconds, host_request=0.25 * seconds)
    report, _ = run("plain", replay([(0.0, 100, 11)], 0.0), options, costs=costs)
    assert report.outcomes[0].tpot == pytest.approx(1.5 * seconds)


def test_padded_passes_cost_the_rows_they_are_padded_to() -> None:
    """Eight prompts of 64 tokens and eight tokens fill their passes; nine do not."""
    costs = TrueCosts(replace(Coefficients(context=0.0, chunk_context=0.0), row=1e-3))
    for count, same in ((8, True), (9, False)):
        arrivals = replay([(0.0, 64, 20)] * count, 0.0)
        options = replace(SMALL, batch_size=16, drafter=None, prefill_chunk=1024)
        bare, padded = (
            run("plain", arrivals, replace(options, padded=on), costs=costs)[0].seconds for on in (False, True)
        )
        assert (padded == pytest.approx(bare)) == same and padded >= bare - 1e-9


def test_a_workload_runs_as_on_a_gpu() -> None:
    arrivals = poisson(8.0, 40, Acceptance(0.8), seed=2)
    options = gpu_settings(batch_size=64)
    assert options.late and options.padded and options.host_seconds > 0
    report, log = run("unified", arrivals, options, costs=TrueCosts(h200().coefficients))
    assert all(outcome.finished for outcome in report.outcomes)
    assert all(snapshot.most_chunks == CHUNKS for snapshot, _ in log.steps)


def test_a_head_reads_a_prompt_before_the_next_step_and_after_the_first_token() -> None:
    quick, slow = (
        run("unified", burst(1, 100, 4), replace(SMALL, head=True, head_token=token), costs=TrueCosts())[0].outcomes[0]
        for token in (0.0, 1e-3)
    )
    assert slow.first == quick.first, "the first token has left by then"
    assert slow.gaps[0] - quick.gaps[0] == pytest.approx(0.1) and slow.gaps[1:] == pytest.approx(quick.gaps[1:])


def test_wrong_costs_are_wrong_by_what_was_asked() -> None:
    true, wrong = Coefficients(), TrueCosts().off_by(0.2, seed=1)
    ratios = [getattr(wrong.coefficients, name) / value for name, value in asdict(true).items() if value]
    assert all(ratio == pytest.approx(0.8) or ratio == pytest.approx(1.2) for ratio in ratios)
    assert TrueCosts().off_by(0.2, seed=1) == wrong


def test_unfinished_requests_count_at_the_time_they_were_stopped() -> None:
    report = Simulation(make("plain"), burst(2, 50, 500), NOISY, SMALL).run(until=0.5)
    figures = report.summary()
    assert figures["unfinished"] == 2 and figures["goodput"] == 0
    assert figures["e2e_p50"] == pytest.approx(1e3 * report.seconds)


def test_short_prompts_get_slots_before_long_ones_that_came_first() -> None:
    """As in the engine: no more prompts hold a slot unread than the next passes take."""
    arrivals = replay([*((0.0, 300 + i, 20) for i in range(12)), (1e-3, 4, 20)], 0.8)
    _, log = run("unified", arrivals, replace(SMALL, batch_size=16, queue_factor=1.0, prefill_chunk=256))
    seen = [[view.request_id for view in snapshot.requests] for snapshot, _ in log.steps]
    assert seen[0] == list(range(CHUNKS)) and seen[1][-1] == 12, "the short one goes before four that wait"
