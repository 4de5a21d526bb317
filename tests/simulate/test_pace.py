"""The table of an engine's steps: what is learnt from its twin is what the twin pays."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from verifypd.control.architectures import Plain
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel
from verifypd.simulate.engine import Simulation
from verifypd.simulate.pace import Pace, Step, Watch, even_pace, level
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import Settings, TrueCosts

NOTHING = dict.fromkeys(asdict(Coefficients()), 0.0) | {"knee": 1e9}


def learnt(costs: Coefficients, requests: list[tuple[float, int, int]]) -> Pace:
    settings, watch = Settings(batch_size=4, queue_factor=1.0, drafter=None), Watch()
    plain = Plain(FixedController(0), CostModel(costs))
    Simulation(plain, replay(requests, 0.0), TrueCosts(costs), settings, on_step=watch.see).run()
    return watch.pace(settings)


def test_steps_cost_what_the_twin_paid() -> None:
    """Without a draft each step writes one token; a row costs 1 ms here, a pass 10."""
    costs = Coefficients(**NOTHING | {"base": 0.01, "row": 0.001})
    pace = learnt(costs, [(0.1 * i, 8, 40) for i in range(60)])
    assert pace.slots == 4 and not pace.late
    for decoding in (1, 2, 4):
        seconds, written, read = pace.step(decoding, 0)
        assert (seconds, written, read) == pytest.approx((0.01 + 0.001 * decoding, 1.0, 0.0))
    assert pace.spread == pytest.approx(0.0), "all requests get the same of a step"
    assert pace.step(3, 8).read == 8, "a short prompt is read in one step"


def test_prompts_add_the_same_at_loads_where_none_was_seen() -> None:
    """Every row costs 1 ms. Prompts were read when nobody decoded; beside three others they take as long."""
    costs = Coefficients(**NOTHING | {"base": 0.01, "steep": 0.001, "knee": 0.0})
    alone = [(float(i), 8, 5) for i in range(10)]
    together = [(20.0 + 0.1 * i, 8, 40) for i in range(4)]
    pace = learnt(costs, [*alone, *together])
    assert pace.step(0, 8).seconds == pytest.approx(0.018)
    assert pace.step(3, 0).seconds == pytest.approx(0.013)
    assert pace.step(3, 8) == pytest.approx((0.013 + 0.018 - 0.011, 1.0, 8))


def test_a_table_is_straight_between_its_points() -> None:
    pace = Pace(4, False, 0.0, (0.0, 100.0), ((Step(1.0, 2.0, 0.0), Step(3.0, 1.0, 100.0)),) * 5)
    assert pace.step(2, 50) == Step(2.0, 1.5, 50.0)
    assert pace.step(9, 900) == Step(3.0, 1.0, 100.0), "no faster than it was seen"
    even = even_pace(0.01, 32)
    assert even.step(31, 5000) == Step(0.01, 1.0, 5000.0) and even.luck(40, 2.0) == 40


def test_loads_that_are_alike_are_one() -> None:
    assert [level(n) for n in range(9)] == [0, 1, 2, 3, 4, 5, 6, 6, 7]
    assert level(77) < 25
