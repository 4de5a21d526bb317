"""The cost model: the formula, what a fit recovers, what is corrected online, and what it writes down."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifypd.control.cost import CHUNKS, DECODE, DRAFT, Coefficients, CostModel, Work
from verifypd.control.observe import StepTiming
from verifypd.simulate.tables import H200, h200

TRUE = Coefficients(
    base=6e-3,
    row=2e-6,
    steep=30e-6,
    knee=192.0,
    context=0.2e-6,
    chunk_context=1.5e-9,
    mixed=0.8e-3,
    draft_start=0.2e-3,
    draft_step=0.9e-3,
    draft_context=12e-9,
    draft_row=5e-6,
)
COUNTS = (1, 4, 16, 32, 64, 128)  # of requests
UNEVEN = (32, 33, 64, 65, 128, 129)  # whose rows fill a bucket, or are just too many for it


def step(truth: CostModel, rng: random.Random, noise: float, counts: Sequence[int]) -> StepTiming:
    """A made-up step with the seconds the truth gives it. counts: of requests, one of which it has."""
    count, drafts = rng.choice(counts), rng.randint(0, 6)
    chunk = rng.choice((0, 0, 128, 512))
    apart = bool(chunk) and rng.random() < 0.5
    each, start = rng.randint(100, 3000), rng.randint(0, 2000)
    context, square = float(count * each), float(chunk * (start + chunk))
    rows, riding = count * (1 + drafts), 0 if apart else chunk
    caught_up = 2 * count * bool(drafts) + rng.choice((0, 0, 300))
    verify = Work(rows + riding, context + (start + riding if riding else 0), riding, square if riding else 0.0)
    loop = context if drafts else 0.0
    factor = [math.exp(rng.gauss(0.0, noise)) for _ in range(3)]
    return StepTiming(
        draft_requests=count if drafts else 0,
        draft_steps=drafts,
        draft_rows=caught_up,
        draft_context=loop,
        verify_requests=count,
        verify_rows=int(verify.rows),
        verify_context=verify.context,
        chunk_rows=chunk,
        chunk_context=square,
        draft_seconds=factor[0] * truth.draft_seconds(drafts, caught_up, loop),
        verify_seconds=factor[1] * truth.pass_seconds(verify),
        prefill_seconds=factor[2] * truth.pass_seconds(Work(chunk, start + chunk, chunk, square)) if apart else 0.0,
    )


def samples(
    truth: CostModel, count: int, seed: int = 0, noise: float = 0.0, counts: Sequence[int] = COUNTS
) -> list[StepTiming]:
    rng = random.Random(seed)
    return [step(truth, rng, noise, counts) for _ in range(count)]


def miss(model: CostModel, timings: list[StepTiming]) -> float:
    """Mean relative error."""
    return sum(abs(model.step_seconds(t) / t.device_seconds - 1.0) for t in timings) / len(timings)


# -- the formula -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(), 0.0),
        (Work(100.0, 5000.0), 6e-3 + 100 * 2e-6 + 5000 * 0.2e-6),
        (Work(200.0, 0.0), 6e-3 + 200 * 2e-6 + 8 * 30e-6),
        (Work(100.0, 100.0, 100.0, 1e4), 6e-3 + 100 * 0.2e-6 + 1e4 * 1.5e-9),
        (Work(101.0, 0.0, 100.0, 0.0), 6e-3 + 1 * 2e-6 + 0.8e-3),
    ],
)
def test_a_pass_takes_what_the_formula_says(work: Work, seconds: float) -> None:
    assert CostModel(TRUE).pass_seconds(work) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("steps", "rows", "context", "seconds"),
    [
        (0, 0, 1000, 0.0),
        (3, 0, 0, 0.2e-3 + 3 * 0.9e-3),
        (3, 40, 1000, 0.2e-3 + 3 * (0.9e-3 + 1000 * 12e-9) + 40 * 5e-6),
        (0, 40, 0, 0.2e-3 + 0.9e-3 + 40 * 5e-6),  # catching up is a step
    ],
)
def test_a_draft_loop_takes_what_the_formula_says(steps: int, rows: float, context: float, seconds: float) -> None:
    assert CostModel(TRUE).draft_seconds(steps, rows, context) == pytest.approx(seconds)


def test_a_drafter_of_one_pass_takes_one_step_whatever_its_length() -> None:
    model = CostModel(TRUE)
    model.one_pass = True
    assert model.draft_seconds(5, 9, 100) == model.draft_seconds(1, 9, 100) == CostModel(TRUE).draft_seconds(1, 9, 100)


def test_a_padded_pass_costs_the_rows_it_is_padded_to() -> None:
    model = CostModel(replace(TRUE, row=0.0, mixed=0.0))
    model.padded = True
    chunks = [model.pass_seconds(Work(rows, 0, rows - 8)) for rows in (1024, 1025, 1152, 1153)]
    assert chunks[0] < chunks[1] == chunks[2] < chunks[3]
    decode = [model.pass_seconds(Work(rows)) for rows in (256, 257.5, 320)]
    assert decode[0] < decode[1] == decode[2]


def test_a_row_is_dear_beyond_the_knee() -> None:
    model = CostModel(TRUE)
    assert (model.slope(191.0), model.slope(192.0)) == (pytest.approx(2e-6), pytest.approx(32e-6))
    row, draft = model.prices(1, 0.0)
    assert row == pytest.approx(2e-6 / 6.002e-3) and draft == pytest.approx(0.9e-3 / 6.002e-3)
    assert model.prices(192, 0.0)[0] > 192 * 30e-6 / 8e-3


VALUE = st.floats(0.0, 1e-2)
AMOUNT = st.integers(0, 5000)


@given(st.lists(VALUE, min_size=11, max_size=11), *(st.tuples(AMOUNT, AMOUNT) for _ in range(4)), st.integers(0, 9))
def test_times_never_fall_with_more_work(
    values: list[float], rows: tuple[int, int], context: tuple[int, int], chunk: tuple[int, int], draft, steps: int
) -> None:
    names = [field.name for field in fields(Coefficients)]
    model = CostModel(replace(Coefficients(**dict(zip(names, values, strict=True))), knee=values[3] * 1e5))
    decode, more = Work(rows[0], context[0]), Work(rows[1], context[1])
    chunks = Work(chunk[0], chunk[1], chunk[0], chunk[0] * chunk[1])
    for extra in (more, chunks):
        assert 0.0 <= model.pass_seconds(decode) <= model.pass_seconds(decode + extra) * (1 + 1e-12)
    loop = model.draft_seconds(steps, draft[0], context[0])
    for longer in ((steps + 1, draft[0], context[0]), (steps, sum(draft), context[0]), (steps, draft[0], sum(context))):
        assert 0.0 <= loop <= model.draft_seconds(*longer) * (1 + 1e-12)


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_a_fit_recovers_what_was_planted_the_knee_included() -> None:
    truth = CostModel(TRUE)
    model = CostModel().fit(samples(truth, 300))
    found, wanted = asdict(model.coefficients), asdict(TRUE)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=0.02), name
    assert model.fitted and model.known
    assert miss(model, samples(truth, 100, seed=1)) < 0.001


def test_a_fit_to_padded_passes_knows_what_they_are_padded_to() -> None:
    truth, model = CostModel(TRUE), CostModel()
    truth.padded = model.padded = True
    measured, unseen = samples(truth, 300, counts=UNEVEN), samples(truth, 100, seed=1, counts=UNEVEN)
    assert miss(model.fit(measured), unseen) < 1e-6
    assert miss(CostModel().fit(measured), unseen) > 0.01


def test_a_fit_of_noisy_measurements_is_close() -> None:
    truth = CostModel(TRUE)
    model = CostModel().fit(samples(truth, 300, noise=0.1))
    assert miss(model, samples(truth, 200, seed=1)) < 0.05
    assert all(value >= 0.0 for value in asdict(model.coefficients).values())


def test_what_was_not_measured_stays_as_it_was() -> None:
    plain = [replace(t, draft_seconds=0.0) for t in samples(CostModel(TRUE), 100)]
    fitted = CostModel().fit(plain).coefficients
    assert (fitted.draft_step, fitted.draft_row) == (Coefficients().draft_step, Coefficients().draft_row)


def test_the_model_fitted_to_the_table_is_near_it() -> None:
    model = h200()
    errors = []
    for i, requests in enumerate(H200.requests):
        for j, each in enumerate(H200.tokens):
            measured = H200.passes[i][j] * 1e-3
            errors.append(abs(model.pass_seconds(Work(requests * each, requests * 512)) / measured - 1))
        loop = model.draft_seconds(4, 2 * requests, requests * 512)
        assert loop == pytest.approx(4 * H200.draft_steps[i] * 1e-3, rel=0.25)  # requests slow it as no formula says
    assert sum(errors) / len(errors) < 0.05 and max(errors) < 0.2


def test_the_table_answers_with_what_was_measured() -> None:
    ms = dict(zip(H200.requests, H200.passes, strict=True))
    assert H200.pass_seconds(32, 5) == pytest.approx(ms[32][4] / 1e3)
    assert H200.verify_seconds(128 * 3, 128 * 512) == pytest.approx(ms[128][2] / 1e3)
    assert H200.draft_seconds(4, 0, 32 * 512) == pytest.approx(4 * H200.draft_steps[2] / 1e3)
    assert H200.pass_seconds(80, 1) == pytest.approx((ms[32][0] + ms[128][0]) / 2e3)
    assert H200.verify_seconds(1, 1024) - H200.verify_seconds(1, 512, requests=1) > 0


# -- corrected online --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "timing"),
    [
        (DECODE, StepTiming(verify_requests=16, verify_rows=16, verify_context=8192.0)),
        (
            CHUNKS,
            StepTiming(verify_requests=16, verify_rows=144, verify_context=9e3, chunk_rows=128, chunk_context=2e4),
        ),
        (DRAFT, StepTiming(draft_requests=16, draft_steps=4, draft_rows=32, draft_context=8192.0)),
    ],
)
def test_each_kind_of_work_has_a_factor_of_its_own(kind: str, timing: StepTiming) -> None:
    model = CostModel(TRUE)
    part = "draft_seconds" if kind == DRAFT else "verify_seconds"
    slow = replace(timing, **{part: 1.5 * model.step_seconds(timing)})
    for _ in range(200):
        model.observe(slow)
    assert model.factors == {name: pytest.approx(1.5 if name == kind else 1.0, rel=0.01) for name in model.factors}
    assert model.step_seconds(timing) == pytest.approx(slow.device_seconds, rel=0.01)


def test_a_pass_that_a_fit_finds_free_teaches_nothing() -> None:
    """Times of a small model on a busy machine: what a prompt of one token takes may come out as nothing."""
    free = Coefficients(base=0.0, row=0.1e-3, steep=20e-6, knee=12.0, context=0.0, chunk_context=0.0)
    model, timing = CostModel(free), StepTiming(verify_rows=1, verify_context=1.0, chunk_rows=1, chunk_context=1.0)
    assert model.step_seconds(timing) == 0.0
    model.observe(replace(timing, verify_seconds=0.6e-3))
    assert model.factors[CHUNKS] == 1.0 and model.error == 0.0


def test_wrong_beliefs_come_nearer_online() -> None:
    truth = CostModel(TRUE)
    off = {name: value * (1.3 if i % 2 else 0.7) for i, (name, value) in enumerate(asdict(TRUE).items())}
    model = CostModel(Coefficients(**off))
    fresh = samples(truth, 200, seed=1)
    before = miss(model, fresh)
    for timing in samples(truth, 500, noise=0.05):
        model.observe(timing)
    assert miss(model, fresh) < 0.75 * before


def test_a_lasting_change_is_learnt_and_an_outlier_is_not() -> None:
    model = CostModel(TRUE)
    timing = StepTiming(verify_requests=16, verify_rows=16, verify_context=8192.0)
    usual = model.step_seconds(timing)
    for _ in range(100):
        model.observe(replace(timing, verify_seconds=usual))
    for _ in range(4):  # four stalls of half a second
        model.observe(replace(timing, verify_seconds=0.5))
        for _ in range(48):
            model.observe(replace(timing, verify_seconds=usual))
    assert model.step_seconds(timing) == pytest.approx(usual, rel=0.05)
    for _ in range(300):  # the clock of the device falls
        model.observe(replace(timing, verify_seconds=1.7 * usual))
    assert model.step_seconds(timing) == pytest.approx(1.7 * usual, rel=0.02)
    assert model.error < 0.05


def test_without_measurements_the_first_step_sets_the_scale_of_everything() -> None:
    model = CostModel()
    assert not model.known and not model.fitted
    slow = CostModel(Coefficients())
    slow.factors = dict.fromkeys(slow.factors, 90.0)
    model.observe(StepTiming(verify_requests=4, verify_rows=4, verify_context=400.0, verify_seconds=90 * 4.656e-3))
    assert model.known and not model.fitted, "the shape is still a guess"
    assert model.factors == {name: pytest.approx(90.0) for name in (DECODE, CHUNKS, DRAFT)}
    assert miss(model, samples(slow, 50, seed=1)) < 0.01


def test_host_work_between_passes_is_learnt() -> None:
    model = CostModel(TRUE)
    timing = StepTiming(verify_requests=1, verify_rows=1, verify_context=512.0, verify_seconds=6.1e-3)
    for _ in range(200):
        model.observe(replace(timing, step_seconds=7.1e-3))
    assert model.overhead == pytest.approx(1e-3, rel=0.05)
    model.observe(replace(timing, step_seconds=60.0))  # somebody stopped the process
    assert model.overhead < 1.3e-3
