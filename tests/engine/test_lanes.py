"""Every architecture through the whole engine: same texts, different traces, nothing lost on the way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.engine.arms import ARCHITECTURES, finish, make, preempt_or_abort, switch_every, texts, until
from tests.engine.pairs import preempt_every
from tests.models.checkpoints import reference_logits
from verifypd import SamplingParams
from verifypd.control.controller import allowed
from verifypd.engine import wiring
from verifypd.request import State
from verifypd.runtime.streams import Ticket


@pytest.mark.parametrize(("drafter", "late"), [("ngram", False), ("model", True), ("head", True), ("both", True)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_texts_are_plain_texts(pair: tuple[Path, Path], plain: Any, arch: str, drafter: str, late: bool) -> None:
    with make(pair, arch, drafter, late_tickets=late) as llm:
        preempt_every(llm, 9)
        assert texts(llm, 10) == plain
        llm.engine.check()
        assert llm.engine.stats.drafted and llm.engine.stats.accepted and llm.engine.stats.preemptions


@pytest.mark.parametrize("arch", ["unified", "pd", "pdv", "auto"])
def test_the_first_token_leaves_before_a_draft_model_reads_the_prompt(pair: tuple[Path, Path], arch: str) -> None:
    with make(pair, arch, "model", late_tickets=True) as llm:
        engine, drafted = llm.engine, []
        launch = engine.decode.launch

        def noted(batch: Any) -> None:
            drafted.append(engine.stats.passes)
            launch(batch)

        engine.decode.launch = noted  # type: ignore[method-assign]
        llm._submit([list(range(3, 63))], [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)])
        [request] = engine.waiting
        while request.state in (State.WAITING, State.PREFILL):
            engine.step()
        passes = engine.stats.passes
        assert not drafted, "the pass of its first token is launched, and the draft has read nothing"
        while engine.busy:
            engine.step()
        assert drafted[0] >= passes


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("arch", ["pd", "pdv"])
def test_prompts_beside_the_rest_change_no_text(
    pair: tuple[Path, Path], plain: Any, arch: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill lane that answers late: others go on meanwhile, and its requests when it has."""
    asked: Counter[int] = Counter()
    done, overtaken = Ticket.done, 0

    def slowly(ticket: Ticket) -> bool:
        asked[id(ticket)] += ticket.apart
        return done(ticket) and (not ticket.apart or asked[id(ticket)] > 4)

    monkeypatch.setattr(Ticket, "done", slowly)
    with make(pair, arch, late_tickets=late, placement="prefill=stream") as llm:
        preempt_every(llm, 9)
        engine = llm.engine
        absorb = engine.absorb

        def counted(ticket: Ticket) -> Any:
            nonlocal overtaken
            overtaken += not ticket.apart and bool(engine.inflight.away)
            return absorb(ticket)

        engine.absorb = counted  # type: ignore[method-assign]
        assert texts(llm, 10) == plain
        engine.drain()
        engine.check()
        assert engine.stats.preemptions and overtaken


@pytest.mark.parametrize("arch", ["pd", "pdv", "baseline"])
def test_a_pool_too_small_for_all_loses_nothing(pair: tuple[Path, Path], plain: Any, arch: str) -> None:
    with make(pair, arch, late_tickets=True, kv_memory=420_000) as llm:
        assert texts(llm, 10) == plain
        assert llm.engine.stats.preemptions


class Restless:
    """A controller that changes its mind all the time: lengths 0 to 3 and drafter temperatures 0.6 to 1.6.

    Both follow the request and its confirmed length, never a drawn token.
    """

    name = "restless"
    may_draft = drafting = True

    def draft_lengths(self, views: Any, snapshot: Any, *_: Any) -> dict[int, int]:
        return {v.slot: allowed(v, (v.request_id * 5 + v.length_floor * 3 + snapshot.step) % 4) for v in views}

    def temperature(self, view: Any) -> float:
        return 0.6 + (view.request_id + view.length_floor) % 11 / 10

    def observe(self, seen: Any) -> None: ...

    def observe_step(self, timing: Any) -> None: ...

    def forget(self, request_id: int) -> None: ...

    def state(self) -> dict[str, float]:
        return {"draft_length": 0}


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "make_controller", lambda *_args, **_settings: Restless())


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_controller_changes_a_text(pair: tuple[Path, Path], plain: Any, arch: str) -> None:
    with make(pair, arch, late_tickets=True) as llm:
        assert texts(llm, 10) == plain
        assert llm.engine.stats.drafted


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize(("arch", "drafter"), [("pdv", "model"), ("unified", "head"), ("pdv", "both")])
def test_the_law_of_each_position_holds_with_the_controller_on(
    pair: tuple[Path, Path], arch: str, drafter: str
) -> None:
    """Rejection sampling, with lengths and drafter temperatures that keep changing, against the verifier's law."""
    prompt, draws = [*range(3, 11), *range(3, 11)], 1200
    shared: dict[str, Any] = {"allowed_token_ids": list(range(3, 11)), "max_tokens": 3, "ignore_eos": True}
    lanes: dict[str, Any] = {"verify_batch": 100} if arch == "pdv" else {}
    with make(pair, arch, drafter, seed=7, batch_size=400, prefill_chunk=4096, draft_chunk=8192, **lanes) as llm:
        params = SamplingParams(**shared, acceptance="rejection", temperature=0.8)
        found = [output.outputs[0].token_ids for output in llm.generate([prompt] * draws, params)]
        assert 0 < llm.engine.stats.accepted < llm.engine.stats.drafted
    for position in range(3):
        prefix, count = Counter(tuple(text[:position]) for text in found).most_common(1)[0]
        logits = reference_logits(pair[0], [*prompt, *prefix])[-1, 3:11].double() / 0.8
        expected = logits.softmax(-1).numpy() * count
        seen = np.bincount([t[position] - 3 for t in found if tuple(t[:position]) == prefix], minlength=8)
        assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-5, (position, seen, expected)


# -- switching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "drafter", "late"),
    [
        (1, "model", True),
        (3, "ngram", True),
        (3, "model", False),
        (20, "ngram", False),
        (20, "model", True),
        (3, "head", True),
        (3, "both", False),
    ],
)
def test_switching_under_load_changes_no_text(
    pair: tuple[Path, Path], plain: Any, steps: int, drafter: str, late: bool
) -> None:
    with make(pair, "pdv", drafter, late_tickets=late) as llm:
        switch_every(llm, steps)
        if steps == 3:
            preempt_every(llm, 7)
        assert texts(llm, 10) == plain
        llm.engine.check()
        assert llm.engine.stats.switches > 2


def test_drafts_that_wait_are_verified_after_a_switch(pair: tuple[Path, Path], plain: Any) -> None:
    with make(pair, "pdv") as llm:
        waiting = until(llm, lambda r: r.state is State.VERIFY)
        pending = waiting.pending
        assert pending > 0
        before = waiting.metrics.drafted
        llm.engine.switch("plain")
        llm.engine.step()
        llm.engine.step()
        assert waiting.metrics.drafted == before + pending, "as they stood"
        finish(llm)
        assert waiting.output_ids == plain[int(waiting.request_id)]


# -- leaving the verify lane -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["abort", "preempt"])
@pytest.mark.parametrize("late", [False, True])
def test_leaving_the_verify_lane_leaks_nothing(pair: tuple[Path, Path], plain: Any, leave: str, late: bool) -> None:
    with make(pair, "pdv", late_tickets=late) as llm:
        chosen = until(llm, lambda r: r.state is State.VERIFY and r.output_len > 3)  # in the middle of its work
        preempt_or_abort(llm, chosen, leave)
        finish(llm)
        assert all(lane.depth == 0 for lane in llm.engine.stats.lanes.values())
        expected = plain[int(chosen.request_id)]
        assert chosen.output_ids == (expected[: chosen.output_len] if leave == "abort" else expected)
        assert chosen.pending == 0 and not chosen.inflight


# -- the trace tells them apart ----------------------------------------------------------------------------------------


def trace(pair: tuple[Path, Path], arch: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """The plans of a run with eight requests at once."""
    with make(pair, arch, record=str(folder), **settings) as llm:
        texts(llm, 8)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    plans = [line for line in lines if line["event"] == "plan"]
    assert all(plan["policy"] == arch for plan in plans)
    return plans


def of(plan: dict[str, Any], part: str) -> set[int]:
    return {span["slot"] for span in plan[part]}


def test_baseline_batches_are_always_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plans = trace(pair, "baseline", tmp_path)
    assert all(len(of(plan, "draft") | of(plan, "verify") | of(plan, "prefill")) == 1 for plan in plans)
    assert all(max(len(plan[part]) for part in ("draft", "verify", "prefill")) == 1 for plan in plans)
    turns = [slot for plan in plans for slot in of(plan, "verify")]
    assert sum(a != b for a, b in zip(turns, turns[1:], strict=False)) > len(turns) / 2, "they take turns"


def test_pd_drafts_and_verifies_in_one_plan(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plans = trace(pair, "pd", tmp_path)
    assert all(of(plan, "draft") <= of(plan, "verify") for plan in plans)
    assert any(len(of(plan, "draft")) > 3 for plan in plans)
    assert all(span["start"] is None for plan in plans for span in plan["verify"]), "prompts have a pass of their own"
    assert any(plan["prefill"] and plan["verify"] for plan in plans)


def test_pdv_verifies_several_while_others_draft(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plans = trace(pair, "pdv", tmp_path)
    handed = [plan for plan in plans if any(s["drafts"] and s["slot"] not in of(plan, "verify") for s in plan["draft"])]
    assert handed, "drafts wait for a later plan"
    beside = [p for p in plans if len(of(p, "verify")) > 1 and of(p, "draft") - of(p, "verify")]
    assert len(beside) > len(plans) / 4, "verify batches of several run beside drafts of others"
    assert any(p["verify"] and p["prefill"] for p in plans)


def test_unified_never_hands_over(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plans = trace(pair, "unified", tmp_path)
    assert not any(plan["prefill"] for plan in plans)
    assert all(of(plan, "draft") <= of(plan, "verify") for plan in plans)
    assert any(
        any(span["start"] is None for span in plan["verify"])
        and any(span["start"] is not None for span in plan["verify"])
        for plan in plans
    ), "a pass carries verify rows and a chunk"


def test_plain_never_drafts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plans = trace(pair, "plain", tmp_path)
    assert not any(plan["draft"] or plan["prefill"] for plan in plans)


# -- what the policy hears and the lanes count -------------------------------------------------------------------------


class Listener:
    """Stands before an architecture and keeps what it is told."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.ran = inner, inner.name, inner.name
        self.controller, self.speculative = inner.controller, True
        self.verdicts: list[Any] = []
        self.timings: list[Any] = []
        self.gone: list[int] = []

    def plan(self, snapshot: Any) -> Any:
        return self.inner.plan(snapshot)

    def observe(self, observation: Any) -> None:
        self.verdicts.append(observation)

    def observe_step(self, timing: Any) -> None:
        self.timings.append(timing)

    def forget(self, request_id: int) -> None:
        self.gone.append(request_id)

    def why(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("arch", ["pdv", "unified"])
@pytest.mark.parametrize("late", [False, True])
def test_the_policy_hears_verdicts_and_times(pair: tuple[Path, Path], arch: str, late: bool) -> None:
    with make(pair, arch, late_tickets=late, placement="stream") as llm:
        listener = Listener(llm.engine.architecture)
        llm.engine.architecture = listener
        texts(llm, 8)
        stats = llm.engine.stats
    assert sum(v.drafted for v in listener.verdicts) == stats.drafted > 0
    assert sum(v.accepted for v in listener.verdicts) == stats.accepted
    assert {v.request_id for v in listener.verdicts} == set(range(8)) == set(listener.gone)
    assert {v.greedy for v in listener.verdicts} == {v.coupled for v in listener.verdicts} == {True, False}
    assert sum(t.chunk_rows for t in listener.timings) == stats.prompt_tokens
    assert all(t.draft_seconds > 0 for t in listener.timings if t.draft_requests)
    assert all(t.verify_seconds > 0 for t in listener.timings if t.verify_rows)
    assert all((t.prefill_seconds > 0) == (t.chunk_rows > 0) for t in listener.timings if arch == "pdv")
    assert all(t.step_seconds >= t.draft_seconds + t.verify_seconds + t.prefill_seconds for t in listener.timings)
    lanes = stats.lanes
    assert lanes["verify"].largest >= 2 and lanes["decode"].batches
    assert all(lane.depth == 0 for lane in lanes.values())
    # round and round: at the end a request leaves from the decode lane, or from the verify lane with a late verdict
    assert 0 <= lanes["decode"].passed - lanes["verify"].passed <= 8
    assert lanes["prefill"].wait(0.95) > 0
