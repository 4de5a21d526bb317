"""Plans of the architectures with lanes of their own, and of the table that chooses between them."""

from __future__ import annotations

import math

import pytest

import verifypd
from tests.control.test_architectures import slots, snapshot, view
from verifypd.control import architectures
from verifypd.control.architectures import PD, PDV, select_architecture
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import make_architecture
from verifypd.control.lanes import prompt_tokens
from verifypd.control.prompts import Beside, Reading, Room, next_chunks
from verifypd.control.snapshot import Snapshot
from verifypd.errors import ConfigError

# -- pd ----------------------------------------------------------------------------------------------------------------


def test_pd_drafts_and_verifies_in_one_plan_and_prefills_apart() -> None:
    plan = PD(FixedController(3)).plan(snapshot(view(0), view(1), view(2, prefill_left=40), batch_size=8))
    assert slots(plan, "draft") == slots(plan, "verify") == [0, 1]
    assert slots(plan, "prefill") == [2]
    assert plan.verify and all(span.drafts == 3 for span in plan.verify.spans)


# -- pdv ---------------------------------------------------------------------------------------------------------------

PIPELINE = {"batch_size": 16, "verify_batch": 2, "verify_wait_ms": 10.0}


def test_pdv_verifies_a_full_batch_while_others_draft_and_prefill() -> None:
    views = [view(0, pending=3), view(1, pending=2), view(2), view(3), view(4, prefill_left=20)]
    plan = PDV(FixedController(3)).plan(snapshot(*views, **PIPELINE))
    assert slots(plan, "verify") == [0, 1]
    assert slots(plan, "draft") == [2, 3], "they hand over: another plan verifies them"
    assert slots(plan, "prefill") == [4]
    assert plan.verify and [span.drafts for span in plan.verify.spans] == [3, 2]


def test_pdv_waits_for_a_full_batch_but_not_for_ever() -> None:
    pdv = PDV(FixedController(3))
    rest = [view(slot) for slot in range(1, 5)]
    plan = pdv.plan(snapshot(view(0, pending=3, waited=0.009), *rest, **PIPELINE))
    assert plan.verify is None and len(slots(plan, "draft")) == 4
    plan = pdv.plan(snapshot(view(0, pending=3, waited=0.011), *rest, **PIPELINE))
    assert slots(plan, "verify") == [0]


def test_pdv_verifies_at_once_when_nothing_else_can_run() -> None:
    views = [view(0, pending=3), *(view(slot, length_floor=100) for slot in range(1, 5))]
    plan = PDV(FixedController(3)).plan(snapshot(*views, **PIPELINE))
    assert slots(plan, "verify") == [0]


def test_pdv_lets_a_request_without_a_draft_queue_for_its_one_token() -> None:
    views = [view(0, draft_limit=0), view(1, pending=1), view(2), view(3)]
    plan = PDV(FixedController(3)).plan(snapshot(*views, **PIPELINE))
    assert slots(plan, "verify") == [0, 1] and slots(plan, "draft") == [2, 3]


def test_pdv_is_atomic_at_low_concurrency_with_hysteresis() -> None:
    pdv = PDV(FixedController(3))

    def hands_over(running: int) -> bool:
        plan = pdv.plan(snapshot(*(view(slot) for slot in range(running)), **PIPELINE))
        return not set(slots(plan, "draft")) <= set(slots(plan, "verify"))

    assert [hands_over(n) for n in (1, 2, 3, 4, 3, 2, 3, 4)] == [False, False, False, True, True, False, False, True]


def test_pdv_takes_those_who_queued_longest() -> None:
    views = [view(slot, pending=2, waited=slot / 1e3) for slot in range(6)]
    plan = PDV(FixedController(3)).plan(snapshot(*views, **PIPELINE))
    assert slots(plan, "verify") == [5, 4]
    urgent = views[1]._replace(rank=(-1, 1))
    plan = PDV(FixedController(3)).plan(snapshot(*views[:1], urgent, *views[2:], **PIPELINE))
    assert slots(plan, "verify") == [1, 5], "priority goes before waiting"


def test_a_pipelined_step_counts_the_rows_of_drafts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts join beside as many rows as the verify lane really takes: of pending drafts every token.

    What the lanes leave to prompts is told beside the facts, which stay as they are.
    """
    seen: list[tuple[Snapshot, float, int]] = []

    def spy(snapshot: Snapshot, cost: CostModel, beside: Beside, room: Room) -> Reading:
        seen.append((snapshot, beside.decode.rows, room.tokens))
        return next_chunks(snapshot, cost, beside, room)

    monkeypatch.setattr(architectures, "next_chunks", spy)
    views = [view(0, pending=3), view(1, pending=2), view(2), view(3), view(4, prefill_left=20)]
    state = snapshot(*views, **PIPELINE | {"batch_size": 4})
    plan = PDV(FixedController(3)).plan(state)
    assert prompt_tokens(state) < state.prefill_chunk
    assert plan.verify and seen == [(state, plan.verify.rows, prompt_tokens(state))] and seen[0][1] == 7


def test_where_drafts_are_written_and_nobody_decodes_prompts_have_no_value_in_seconds() -> None:
    """As many tokens as the bound lets a step have; `explain` says nothing of seconds that nobody would have taken."""
    policy = PDV(FixedController(1), CostModel(Coefficients()))
    prompts = [view(1, prefill_left=100), view(2, prefill_left=4000)]
    chosen = policy.read(snapshot(*prompts), Beside(draft_seconds=1e-3, drafting=True), Room(4, 2048))
    found = policy.reading
    assert chosen and found.chosen is not None and found.chosen.value == math.inf == found.second
    assert found.runner_up is not None and found.chosen.tokens > found.runner_up.tokens
    assert "value_ms" not in policy.why()


# -- table -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("concurrency", "gigabytes", "name"),
    [(1, 100, "pd"), (4, 100, "pd"), (5, 7.0, "pd"), (5, 7.1, "pdv"), (31, 1, "pd"), (31, 8, "pdv"), (32, 1, "pdv")],
)
def test_table_is_the_originals_rule(concurrency: int, gigabytes: float, name: str) -> None:
    assert select_architecture(concurrency, gigabytes) == name


@pytest.mark.parametrize(
    ("concurrency", "gigabytes", "name"),
    [
        (1, 67.9, "pd"),
        (1, 68.0, "pdv"),
        (5, 70, "pdv"),
        (6, 70, "pd"),
        (16, 70, "pd"),
        (17, 70, "pdv"),
        (17, 8, "pd"),
        (31, 67, "pd"),
        (32, 1, "pdv"),
    ],
)
def test_the_slides_say_something_else(concurrency: int, gigabytes: float, name: str) -> None:
    assert verifypd.select_architecture(concurrency, verifier_size_gb=gigabytes, variant="slides") == name


def test_there_are_two_variants_of_the_rule() -> None:
    assert verifypd.select_architecture(5, 8) == verifypd.select_architecture(5, 8, "readme") == "pdv"
    with pytest.raises(ConfigError, match="readme, slides"):
        verifypd.select_architecture(5, 8, "paper")


def test_every_policy_says_whose_plan_it_gave() -> None:
    few, many = [[view(slot) for slot in range(count)] for count in (2, 6)]
    for name in ("plain", "baseline", "pd", "unified"):
        assert make_architecture(name, FixedController(3)).ran == name
    pdv = make_architecture("pdv", FixedController(3))
    table = make_architecture("table", FixedController(3))
    seen = []
    for views in (few, many):
        pdv.plan(snapshot(*views, **PIPELINE))
        table.plan(snapshot(*views, **PIPELINE, verifier_bytes=20 * 10**9))
        seen.append((pdv.ran, table.ran))
    assert seen == [("pdv (atomic)", "pd"), ("pdv (pipelined)", "pdv (pipelined)")]
    assert table.state()["architecture"] == "pdv (pipelined)"
    auto = make_architecture("auto", FixedController(0))
    auto.plan(snapshot(*few, drafter=None))
    assert auto.name == "auto" and auto.ran == "plain"


def test_table_plans_as_the_chosen_one() -> None:
    table = make_architecture("table", FixedController(3))
    views = [view(slot) for slot in range(6)]
    small = table.plan(snapshot(*views, **PIPELINE, verifier_bytes=2 * 10**9))
    large = table.plan(snapshot(*views, **PIPELINE, verifier_bytes=20 * 10**9))
    assert slots(small, "draft") == slots(small, "verify") != []
    assert slots(large, "draft") and not slots(large, "verify")
