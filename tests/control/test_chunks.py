"""Chunk rules: within the tightest target, never nothing, and no longer a step than plain decoding would have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.control.views import snapshot, view
from verifypd.control.allocation import Allocation
from verifypd.control.chunks import SMALLEST_CHUNK, Step, chunk_within, draft_chunk, prefill_chunk
from verifypd.control.cost import Coefficients, CostModel
from verifypd.simulate.tables import h200

GPU = h200().coefficients
DRAFTS = Allocation(longest=2, threshold=0.1, tokens=40.0, seconds=12e-3, draft_seconds=2.5e-3, rows=40.0)


@pytest.mark.parametrize("requests", [1, 16, 32])
def test_a_chunk_fits_the_tightest_target(requests: int) -> None:
    cost, step = h200(), Step(rows=requests, context=requests * 512.0)
    chunk = chunk_within(cost, 12e-3, step, 2048)
    assert SMALLEST_CHUNK < chunk < 2048
    assert step.seconds(cost, chunk) <= 12e-3 < step.seconds(cost, chunk + 16), "and no smaller than it need be"


def test_a_tighter_target_means_a_smaller_chunk() -> None:
    step = Step(rows=32, context=32 * 512.0)
    sizes = [chunk_within(h200(), target, step, 4096) for target in (9e-3, 12e-3, 20e-3, 50e-3, 1.0)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] == 4096


def test_a_long_context_means_a_smaller_chunk() -> None:
    cost = CostModel(replace(GPU, chunk_context=2e-9))
    early, late = (chunk_within(cost, 20e-3, Step(8, 4096.0, start=start), 4096) for start in (0, 30_000))
    assert late < early


def test_prefill_progresses_where_the_target_cannot_be_met() -> None:
    cost, step = CostModel(GPU.scaled(10.0, 10.0)), Step(rows=32, context=32 * 512.0)
    chunk = chunk_within(cost, 15e-3, step, 1024)
    assert chunk >= SMALLEST_CHUNK
    assert step.seconds(cost, chunk) <= 1.5 * step.seconds(cost, 0)


def test_a_chunk_that_costs_the_same_at_any_size_is_not_cut_to_nothing() -> None:
    """Where decode spans and chunks should not share a pass, many small chunks would pay for it again and again."""
    cost, step = CostModel(replace(GPU, mixed=12e-3)), Step(rows=32, context=32 * 512.0)
    assert chunk_within(cost, 15e-3, step, 256) == 256


def test_a_step_with_drafts_and_a_chunk_lasts_no_longer_than_one_of_plain() -> None:
    """A prompt that is in no hurry but would be late with what rides for nothing: drafts take from its chunk."""
    cost, running = h200(), [view(i, slo_tpot=100.0) for i in range(20)]
    waiting = view(30, prefill_left=1200, since_output=0.08)
    views = snapshot([*running, waiting], prefill_chunk=512)
    drafting, pressed = prefill_chunk(views, running, cost, DRAFTS, 1.3, False)
    assert not pressed
    assert 256 < drafting < 512
    context = sum(each.length_bound for each in running)
    longer = Step(20 + DRAFTS.rows, context, DRAFTS.draft_seconds).seconds(cost, drafting)
    assert longer <= Step(20.0, context).seconds(cost, 512) < 1.05 * longer
    crowd = prefill_chunk(replace(views, waiting=9), running, cost, DRAFTS, 1.3, False)
    assert crowd.tokens == 512, "with requests waiting for a slot the pace of prompts comes first"


def test_a_late_prompt_presses() -> None:
    """A long prompt beside few requests: a chunk as large as the inter-token target allows; drafts give way."""
    cost, running = h200(), [view(i, slo_tpot=15.0) for i in range(8)]
    long = snapshot([*running, view(30, prefill_left=4096, since_output=0.0)], prefill_chunk=512)
    calm = snapshot([*running, view(30, prefill_left=200, since_output=0.0)], prefill_chunk=512)
    assert not prefill_chunk(calm, running, cost, DRAFTS, 2.0, False).pressed
    chunk = prefill_chunk(long, running, cost, DRAFTS, 2.0, False)
    step = Step(8 + DRAFTS.rows, float(sum(v.length_bound for v in running)), DRAFTS.draft_seconds)
    assert chunk.pressed
    assert chunk.tokens > prefill_chunk(calm, running, cost, DRAFTS, 2.0, False).tokens
    assert step.seconds(cost, chunk.tokens) <= max(15e-3, 2.5 * step.seconds(cost, 0))


@pytest.mark.parametrize("waiting", [0, 9])
@pytest.mark.parametrize("since", [0.0, 0.2, 0.4, 2.0])
def test_without_drafts_a_chunk_is_never_larger_than_that_of_plain(since: float, waiting: int) -> None:
    """However late prompts are: a longer step keeps slots from those who wait for one."""
    running = [view(i, slo_tpot=100.0) for i in range(8)]
    late = [view(30 + i, prefill_left=3000, since_output=since) for i in range(20)]
    views = snapshot([*running, *late], prefill_chunk=512, waiting=waiting)
    assert prefill_chunk(views, running, h200(), None, 1.0, False, idle=True).tokens == 512
    if since == 0.4:
        assert prefill_chunk(views, running, h200(), DRAFTS, 1.3, False).tokens > 512, "drafts make room for more"


def test_where_no_row_is_free_and_nothing_is_drafted_the_chunk_is_that_of_plain() -> None:
    """Shorter chunks would only be more passes; where rows are free they are shorter, for those who decode."""
    running = [view(i) for i in range(16)]
    views = snapshot([*running, view(30, prefill_left=60, since_output=0.0)], prefill_chunk=256)
    dear, free = CostModel(Coefficients(floor=4e-3, row=4e-3)), CostModel(Coefficients(floor=4e-3, row=20e-6))
    assert prefill_chunk(views, running, dear, None, 1.0, False, idle=True) == (256, False)
    assert prefill_chunk(views, running, free, None, 1.0, False, idle=True).tokens < 256


def test_a_prompt_past_its_early_aim_keeps_to_the_inter_token_target_while_that_brings_it_in_time() -> None:
    """Deep in a long prompt a chunk costs more: one as long as a step of `plain` may be would stretch every gap."""
    cost, running = CostModel(replace(GPU, chunk_context=5e-9)), [view(i, slo_tpot=15.0) for i in range(8)]
    chunks, seconds = {}, {}
    for left in (1000, 30_000):
        waiting = view(30, prefill_left=left, since_output=0.15)
        waiting = replace(waiting, chunk_start=3000)
        chunks[left], _ = prefill_chunk(
            snapshot([*running, waiting], prefill_chunk=512), running, cost, DRAFTS, 1.3, False
        )
        context = float(sum(each.length_bound for each in running))
        step = Step(8 + DRAFTS.rows, context, DRAFTS.draft_seconds, start=3000)
        seconds[left] = step.seconds(cost, chunks[left])
    assert seconds[1000] <= 15e-3, "in time at that pace"
    assert chunks[30_000] > chunks[1000] and seconds[30_000] > 15e-3, "late at any pace that keeps to the target"


def test_where_more_wait_than_decode_prompts_come_first() -> None:
    """Past saving or not: a batch that is half empty gains more from prompts than its few lose by a longer step."""
    cost, running = h200(), [view(i, slo_tpot=15.0) for i in range(8)]
    late = [view(30 + i, prefill_left=384, since_output=0.4) for i in range(20)]
    many = prefill_chunk(snapshot([*running, *late], prefill_chunk=512), running, cost, DRAFTS, 2.0, False)
    few = prefill_chunk(snapshot([*running, *late[:3]], prefill_chunk=512), running, cost, DRAFTS, 2.0, False)
    assert many.tokens > few.tokens and many.pressed and not few.pressed


def test_a_draft_catches_up_in_a_share_of_the_step() -> None:
    cost, views = h200(), snapshot([view(0)], draft_chunk=256)
    assert draft_chunk(views, cost, None) == 256
    chunk = draft_chunk(views, cost, replace(DRAFTS, seconds=8e-3))
    assert chunk == int(0.25 * 8e-3 / cost.coefficients.draft_row) and 256 < chunk <= 1024
