"""Break-even acceptance against cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from verifypd.bench.breakeven import break_even, gain, step_seconds
from verifypd.control.cost import Coefficients, CostModel

NOTHING = dict.fromkeys(Coefficients.__dataclass_fields__, 0.0)


def model(**seconds: float) -> CostModel:
    return CostModel(Coefficients(**(NOTHING | seconds)))


def test_free_rows_and_a_free_drafter_always_pay() -> None:
    assert break_even(model(base=1.0, steep=0.01, knee=100.0), 1, 4, 100) == pytest.approx(0.0, abs=1e-6)


def test_a_draft_step_must_be_earned() -> None:
    """A step of 0.3 passes: one draft token pays from α = 0.3 on, at any batch while rows are free."""
    cost = model(base=1.0, steep=1e-4, knee=1000.0, draft_step=0.3)
    assert break_even(cost, 1, 1, 100) == pytest.approx(0.3, abs=1e-6)
    assert break_even(cost, 100, 1, 100) == pytest.approx(0.3, abs=1e-6)
    assert gain(cost, 0.8, 1, 4, 100) == pytest.approx(3.3616 / 2.2)


def test_where_rows_cost_all_there_is_drafting_never_pays() -> None:
    cost = model(row=1.0, draft_step=0.1)
    assert break_even(cost, 1, 1, 100) is None
    assert gain(cost, 1.0, 1, 1, 100) < 1.0


def test_more_requests_need_more_acceptance() -> None:
    cost = model(base=1.0, row=0.1, draft_step=0.1, context=1e-5)
    alphas = [break_even(cost, count, 2, 100) or 2.0 for count in (1, 4, 8, 32)]
    assert alphas == sorted(alphas) and alphas[0] < alphas[-1]


def test_a_draft_with_a_cache_pays_for_catching_up() -> None:
    cost = model(base=1.0, row=1e-4, draft_step=0.1, draft_row=0.05)
    assert step_seconds(cost, 1, 1, 0, lag=2) - step_seconds(cost, 1, 1, 0) == pytest.approx(0.1)
    assert step_seconds(cost, 1, 0, 0, lag=2) == step_seconds(cost, 1, 0, 0)


def test_the_hosts_part_counts() -> None:
    cost = model(base=1.0, row=1e-4, draft_step=0.4)
    alone = break_even(cost, 1, 1, 100)
    cost.overhead = 1.0
    together = break_even(cost, 1, 1, 100)
    assert alone is not None and together is not None and together < alone
