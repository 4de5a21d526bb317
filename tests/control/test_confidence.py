"""What a drafter's confidence is worth: calibrated from verdicts, and foretold from samples of how drafts go."""

from __future__ import annotations

import math
import random

import pytest

from tests.control.views import snapshot, view
from verifypd.control.allocation import Columns, Load, allocations
from verifypd.control.confidence import Calibration, Confidence
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import Observation
from verifypd.control.survival import Reliability, Survival
from verifypd.control.throughput import ThroughputController

KIND = ("greedy", 0, "model")
DEPTH = 6
# a pass costs 20 ms and 4 a row, a draft step 1
COST = CostModel(Coefficients(base=2e-2, floor=1e-6, row=4e-3, context=0.0, draft_step=1e-3, draft_row=0.0))


def seen(peaks: tuple[float, ...], drafted: int, accepted: int, order: int = 0) -> Observation:
    return Observation(order, drafted, accepted, accepted + 1, False, True, 0.0, "model", peaks=peaks)


def draft(noise: random.Random, length: int = DEPTH) -> tuple[tuple[float, ...], int]:
    """Peaks of a drafter that is surer than it thinks, half of the time sure and half not; and how far it stands."""
    peaks = tuple(noise.choice([noise.uniform(0.85, 0.99), noise.uniform(0.1, 0.6)]) for _ in range(length))
    stood = 0
    while stood < length and noise.random() < true_chance(peaks[stood]):
        stood += 1
    return peaks, stood


def true_chance(peak: float) -> float:
    return 1.0 / (1.0 + math.exp(-0.6 - 1.1 * math.log(peak / (1.0 - peak))))


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_calibration_finds_the_true_chances_even_of_what_is_withheld(floor: float) -> None:
    noise, calibration = random.Random(0), Calibration()
    for _ in range(6000):
        peaks, stood = draft(noise, 1)
        if calibration.chance(peaks[0]) > floor:
            calibration.learn(peaks[0], stood == 1)
    for peak in (0.2, 0.4, 0.6, 0.8, 0.95):
        assert calibration.chance(peak) == pytest.approx(true_chance(peak), abs=0.06)


def test_a_confidence_that_means_nothing_is_not_believed() -> None:
    noise, calibration = random.Random(1), Calibration()
    for _ in range(6000):
        peaks, _ = draft(noise, 1)
        calibration.learn(peaks[0], noise.random() < 0.5)
    assert calibration.chance(0.95) - calibration.chance(0.2) < 0.25


def test_samples_foretell_what_gates_would_keep() -> None:
    """Rows and tokens of gated drafts, against drafts that were gated."""
    noise, confidence = random.Random(2), Confidence(DEPTH, Reliability())
    assert confidence.columns({KIND: 4}, DEPTH, 0) is None, "nothing is known yet"
    for _ in range(3000):
        peaks, stood = draft(noise)
        confidence.observe(KIND, seen(peaks, DEPTH, stood))
    columns = confidence.columns({KIND: 4}, DEPTH, 0)
    assert columns is not None
    calibration, floor, rows, tokens, trials = confidence.calibration(KIND), 0.5, 0, 0, 4000
    for _ in range(trials):
        peaks, stood = draft(noise)
        alive, kept = 1.0, 0
        for peak in peaks:
            alive *= calibration.chance(peak)
            if alive <= floor:
                break
            kept += 1
        rows += kept
        tokens += min(kept, stood)
    assert columns.count(DEPTH, floor) == pytest.approx(4 * rows / trials, rel=0.25)
    assert columns.gain(DEPTH, floor) == pytest.approx(4 * tokens / trials, rel=0.25)
    assert columns.part(floor) == 1.0, "how sure a drafter is shows only once it has drafted"
    assert 1.0 < columns.steps(DEPTH, floor) <= DEPTH
    assert columns.standing_for(1, DEPTH).steps(DEPTH, floor) < columns.standing_for(16, DEPTH).steps(DEPTH, floor)
    free = columns.standing_for(4, DEPTH, free=2)
    assert free.count(2, 0.9) == pytest.approx(8.0), "rows that cost nothing are all taken"
    assert confidence.columns({KIND: 1, ("greedy", 0, "other"): 1}, DEPTH, 0) is None, "one of the kinds is not known"


def test_what_is_withheld_counts_by_its_chance() -> None:
    """Only sure tokens are judged, and nearly all of them stand: that is not taken for the acceptance of all."""
    noise, survival = random.Random(3), Survival(DEPTH)
    confidence, stood_first = Confidence(DEPTH, survival.reliability), 0
    for _ in range(4000):
        peaks, stood = draft(noise, 2)
        stood_first += stood > 0
        kept = int(confidence.calibration(KIND).chance(peaks[0]) > 0.7)
        observation = seen(peaks[:1], kept, min(kept, stood))
        withheld = confidence.observe(KIND, observation)
        assert (withheld is None) == bool(kept)
        survival.observe(observation, withheld)
    assert survival.mean(KIND) == pytest.approx(stood_first / 4000, abs=0.06)
    assert survival.calibration_error < 0.05


def test_gates_pay_where_plain_drafts_do_not() -> None:
    noise, confidence = random.Random(4), Confidence(DEPTH, Reliability())
    for _ in range(400):
        peaks, stood = draft(noise)
        confidence.observe(KIND, seen(peaks, DEPTH, stood))
    load = Load(8, 8.0, 800.0)
    curves = [[0.6, 0.36, 0.22, 0.13, 0.08, 0.05]] * 8
    gated = confidence.columns({KIND: 8}, DEPTH, 0)
    plain, *fixed = allocations(curves, load, COST)
    cut = allocations(curves, load, COST, gated=gated)[1:]
    assert max(option.rate for option in cut) > 1.05 * max([plain.rate, *(option.rate for option in fixed)])


def test_columns_of_requests_are_unchanged_by_samples() -> None:
    curves = [[0.9, 0.5], [0.4]]
    own, samples = Columns(curves), Columns(curves).standing_for(2, 2)
    assert (own.count(2, 0.45), own.gain(2, 0.45)) == (samples.count(2, 0.45), samples.gain(2, 0.45)) == (2, 1.4)
    assert (own.part(0.45), samples.part(0.45)) == (0.5, 1.0)
    assert (own.steps(2, 0.45), samples.steps(2, 0.45)) == (2, 1.75)


def learned(controller: ThroughputController, count: int = 200) -> ThroughputController:
    noise = random.Random(5)
    for i in range(count):
        peaks, stood = draft(noise, controller.max_draft)
        controller.observe(seen(peaks, len(peaks), stood, order=i % 4))
    return controller


def test_the_controller_gates_by_what_a_row_is_worth() -> None:
    views = [view(i, greedy=True) for i in range(4)]
    state = snapshot(views, gates=True)
    controller = learned(ThroughputController(COST))
    lengths = controller.draft_lengths(views, state)
    chosen = controller.chosen
    assert chosen is not None and set(lengths.values()) == {chosen.longest}
    gate = controller.gate(views[0], state)
    assert gate is not None and gate.floor == pytest.approx(chosen.threshold) and gate.enough > gate.floor > 0.2
    assert gate is controller.gate(views[1], state), "one for all of a kind"
    crowd = [view(i, greedy=True) for i in range(12)]
    controller.draft_lengths(crowd, snapshot(crowd, gates=True))
    stricter = controller.gate(crowd[0], snapshot(crowd, gates=True))
    assert stricter is not None and (stricter.floor > gate.floor or not controller.speculating)


def test_until_it_knows_the_drafter_all_is_verified_and_looked_at() -> None:
    views = [view(i, greedy=True) for i in range(4)]
    state = snapshot(views, gates=True)
    controller = ThroughputController(COST)
    assert controller.draft_lengths(views, state)
    gate = controller.gate(views[0], state)
    assert gate is not None and (gate.floor, gate.enough) == (0.0, 0.0)


def test_at_rest_it_learns_how_sure_the_drafter_is_once_and_then_asks_no_more_than_its_share() -> None:
    """Where no draft pays the lessons are all there is: as many as it takes to know a kind of request."""
    cost = CostModel(Coefficients(base=0.0, floor=1e-6, row=6e-3, context=0.0, draft_step=1e-3, draft_row=0.0))
    controller = ThroughputController(cost, probe_share=1e-6)
    views = [view(i, greedy=True) for i in range(16)]
    noise, drafted = random.Random(6), []
    for _ in range(300):
        lengths = controller.draft_lengths(views, snapshot(views, gates=True))
        drafted.append(sum(lengths.values()))
        for slot in lengths:
            peaks, stood = draft(noise, 1)
            controller.observe(seen(peaks, 1, stood, order=slot))
    assert not controller.speculating and controller.confidence.known(KIND)
    assert 16 <= sum(drafted) <= 48 and not any(drafted[-200:])
