"""Texts and laws hold under every architecture, controller and drafter temperature, while policies learn and switch.

Greedy and seeded requests must give the text of plain decoding to the token; sampled ones by rejection must follow the
verifier's law at each position. The controllers are the real ones; only the temperature they would choose is set.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.engine.arms import ARCHITECTURES, finish, make, parameters, preempt_or_abort, prompts, switch_every, until
from tests.models.checkpoints import reference_logits
from verifypd import LLM, SamplingParams
from verifypd.config import CONTROLLERS
from verifypd.control.cost import Coefficients, CostModel
from verifypd.engine import wiring
from verifypd.request import State

TAUS = (0.6, 1.0, 1.6)
REQUESTS, TOKENS = 6, 18
# drafting is all but free, and stays so: a controller that goes by costs has every reason to draft
EAGER = Coefficients(base=1e-3, row=1e-7, steep=0.0, context=0.0, draft_step=1e-6, draft_context=0.0, draft_row=0.0)


def set_tau(monkeypatch: pytest.MonkeyPatch, tau: float) -> None:
    """Engines made from now on draft at `tau` times the request's temperature, whatever their controller does else."""
    original = wiring.make_controller

    def made(name: str, max_draft: int, _: CostModel, **settings: Any) -> Any:
        cost = CostModel(EAGER)
        monkeypatch.setattr(cost, "observe", lambda timing: None)
        controller = original(name, max_draft, cost, **settings)
        monkeypatch.setattr(controller, "temperature", lambda view: tau, raising=True)
        return controller

    monkeypatch.setattr(wiring, "make_controller", made)


def short_texts(llm: LLM) -> list[list[int]]:
    """The first tokens of each request's text."""
    params = [replace(each, max_tokens=TOKENS) for each in parameters(REQUESTS)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts(REQUESTS), params)]


# -- the text of plain decoding ----------------------------------------------------------------------------------------


# every controller under every architecture, and the temperatures in turn: each meets every one of both
TURNS = [
    (arch, controller, TAUS[(i + j) % len(TAUS)])
    for i, arch in enumerate(ARCHITECTURES)
    for j, controller in enumerate(CONTROLLERS)
]


@pytest.mark.parametrize(("arch", "controller", "tau"), TURNS)
def test_greedy_and_seeded_texts_are_plain_texts(
    pair: tuple[Path, Path], plain: Any, arch: str, controller: str, tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tau(monkeypatch, tau)
    weights = "none" if tau == 0.6 else "int8"
    with make(pair, arch, controller=controller, late_tickets=tau != 1.0, draft_quantization=weights) as llm:
        assert short_texts(llm) == [text[:TOKENS] for text in plain[:REQUESTS]]
        stats = llm.engine.stats
        assert 0 < stats.accepted < stats.drafted
        held = llm.engine.slots.draft_temperatures
        assert {round(value, 3) for value in held.tolist()} <= {1.0, tau}
        assert tau == 1.0 or tau in {round(value, 3) for value in held.tolist()}, "the drafter drew at that temperature"
        llm.engine.check()


@pytest.mark.parametrize(("controller", "tau"), [("throughput", 1.6), ("threshold", 0.6)])
def test_a_switch_every_20_steps_under_load_leaves_texts_as_they_are(
    pair: tuple[Path, Path], plain: Any, controller: str, tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tau(monkeypatch, tau)
    with make(pair, "pdv", controller=controller, late_tickets=True, batch_size=3) as llm:
        switch_every(llm, 20)
        outputs = llm.generate(prompts(10), parameters(10))
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert llm.engine.stats.switches > 2 and llm.engine.stats.drafted
        llm.engine.check()


# -- the law of sampling -----------------------------------------------------------------------------------------------

WARMTH = 0.35  # of the requests: sharp enough for the drafter's temperature to matter
CASES = [
    ("unified", "throughput", 1.0, 1800, {}),
    ("unified", "fixed", 1.6, 1800, {}),
    ("pd", "throughput", 0.6, 1800, {}),
    ("pdv", "throughput", 1.6, 1800, {"verify_batch": 100}),
    ("table", "threshold", 0.6, 1800, {"verify_batch": 100}),
    ("table", "throughput", 1.0, 1800, {"verify_batch": 100}),
    ("auto", "throughput", 0.6, 1800, {}),
    ("baseline", "throughput", 1.6, 500, {"workers": 4, "batch_size": 8}),  # one request a step: fewer of them
]


@pytest.mark.parametrize(("arch", "controller", "tau", "draws", "lanes"), CASES)
def test_the_law_of_each_position_is_the_verifiers(
    pair: tuple[Path, Path],
    arch: str,
    controller: str,
    tau: float,
    draws: int,
    lanes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rejection sampling against the verifier's own law after the prefixes met most often, by χ²."""
    set_tau(monkeypatch, tau)
    prompt, words = [*range(3, 11), *range(3, 11)], 8
    params = SamplingParams(
        allowed_token_ids=list(range(3, 3 + words)),
        max_tokens=4,
        ignore_eos=True,
        acceptance="rejection",
        temperature=WARMTH,
    )
    settings: dict[str, Any] = {"seed": 11, "batch_size": 400, "prefill_chunk": 4096, "draft_chunk": 8192, **lanes}
    with make(pair, arch, controller=controller, **settings) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate([prompt] * draws, params)]
        assert 0 < llm.engine.stats.accepted < llm.engine.stats.drafted
    values = []
    for position in range(4):
        for prefix, count in Counter(tuple(text[:position]) for text in found).most_common(4):
            if count < 100:
                continue
            logits = reference_logits(pair[0], [*prompt, *prefix])[-1, 3 : 3 + words].double() / WARMTH
            expected = logits.softmax(-1).numpy() * count
            seen = np.bincount([t[position] - 3 for t in found if tuple(t[:position]) == prefix], minlength=words)
            values.append(chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)
    assert len(values) >= 5
    assert min(values) > 1e-4 / len(values), values


# -- a temperature that is set -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_texts_do_not_depend_on_a_drafter_temperature_that_is_set(
    pair: tuple[Path, Path], plain: Any, drafter: str
) -> None:
    """By the engine's setting and by the request's own, which goes before it: plain texts, drawn at those heats."""
    params = [replace(each, max_tokens=TOKENS) for each in parameters(REQUESTS)]
    params[1::2] = [replace(each, draft_temperature=10.0) for each in params[1::2]]
    with make(pair, "unified", drafter, draft_temperature=0.1) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts(REQUESTS), params)]
        held = llm.engine.slots.draft_temperatures
    assert found == [text[:TOKENS] for text in plain[:REQUESTS]]
    assert {round(value, 3) for value in held.tolist()} == {0.1, 10.0, 1.0}


@pytest.mark.parametrize("tau", [0.1, 10.0])
def test_the_law_holds_for_a_drafter_temperature_of_the_request(pair: tuple[Path, Path], tau: float) -> None:
    """χ² of the first two tokens that rejection leaves, at both ends of what may be asked for."""
    prompt, words, draws = [*range(3, 11), *range(3, 11)], 8, 1500
    params = SamplingParams(
        allowed_token_ids=list(range(3, 3 + words)),
        max_tokens=3,
        ignore_eos=True,
        acceptance="rejection",
        temperature=WARMTH,
        draft_temperature=tau,
    )
    with make(pair, "unified", seed=5, batch_size=400, prefill_chunk=4096, draft_chunk=8192) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate([prompt] * draws, params)]
        assert 0 < llm.engine.stats.accepted < llm.engine.stats.drafted
    first = Counter(text[0] for text in found).most_common(1)[0][0]
    for prefix, position in (((), 0), ((first,), 1)):
        logits = reference_logits(pair[0], [*prompt, *prefix])[-1, 3 : 3 + words].double() / WARMTH
        seen = np.bincount([t[position] - 3 for t in found if tuple(t[:position]) == prefix], minlength=words)
        assert chisquare(seen, logits.softmax(-1).numpy() * seen.sum()).pvalue > 1e-4


# -- leaving in each state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leave", "state"),
    [("abort", State.WAITING), *((leave, s) for leave in ("abort", "preempt") for s in (State.PREFILL, State.DECODE))],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_leaving_in_each_state_leaks_nothing(
    pair: tuple[Path, Path], plain: Any, arch: str, state: State, leave: str
) -> None:
    """The verify lane, where a request stays between steps under `pdv` only, has a test beside the lanes."""
    with make(pair, arch, controller="throughput", late_tickets=True) as llm:
        chosen = until(llm, lambda r: r.state is state and (state is not State.DECODE or r.output_len > 3))
        preempt_or_abort(llm, chosen, leave)
        if leave == "abort":
            for other in [*llm.engine.waiting, *llm.engine.running.values()][1:]:
                llm.engine.finish(other)  # the rest soon after, wherever they are
                llm.engine.step()
                llm.engine.check()
        finish(llm)
        assert all(lane.depth == 0 for lane in llm.engine.stats.lanes.values())
        assert chosen.pending == 0 and not chosen.inflight
        expected = plain[int(chosen.request_id)]
        assert chosen.output_ids == (expected[: chosen.output_len] if leave == "abort" else expected)
