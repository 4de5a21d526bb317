"""Which prompts join a step and how much of them: their order, their sure share, the bound on a step, backpressure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.views import prompt, snapshot, view
from verifypd.batch import VerifySpan
from verifypd.buckets import CHUNKS as PASS
from verifypd.buckets import chunk_bucket
from verifypd.control.architectures import Architecture
from verifypd.control.cost import CHUNKS, NOTHING, Coefficients, CostModel, Work
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.prompts import (
    COUNTED,
    PRECISION,
    Beside,
    PromptKey,
    Reading,
    Room,
    admissible,
    candidates,
    in_order,
    next_chunks,
    prompt_key,
)
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.control.tuning import OVERDUE, PROMPT_SHARE
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import Acceptance, Lengths, poisson
from verifypd.simulate.world import Settings, TrueCosts

GPU = Coefficients()
MANY = 8  # prompts a pass may carry


def read(
    prompts: list[RequestView],
    beside: Beside | None = None,
    *,
    cost: CostModel | None = None,
    room: int = MANY,
    joining: int | None = None,
    **changes: Any,
) -> Reading:
    state = snapshot(prompts, **{"prefill_chunk": 2048, **changes})
    return next_chunks(state, cost or CostModel(GPU), beside or Beside(), Room(room, state.prefill_chunk, joining))


def rows(spans: tuple[VerifySpan, ...]) -> dict[int, int]:
    return {span.slot: span.rows for span in spans}


def decoding(count: int, worth: float = 0.0, context: int = 512, **changes: Any) -> Beside:
    return Beside(Work(count, count * context), worth=worth, **changes)


# -- the order ---------------------------------------------------------------------------------------------------------


def order(*waiting: RequestView) -> list[int]:
    return [each.slot for each in in_order(snapshot(waiting))]


def test_the_shortest_goes_first_and_of_like_ones_the_first_to_arrive() -> None:
    assert order(prompt(0, 300), prompt(1, 100), prompt(2, 200), prompt(3, 100)) == [1, 3, 2, 0]


def test_what_is_left_counts_not_what_was_read() -> None:
    assert order(prompt(0, 150), prompt(1, 100, read=4000)) == [1, 0]


def test_priority_goes_before_everything() -> None:
    overdue = {"since_output": 99.0, "slo_ttft": 500.0}
    assert order(prompt(0, 10, priority=1, **overdue), prompt(1, 4000, priority=0)) == [1, 0]


def test_a_tighter_target_goes_before_a_looser_one() -> None:
    assert order(prompt(0, 100, slo_ttft=500.0), prompt(1, 300, slo_ttft=100.0)) == [1, 0]


def test_one_that_is_late_counts_double() -> None:
    late = {"since_output": 0.6, "slo_ttft": 500.0}
    assert order(prompt(0, 150), prompt(1, 200, **late)) == [1, 0]
    assert order(prompt(0, 90), prompt(1, 200, **late)) == [0, 1]


def test_one_that_is_overdue_goes_first() -> None:
    overdue = {"since_output": OVERDUE * 0.5 + 0.01, "slo_ttft": 500.0}
    assert order(prompt(0, 1), prompt(2, 4000, **overdue), prompt(1, 4000, **overdue)) == [1, 2, 0]
    almost = {"since_output": OVERDUE * 0.5 - 0.01, "slo_ttft": 500.0}
    assert order(prompt(0, 1), prompt(1, 4000, **almost)) == [0, 1]


def test_a_target_that_no_step_can_keep_makes_nobody_overdue_sooner() -> None:
    """First tokens within 1 ms are asked for: long prompts do not go first because all are late."""
    waited = {"since_output": OVERDUE * 60e-3 - 0.01, "slo_ttft": 30.0}
    assert order(prompt(0, 1, **waited), prompt(1, 4000, **waited)) == [0, 1]
    later = {"since_output": OVERDUE * 60e-3 + 0.01, "slo_ttft": 30.0}
    assert order(prompt(0, 10, slo_ttft=30.0), prompt(1, 4000, **later)) == [1, 0]


def test_of_several_that_are_overdue_a_short_one_does_not_wait_for_all_the_long_ones() -> None:
    """Nor a long one for all the short ones that come after it."""
    long, short = {"since_output": 60.0, "slo_ttft": 500.0}, {"since_output": OVERDUE * 0.5 + 0.01, "slo_ttft": 500.0}
    assert order(*(prompt(i, 3500, **long) for i in range(5)), prompt(9, 4, **short)) == [9, 0, 1, 2, 3, 4]
    assert order(prompt(0, 3500, **long), *(prompt(i, 200, **short) for i in range(1, 4))) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4000), st.floats(0, 3)), min_size=2, max_size=6))
def test_who_waits_longer_never_falls_behind_its_equal(made: list[tuple[int, int, float]]) -> None:
    for number, (priority, left, waited) in enumerate(made):
        younger = prompt_key((priority, number), left, waited, 500.0, 30.0)
        assert prompt_key((priority, number), left, waited + 1.0, 500.0, 30.0) <= younger


def test_slots_are_given_in_the_order_of_reading_to_no_more_than_the_next_passes_take() -> None:
    def key(length: int) -> PromptKey:
        return prompt_key((0, 0), length, 0.0, 500.0, 30.0)

    assert admissible([30, 10, 20], [], 0, 64, key) == 10
    held = [40] * PASS
    assert admissible([50], held[1:], sum(held), 64, key) == 50, "another pass may have a chunk of it"
    assert admissible([50], held, 63, 64, key) == 50, "or more of its tokens"
    assert admissible([50], held, 64, 64, key) is None and admissible([40], held, 64, 64, key) is None
    assert admissible([50, 39], held, 64, 64, key) == 39, "it is read before those that hold a slot"
    assert admissible([2] * COUNTED + [1], [], 0, 64, key) == 2, "so far back nobody looks"


# -- value -------------------------------------------------------------------------------------------------------------


def test_the_chunk_of_greatest_value_is_taken() -> None:
    waiting = [prompt(slot, left) for slot, left in enumerate((40, 60, 400, 900))]
    beside = Beside(Work(8, 8 * 512), worth=0.5)
    reading = read(waiting, beside)
    state = snapshot(waiting, prefill_chunk=2048)
    found = candidates(in_order(state), state, CostModel(GPU), beside, Room(MANY, 2048))
    assert len(found) > 1 and reading.chosen == max(found, key=lambda chunk: chunk.value)
    assert reading.runner_up == sorted(found, key=lambda chunk: -chunk.value)[1]


def test_the_value_of_prompt_tokens_by_hand() -> None:
    """The seconds that decoding would take to bring as much, less those that they add."""
    chosen = read([prompt(0, 100, slo_ttft=500.0)], decoding(8, 0.01)).chosen
    assert chosen is not None and chosen.tokens == 100
    alone = CostModel(GPU).pass_seconds(decoding(8).decode)
    assert chosen.value == pytest.approx(1000 / 500 / (0.01 / alone) - (chosen.seconds - alone))


def test_a_short_prompt_does_not_put_off_a_long_one_beside_it() -> None:
    """The long one's tokens are to be read in any case: that another ends in this step is no reason to wait."""
    alone = rows(read([prompt(0, 4000)], decoding(8, 0.01)).spans)
    beside = rows(read([prompt(0, 4000), prompt(1, 20)], decoding(8, 0.01)).spans)
    assert beside[1] == 20 and beside[0] >= 0.9 * (alone[0] - 20)


def test_whom_prompts_keep_waiting_decides_how_much_is_read() -> None:
    """The dearer decoding is, the less of a prompt joins; the dearer the prompt, the more."""
    sizes = [rows(read([prompt(0, 4000)], decoding(64, worth)).spans)[0] for worth in (0.0, 0.5, 20.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    hurried = rows(read([prompt(0, 4000, slo_ttft=1.0)], decoding(64, 20.0)).spans)[0]
    assert hurried > sizes[-1]


def test_a_choice_says_what_it_was_chosen_over() -> None:
    reading = read([prompt(0, 600), prompt(1, 900)], decoding(64, 1.0))
    assert reading.chosen is not None and reading.runner_up is not None
    assert reading.chosen.value >= reading.runner_up.value
    assert reading.work.rows == sum(rows(reading.spans).values()) == reading.chosen.tokens
    only = read([prompt(0, 4)], decoding(64, 1.0))
    assert only.chosen is not None and only.chosen.tokens == 4 and only.runner_up is None, "it is no rival of itself"


# -- at most one prompt is partly read ---------------------------------------------------------------------------------


def test_what_does_not_fit_gives_way_to_one_that_is_begun() -> None:
    waiting = [prompt(0, 100), prompt(1, 700), prompt(2, 900, read=50), prompt(3, 1500)]
    assert rows(read(waiting, prefill_chunk=500).spans) == {0: 100, 2: 400}
    assert rows(read(waiting, prefill_chunk=1000).spans) == {0: 100, 1: 700, 2: 200}
    assert rows(read(waiting[:2], prefill_chunk=500).spans) == {0: 100, 1: 400}, "none is begun yet"


ARCHITECTURES = ("plain", "unified", "pd", "pdv", "auto")
SHORT = Lengths(prompt_median=60, output_median=12, long_share=0.3, long_prompt=(300, 1500))


def policy(name: str, cost: CostModel) -> Architecture:
    return make_architecture(name, make_controller("throughput" if name == "auto" else "fixed", 3, cost), cost)


@settings(max_examples=40)
@given(
    name=st.sampled_from(ARCHITECTURES),
    rate=st.sampled_from([20.0, 100.0, math.inf]),
    batch=st.integers(1, 12),
    chunk=st.sampled_from([64, 256, 1024]),
    slo_ttft=st.sampled_from([20.0, 500.0]),
    late=st.booleans(),
    fitted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_at_most_one_prompt_is_partly_read(
    name: str, rate: float, batch: int, chunk: int, slo_ttft: float, late: bool, fitted: bool, seed: int
) -> None:
    """In every step, and no step reads more prompt tokens than it may."""

    def watch(_: Simulation, seen: Snapshot, plan: Plan) -> None:
        begun = [each.slot for each in seen.requests if each.prefill_left and each.chunk_start]
        assert len(begun) <= 1, f"step {seen.step}: {begun} are partly read"
        parts = [part for part in (plan.verify, plan.prefill) if part]
        assert sum(span.rows for part in parts for span in part.spans if span.start is not None) <= chunk

    options = Settings(batch_size=batch, verify_batch=4, prefill_chunk=chunk, slo_ttft=slo_ttft, late=late)
    arrivals = poisson(rate, 15, Acceptance(0.6), lengths=SHORT, seed=seed)
    report = Simulation(
        policy(name, CostModel(GPU if fitted else None)), arrivals, TrueCosts(GPU), options, seed=seed, on_step=watch
    ).run()
    assert all(outcome.finished for outcome in report.outcomes)


# -- how much ----------------------------------------------------------------------------------------------------------

WAITING = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 1), st.floats(0, 3), st.sampled_from([50.0, 500.0])),
    min_size=1,
    max_size=12,
)
BESIDE = st.builds(
    decoding,
    st.integers(1, 200),
    worth=st.floats(0, 50),
    context=st.integers(10, 3000),
    draft_seconds=st.sampled_from([0.0, 2e-3]),
    apart=st.booleans(),
)
COSTS = st.builds(
    Coefficients,
    base=st.floats(1e-3, 20e-3),
    row=st.sampled_from([0.0, 10e-6]),
    steep=st.floats(5e-6, 200e-6),
    knee=st.floats(1, 400),
    mixed=st.sampled_from([0.0, 5e-3]),
)


def made(waiting: list[tuple[int, int, float, float]]) -> list[RequestView]:
    return [
        prompt(slot, left, read=read, since_output=waited, slo_ttft=target)
        for slot, (left, read, waited, target) in enumerate(waiting)
    ]


@pytest.mark.slow
@given(
    WAITING, BESIDE, COSTS, st.integers(1, 4096), st.integers(0, 9), st.none() | st.integers(-1, 3), st.floats(0.5, 2)
)
def test_a_step_never_reads_more_than_it_may(
    waiting: list[tuple[int, int, float, float]],
    beside: Beside,
    coefficients: Coefficients,
    chunk: int,
    room: int,
    joining: int | None,
    factor: float,
) -> None:
    cost, views = CostModel(coefficients), made(waiting)
    cost.factors[CHUNKS] = factor
    spans = read(views, beside, cost=cost, prefill_chunk=chunk, room=room, joining=joining).spans
    assert sum(span.rows for span in spans) <= chunk
    assert len(spans) <= max(1, room) and len({span.slot for span in spans}) == len(spans)
    for span in spans:
        each = views[span.slot]
        assert 1 <= span.rows <= each.prefill_left and span.start == each.chunk_start
        assert span.emits == (span.rows == each.prefill_left) and span.context == each.chunk_start + span.rows
    if joining is not None:
        assert sum(span.emits for span in spans) <= max(0, joining)
    elif room:
        assert spans, "whoever waits gets something"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("mixed", "factor"), [(0.0, 1.0), (20e-3, 1.0), (0.0, 3.0)])
def test_prompts_are_sure_of_their_share_of_a_step(apart: bool, mixed: float, factor: float) -> None:
    """However dear decoding is, and whatever it costs a step to carry any prompt."""
    cost = CostModel(replace(GPU, mixed=mixed))
    cost.factors[CHUNKS] = factor
    least = read([prompt(0, 1)], decoding(64, 1e9, apart=apart), cost=cost).chosen
    chosen = read([prompt(0, 4000)], decoding(64, 1e9, apart=apart), cost=cost).chosen
    assert least is not None and chosen is not None
    assert (chosen.seconds - least.seconds) / chosen.seconds == pytest.approx(PROMPT_SHARE, abs=0.03)


def test_a_share_of_few_tokens_is_found_to_the_token() -> None:
    """Where a row takes milliseconds, as on a CPU: a quarter of the step is some tokens, and not one."""
    cost = CostModel(Coefficients(base=20e-3, row=0.4e-3, steep=3.2e-3, knee=3, context=5e-6, chunk_context=1.6e-6))
    chosen = read([prompt(0, 170)], decoding(7, 1e9), cost=cost, prefill_chunk=256).chosen
    assert chosen is not None and chosen.tokens >= 3


@settings(max_examples=200)
@given(WAITING, BESIDE, COSTS, st.sampled_from([10.0, 30.0, 60.0]))
def test_a_step_keeps_within_the_gap_target_where_it_can(
    waiting: list[tuple[int, int, float, float]], beside: Beside, coefficients: Coefficients, gap: float
) -> None:
    """Unless prompts' sure share takes longer, or more of them wait than can be read by their target so."""
    cost, views = CostModel(coefficients), made(waiting)
    chosen = read(views, beside, cost=cost, slo_gap=gap).chosen
    least = read([views[0]._replace(prefill_left=1)], beside, cost=cost).chosen
    assert chosen is not None and least is not None
    step = gap / 1e3
    longer_pays = step <= least.seconds or late(1.0001 * step, least.seconds, views, cost, gap) < late(
        step, least.seconds, views, cost, gap
    )
    share = least.seconds / (1.0 - PROMPT_SHARE)
    assert longer_pays or chosen.seconds <= max(step, share) * 1.001


def late(step: float, least: float, waiting: list[RequestView], cost: CostModel, gap: float) -> float:
    """How late gaps and first tokens are, together, where steps last so many seconds, `least` without prompts."""
    tokens = sum(view.prefill_left for view in waiting)
    each = cost.pass_seconds(Work(tokens, tokens, tokens)) / tokens
    read_in = [each * view.prefill_left * step / (step - least) / max(view.slo_ttft, 2 * gap) for view in waiting]
    return step * 1e3 / gap + sum(read_in) * 1e3


def test_a_chunk_fills_the_pass_that_is_run() -> None:
    """Where passes are padded, a step that the gap target ends leaves no row void that prompts could have."""
    cost = CostModel(GPU)
    cost.padded = True
    chosen = read([prompt(0, 4000)], decoding(45), cost=cost).chosen
    assert chosen is not None
    assert chunk_bucket(chosen.tokens + 45) - (chosen.tokens + 45) <= 1 + chosen.tokens // PRECISION
    assert chosen.seconds <= 30e-3 < cost.pass_seconds(Work(chosen.tokens + 54, 45 * 512, chosen.tokens + 9))


@pytest.mark.parametrize(("gap", "target"), [(20.0, 200.0), (20.0, 1.0), (5.0, 200.0)])
def test_the_bound_gives_way_with_the_backlog(gap: float, target: float) -> None:
    """To where gaps and first tokens are least late together; with a gap target that decoding alone exceeds, too."""
    cost = CostModel(GPU)
    cost.overhead = 1e-3
    beside = replace(decoding(64), draft_seconds=5e-3)
    least = cost.pass_seconds(beside.decode + Work(1, 1, 1, 1)) + 6e-3

    def seconds(prompts: int) -> float:
        waiting = [prompt(slot, 4000, slo_ttft=target) for slot in range(prompts)]
        chosen = read(waiting, replace(beside, worth=1e-9), cost=cost, slo_gap=gap, prefill_chunk=20_000).chosen
        assert chosen is not None
        return chosen.seconds

    for prompts in (5, 8):
        waiting, long = [prompt(slot, 4000, slo_ttft=target) for slot in range(prompts)], seconds(prompts)
        assert long > max(gap / 1e3, least)
        best = late(long, least, waiting, cost, gap)
        assert best < min(late(factor * long, least, waiting, cost, gap) for factor in (0.9, 1.1))
    assert seconds(8) > seconds(5)


def test_the_queue_counts_as_far_as_slots_are_free() -> None:
    """Longer steps do nothing for requests that wait for others to end."""

    def seconds(**queue: int) -> float:
        state = {"slo_ttft": 200.0, "slo_gap": 20.0, "prefill_chunk": 20_000, **queue}
        chosen = read([prompt(0, 4000, slo_ttft=200.0)], replace(decoding(64), worth=1e-9), **state).chosen
        assert chosen is not None
        return chosen.seconds

    queue = {"waiting": 10, "waiting_tokens": 30_000}
    nobody, all_fit = seconds(), seconds(batch_size=11, **queue)
    assert seconds(batch_size=1, **queue) == nobody < seconds(batch_size=6, **queue) < all_fit
    assert seconds(batch_size=100, **queue) == all_fit


def test_a_requests_own_target_moves_the_bound() -> None:
    def seconds(target: float) -> float:
        waiting = [prompt(slot, 4000, slo_ttft=target) for slot in range(6)]
        chosen = read(waiting, replace(decoding(64), worth=1e-9), slo_gap=20.0, prefill_chunk=20_000).chosen
        assert chosen is not None
        return chosen.seconds

    assert seconds(100.0) > 1.1 * seconds(500.0)


def test_with_nobody_decoding_costs_unknown_or_offline_a_step_reads_all_it_may() -> None:
    assert rows(read([prompt(0, 4000)]).spans) == {0: 2048}
    assert rows(read([prompt(0, 4000)], decoding(64, 1e9), cost=CostModel()).spans) == {0: 2048}
    assert read([prompt(0, 4000)]).chosen is None
    assert rows(read([prompt(0, 4000)], decoding(64, 1e9)).spans)[0] < 2048
    assert rows(read([prompt(0, 4000)], decoding(64, 1e9), offline=True).spans) == {0: 2048}


def test_nobody_waits() -> None:
    assert read([view(0)], decoding(1)) == Reading() and Reading().work == NOTHING


# -- backpressure ------------------------------------------------------------------------------------------------------


def test_prompts_that_may_not_join_stop_one_token_short() -> None:
    waiting = [prompt(0, 100), prompt(1, 200), prompt(2, 300)]
    for joining, expected in ((None, [100, 200, 300]), (2, [100, 200, 299]), (0, [99, 199, 299])):
        spans = read(waiting, joining=joining).spans
        assert list(rows(spans).values()) == expected
        assert sum(span.emits for span in spans) == min(3, 3 if joining is None else joining)
    assert read([prompt(0, 1)], joining=0).spans == (), "its last token waits"


def test_prompts_have_chunks_in_one_pass_as_far_as_there_is_room() -> None:
    waiting = [prompt(slot, 10 + slot) for slot in range(5)]
    assert list(rows(read(waiting, room=3).spans)) == [0, 1, 2]
    assert list(rows(read(waiting, room=0).spans)) == [0], "a full batch still lets one progress"
    assert list(rows(read(waiting, most_chunks=2).spans)) == [0, 1]


def test_a_better_priority_does_not_give_way_to_who_has_begun() -> None:
    """And what the begun one leaves goes to the next."""
    begun = view(1, prefill_left=100, served=3, chunk_start=900)
    urgent = view(2, prefill_left=5000)._replace(rank=(-1, 2))
    found = read([begun, urgent]).spans
    assert [(span.slot, span.rows) for span in found] == [(2, 2048)]
    long = view(4, prefill_left=5000)
    found = read([begun, long]).spans
    assert [(span.slot, span.rows) for span in found] == [(1, 100), (4, 1948)]
