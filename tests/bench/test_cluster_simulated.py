"""The script that puts Ray and the simulated cluster side by side: its parts, without Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bench.scripts import FOLDER, load


@pytest.fixture(scope="module")
def script() -> Any:
    return load("cluster_simulated")


def test_streams_that_do_not_meet_take_their_steps(script: Any) -> None:
    asked = [script.Asked(float(at), 8, 30) for at in range(4)]
    seen = script.simulate(asked, 0.01, 0.05, 6)
    assert [each.first for each in seen] == pytest.approx([0.06] * 4)
    assert [each.last for each in seen] == pytest.approx([0.05 + 0.3] * 4)
    found = script.figures(seen, asked)
    assert found["ttft_ms_mean"] == 60.0 and found["tok_s"] == pytest.approx(120 / 3.35, abs=0.01)


def test_more_load_waits_for_slots_and_ratios_tell_how_far_off_it_is(script: Any) -> None:
    quiet, busy = (script.workload(rate, 60.0, 3) for rate in (1.0, 18.0))
    few, many = (script.figures(script.simulate(each, 0.01, 0.0, 6), each) for each in (quiet, busy))
    assert many["ttft_ms_mean"] > 2 * few["ttft_ms_mean"]
    same = script.compared(many, many)
    assert same["within"] and set(same["ratios"].values()) == {1.0}
    assert not script.compared(few, many)["within"]


def test_what_is_committed_is_within_what_is_claimed(script: Any) -> None:
    found = json.loads((FOLDER / "results" / "cluster_simulated.json").read_text())
    assert found["modified"] is False and found["replicas"] == 2
    for run in found["runs"]:
        assert {k: v for k, v in run.items() if k in ("ratios", "within")} == script.compared(
            run["measured"], run["simulated"]
        )
