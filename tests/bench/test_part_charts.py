"""Where the time went: passes that carry prompts are split by rows, and the chart says by which rule."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.bench import part_charts
from verifypd.bench.meter import Parts, pooled
from verifypd.control.observe import StepTiming


def test_a_pass_that_carries_prompts_is_split_by_its_rows() -> None:
    riding = StepTiming(verify_requests=4, verify_rows=40, chunk_rows=30, verify_seconds=0.8)
    assert riding.chunk_seconds == pytest.approx(0.6)
    apart = StepTiming(verify_rows=10, chunk_rows=30, verify_seconds=0.8, prefill_seconds=0.5)
    assert apart.chunk_seconds == 0.0, "the prompts had a pass of their own"
    assert StepTiming(draft_seconds=0.5).chunk_seconds == 0.0


def test_prompts_that_rode_in_passes_count_as_prefill() -> None:
    run = Parts({"prefill_s": 1.0, "draft_s": 0.0, "verify_s": 4.0, "chunks_s": 1.5, "step_s": 6.0})
    found = pooled([run, run], 20.0)
    assert found is not None and found["busy"] == pytest.approx(0.5)
    assert found["shares"] == pytest.approx({"prefill": 0.25, "draft": 0.0, "verify": 0.25, "host": 0.1, "idle": 0.4})


@pytest.mark.parametrize(("more", "words"), [({"chunks_s": 1.0}, part_charts.SPLIT), ({}, part_charts.VERIFY_ONLY)])
def test_the_breakdown_says_how_such_passes_are_counted(more: dict[str, float], words: str) -> None:
    """Older results do not know what rode in their passes."""
    parts = pooled([Parts({"verify_s": 4.0, "step_s": 6.0} | more)], 10.0)
    found: dict[str, Any] = {"arms": {"plain": {}}, "scenarios": {"s": {"arms": {"plain": {"parts": parts}}}}}
    chart = part_charts.breakdown(found, "s")
    assert chart is not None and chart.note == f"{words} {part_charts.HOST}"
    prefill, _, verify, *_ = chart.series
    assert prefill.ys[0] + verify.ys[0] == pytest.approx(0.4) and prefill.ys[0] == pytest.approx(0.1 * len(more))
