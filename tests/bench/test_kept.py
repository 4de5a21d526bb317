"""What is kept beside the code: small, and with the most of use where not all fits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verifypd.bench import kept


def found(scenarios: int) -> dict[str, Any]:
    times = [i / 7 for i in range(101)]
    line = {"at": [i / 3 for i in range(200)], "waiting": [float(i) for i in range(200)]}
    own = {
        "figures": {"tok_s": 123.456789}, "by_seed": {"0": {"tok_s": 123.457}}, "curves": {"e2e": times},
        "histograms": {"e2e": {"edges": times[:41], "counts": list(range(40))}},
        "parts": {"totals": {"draft_s": 1.23456}, "timeline": line},
    }  # fmt: skip
    server = {"figures": {"tok_s": 1.0}, "parts": None, "curves": {"e2e": []}, "histograms": {}, "by_seed": {}}
    return {"note": "α", "scenarios": {f"s {i}": {"arms": {"a": own, "b": server}} for i in range(scenarios)}}


def test_all_parts_are_thinned() -> None:
    made = json.loads(kept.small(found(2)))
    own = made["scenarios"]["s 1"]["arms"]["a"]
    assert own["figures"] == {"tok_s": 123.5} and own["by_seed"] == {"0": {"tok_s": 123.457}}
    assert own["curves"]["e2e"][-1] == pytest.approx(100 / 7, rel=1e-3) and len(own["curves"]["e2e"]) == 26
    assert own["histograms"]["e2e"]["counts"][:2] == [1, 5] and len(own["histograms"]["e2e"]["edges"]) == 21
    line = own["parts"]["timeline"]
    assert len(line["at"]) == kept.SAMPLES and (line["waiting"][0], line["waiting"][-1]) == (0.0, 199.0)
    assert made["note"] == "α" and made["scenarios"]["s 0"]["arms"]["b"]["parts"] is None


def test_a_large_file_loses_what_is_of_least_use_first() -> None:
    for scenarios, left in ((2, set(kept.PARTS)), (200, {"histograms", "curves", "by_seed"}), (2000, {"by_seed"})):
        text = kept.small(found(scenarios))
        assert len(text.encode()) <= kept.LARGEST or scenarios == 2000
        own = json.loads(text)["scenarios"]["s 0"]["arms"]["a"]
        there = {name for name in kept.PARTS if name in own} | ({"timeline"} & set(own["parts"]))
        assert there <= left, scenarios
    assert {"by_seed", "curves"} <= set(json.loads(kept.small(found(200)))["scenarios"]["s 0"]["arms"]["a"])
