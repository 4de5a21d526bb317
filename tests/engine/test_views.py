"""What policies are told of a request and of a verdict: every field is the one that it is called."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.arms import make, parameters, prompts
from verifypd import SamplingParams
from verifypd.batch import Verdict, VerifySpan
from verifypd.config import EngineConfig
from verifypd.control.observe import Observation
from verifypd.control.prompts import COUNTED
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.engine.verdicts import observation
from verifypd.engine.views import _view, _waiting_tokens, snapshot
from verifypd.inflight import Draft
from verifypd.request import Request, State

CONFIG = EngineConfig(max_draft=9, slo_ttft=700.0, slo_tpot=31.0)
PARAMS = SamplingParams(temperature=0.7, draft_temperature=0.4, seed=1, prompt_logprobs=2, priority=-3)


@pytest.fixture
def request_() -> Request:
    made = Request("a", [1] * 20, PARAMS, seed=1, max_length=90, arrival=100.0, order=41)
    made.tokens += [2, 3, 4]
    made.slot, made.state, made.served = 5, State.VERIFY, 17
    made.confirmed, made.computed, made.draft_lag, made.draft = 23, 22, 6, Draft(4, "model", 1.2)
    made.inflight.append(Draft(8))
    made._drafts_out = 8
    made.metrics.first_token_time, made.last_output, made.entered = 101.5, 103.0, 104.5
    return made


def test_a_view_names_what_it_shows(request_: Request) -> None:
    """The view is made by position, and no two of these values are the same."""
    drafter = SimpleNamespace(name="model", reader=None, expected=lambda request: 7)
    choice = SimpleNamespace(pick=lambda order: ("ngram", 8, (10, 11)) if order == 41 else None)
    lanes = SimpleNamespace(drafters={"ngram": SimpleNamespace(has_cache=True)})
    engine: Any = SimpleNamespace(config=CONFIG, drafter=drafter, choice=choice, decode=lanes)
    assert _view(engine, request_, 110.0, True, 64.0) == RequestView(
        slot=5,
        rank=(-3, 41),
        served=17,
        chunk_start=22,
        prefill_left=0,
        length_floor=24,
        length_bound=32,
        max_length=90,
        draft_limit=9,
        draft_lag=6,
        expected=8,
        prompt_logprobs=2,
        request_id=41,
        waited=5.5,
        pending=4,
        drafter="model",
        slo_ttft=700.0,
        slo_tpot=31.0,
        decoding=8.5,
        since_output=7.0,
        emitted=3,
        greedy=False,
        coupled=True,
        temperature=0.7,
        draft_temperature=0.4,
        proposer="ngram",
        lookups=(10, 11),
    )


def test_a_view_of_a_prompt(request_: Request) -> None:
    request_.state = State.PREFILL
    engine: Any = SimpleNamespace(config=CONFIG, drafter=None, choice=None)
    view = _view(engine, request_, 110.0, True, 64.0)
    assert (view.prefill_left, view.draft_limit, view.expected, view.proposer) == (1, 0, 0, None)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({"slo_ttft": 300.0, "slo_tpot": 7.0}, (300.0, 7.0)),
        ({"deadline_ms": 1000.0}, (500.0, 500.0 / 40)),  # answers have 40 tokens on average
    ],
)
def test_a_view_shows_the_requests_own_targets(
    request_: Request, own: dict[str, Any], wanted: tuple[float, float]
) -> None:
    request_.params = SamplingParams(**own)
    engine: Any = SimpleNamespace(config=EngineConfig(slo_ttft=700.0, slo_gap=20.0), drafter=None, choice=None)
    view = _view(engine, request_, 110.0, True, 40.0)
    assert (view.slo_ttft, view.slo_tpot) == pytest.approx(wanted)


def test_a_long_queue_counts_whole() -> None:
    """Though only its first requests are looked at."""
    waiting = [
        Request(str(i), [1] * 20, PARAMS, seed=1, max_length=90, arrival=0.0, order=i) for i in range(3 * COUNTED)
    ]
    assert _waiting_tokens(waiting) == 3 * COUNTED * 20
    assert _waiting_tokens(waiting[:7]) == 140 and _waiting_tokens([]) == 0


def test_an_observation_names_what_it_saw(request_: Request) -> None:
    span = VerifySpan(slot=5, rows=5, drafts=4, start=None, emits=True, context=27, drafter="ngram")
    verdict = Verdict(slot=5, accepted=2, drafted=4, tokens=(7, 8, 9), finish=None)
    seen = observation(request_, span, verdict, 1.3, CONFIG)
    assert seen == Observation(
        request_id=41,
        drafted=4,
        accepted=2,
        emitted=3,
        coupled=True,
        greedy=False,
        temperature=0.7,
        drafter="ngram",
        tau=None,  # the request's own: nobody chose it
    )
    request_.params = SamplingParams(temperature=0.7, seed=1)
    assert observation(request_, span, verdict, 1.3, CONFIG).tau == 1.3


@pytest.mark.parametrize(
    ("drafter", "controller"), [("both", "throughput"), ("ngram", "fixed"), ("head", "throughput")]
)
def test_a_snapshot_changes_nothing(pair: tuple[Path, Path], drafter: str, controller: str) -> None:
    """Two in a row are equal, what drafters know is what it was, and no later plan is another for it."""
    found = [_plans(pair, drafter, controller, looks) for looks in (0, 10)]
    assert found[0] == found[1]
    drafters = {span.drafter for plan in found[0] if plan.draft for span in plan.draft.spans if span.drafts}
    assert drafters == ({None, "ngram"} if drafter == "both" else {None})


def _plans(pair: tuple[Path, Path], drafter: str, controller: str, looks: int) -> list[Plan]:
    """Of a run on a clock that ticks once a step, in which so many snapshots are taken before and behind each plan."""
    plans: list[Plan] = []
    with make(pair, "unified", drafter, controller=controller, late_tickets=True) as llm:
        engine: Any = llm.engine
        engine.clock = engine.residents.clock = lambda: float(engine.stats.steps)
        engine.architecture.observe_step = lambda timing: None  # times are never twice the same
        plan = engine.architecture.plan

        def look() -> None:
            before = pickle.dumps((engine.choice, getattr(engine.drafter, "_indexes", None)))
            assert all(snapshot(engine) == snapshot(engine) for _ in range(looks))
            assert pickle.dumps((engine.choice, getattr(engine.drafter, "_indexes", None))) == before

        def planned(seen: Snapshot) -> Plan:
            if looks:
                assert snapshot(engine) == seen
            look()
            plans.append(plan(seen))
            return plans[-1]

        engine.architecture.plan = planned
        llm._submit(prompts(6), parameters(6))
        while engine.busy:
            look()
            engine.step()
    return plans
