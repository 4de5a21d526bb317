"""The search for the drafter's temperature, on made-up acceptance."""

from __future__ import annotations

import random

import pytest

from tests.control.views import VIEW, snapshot, view
from verifypd.control.acceptance import kind_of
from verifypd.control.factory import make_architecture
from verifypd.control.observe import Observation
from verifypd.control.temperature import TemperatureSearch
from verifypd.control.throughput import ThroughputController
from verifypd.simulate.tables import h200


def search(best: float, sharpness: float, rounds: int = 12_000) -> float:
    """The τ the search ends at when acceptance falls with the distance from `best`."""
    rng = random.Random(1)
    found = TemperatureSearch()
    kind = kind_of(False, False, 1.0, None)
    for turn in range(rounds):
        request = turn % 16
        tau = found.choose(kind, request, turn // 16)
        assert 0.6 <= tau <= 1.6
        alpha = 0.75 - sharpness * abs(tau - best)
        accepted = 0
        while accepted < 3 and rng.random() < alpha:
            accepted += 1
        found.observe(Observation(request, 3, accepted, accepted + 1, False, False, 1.0, "model", tau))
    return found._kinds[kind].best


def test_temperature_search_climbs_to_where_more_is_accepted() -> None:
    assert search(0.6, 0.9) <= 0.8
    assert search(1.4, 0.9) >= 1.2
    assert search(1.0, 0.9) == pytest.approx(1.0, abs=0.11)


def test_temperature_search_stays_where_nothing_is_gained() -> None:
    assert search(1.0, 0.0) == pytest.approx(1.0, abs=0.21)


def test_a_temperature_that_is_set_is_drawn_at_and_not_searched() -> None:
    """A request's own value goes before the search, and what comes of it moves the search nowhere."""
    policy = make_architecture("unified", ThroughputController(h200(), search_temperature=True))
    views = [view(n, draft_temperature=None if n % 2 else 0.35, length_floor=512 + n) for n in range(32)]
    plan = policy.plan(snapshot(views))
    assert plan.draft is not None
    drawn = {n % 2: {s.temperature for s in plan.draft.spans if s.slot % 2 == n % 2 and s.drafts} for n in (0, 1)}
    assert drawn == {0: {0.35}, 1: {0.9, 1.0}}
    search = TemperatureSearch()
    kind = kind_of(False, False, 1.0, None)
    search.choose(kind, 0, 0)
    for _ in range(2000):  # none of them stands: at the temperature tried first, that would move it
        search.observe(Observation(0, 3, 0, 1, False, False, 1.0, "model", None))
    assert search._kinds[kind].best == 1.0 and not search._kinds[kind].counts


def test_temperature_is_one_unless_asked_for() -> None:
    assert ThroughputController(h200()).temperature(VIEW) == 1.0
    searching = ThroughputController(h200(), search_temperature=True)
    assert searching.temperature(VIEW._replace(greedy=True)) == 1.0
    assert {searching.temperature(VIEW._replace(length_floor=n)) for n in range(64)} == {0.9, 1.0}
