"""The targets that a request has: its own, the engine's, or what a deadline leaves; and who is read first by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import make
from verifypd import SamplingParams
from verifypd.config import EngineConfig
from verifypd.control.tuning import MEAN_OUTPUT
from verifypd.engine.terms import targets, terms_of
from verifypd.request import Request

GAP = 20.0
CONFIG = EngineConfig(slo_ttft=400.0, slo_tpot=12.0, slo_gap=GAP)
PROMPT, ANSWER = 100, 50  # tokens


def asking(answer: int = ANSWER, **own: Any) -> Request:
    return Request("a", [1] * PROMPT, SamplingParams(**own), seed=1, max_length=PROMPT + answer, arrival=0.0, order=0)


@pytest.mark.parametrize(
    ("own", "first", "further"),
    [
        ({}, 400.0, 12.0),
        ({"slo_ttft": 90.0}, 90.0, 12.0),
        ({"slo_ttft": 900.0}, 900.0, 12.0),
        ({"slo_tpot": 5.0}, 400.0, 5.0),
        ({"slo_tpot": 70.0}, 400.0, 70.0),
        ({"slo_ttft": 90.0, "slo_tpot": 5.0}, 90.0, 5.0),
        ({"deadline_ms": 300.0}, 150.0, 150.0 / ANSWER),
        ({"deadline_ms": 700.0}, 350.0, 350.0 / ANSWER),
        ({"deadline_ms": 5000.0}, 400.0, 12.0),  # there is more time than was asked for
        ({"deadline_ms": 300.0, "slo_ttft": 90.0}, 90.0, 150.0 / ANSWER),
        ({"deadline_ms": 300.0, "slo_tpot": 2.0}, 150.0, 2.0),
        ({"deadline_ms": 5000.0, "slo_ttft": 9000.0, "slo_tpot": 900.0}, 2500.0, 2500.0 / ANSWER),
    ],
)
def test_targets_are_the_requests_own_or_the_engines(own: dict[str, float], first: float, further: float) -> None:
    request = asking(**own)
    assert targets(request, CONFIG) == pytest.approx((first, further))
    terms = terms_of(request, CONFIG)
    assert (terms.slo_ttft, terms.slo_tpot) == pytest.approx((first, further))


@pytest.mark.parametrize(("answer", "expected", "counted"), [(50, 40.0, 40.0), (30, 40.0, 30.0), (50, 0.5, 1.0)])
def test_a_deadline_is_shared_by_the_tokens_that_may_come(answer: int, expected: float, counted: float) -> None:
    _, further = targets(asking(answer, deadline_ms=300.0, slo_tpot=1000.0), CONFIG, expected)
    assert further == pytest.approx(150.0 / counted)


def test_an_answer_is_expected_to_be_as_long_as_most_are() -> None:
    _, further = targets(asking(10_000, deadline_ms=1000.0), CONFIG)
    assert further == pytest.approx(500.0 / MEAN_OUTPUT)


@pytest.mark.parametrize("own", [{"slo_ttft": 1.0, "slo_tpot": 0.001}, {"deadline_ms": 0.5}])
def test_nobody_gets_a_target_that_would_take_all_the_time(own: dict[str, float]) -> None:
    first, further = targets(asking(**own), CONFIG)
    assert GAP <= first < CONFIG.slo_ttft and further == 1.0


@pytest.mark.parametrize(
    ("own", "order"),
    [
        ({}, [0, 1]),
        ({"slo_ttft": 90.0}, [1, 0]),
        ({"slo_ttft": 900.0}, [0, 1]),
        ({"deadline_ms": 200.0}, [1, 0]),
        ({"slo_ttft": 90.0, "priority": 1}, [0, 1]),  # priority goes first
    ],
)
@pytest.mark.parametrize("places", [1, 2], ids=["admitted", "read"])
def test_prompts_of_requests_in_a_hurry_are_read_first(
    pair: tuple[Path, Path], own: dict[str, Any], order: list[int], places: int
) -> None:
    """Two prompts, as long as each other, come at once; the second has targets of its own."""
    options: dict[str, Any] = {"batch_size": places, "queue_factor": 1.0, "slo_ttft": 400.0, "slo_gap": GAP}
    with make(pair, "unified", "none", **options) as llm:
        engine, started = llm.engine, []
        engine.clock = engine.residents.clock = lambda: 100.0  # nobody gets late
        asked = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, **each) for each in ({}, own)]
        jobs = llm._submit([list(range(3, 43)), list(range(50, 90))], asked)
        requests = [job.texts[0].request for job in jobs]
        while engine.busy:
            engine.step()
            started += [i for i, each in enumerate(requests) if len(each.tokens) > 40 and i not in started]
        assert started == order
