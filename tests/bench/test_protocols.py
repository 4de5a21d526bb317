"""The original's protocols, on tiny models: every arm and load runs to the end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def protocols() -> Any:
    spec = importlib.util.spec_from_file_location("protocols", ROOT / "benchmarks" / "protocols.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["protocols"] = module
    spec.loader.exec_module(module)
    return module


def test_every_arm_on_every_load(protocols: Any, tmp_path: Path) -> None:
    out = tmp_path / "protocols.json"
    pair = "tinyllama-1.1b:llama-2-7b"
    protocols.main(["--tiny", "--pairs", pair, "--json", str(out), "--set", "device=cpu"])
    report = json.loads(out.read_text())
    found = report["pairs"][pair]
    assert set(found) == {"B n=1", "B n=5", "C n=5", "C n=20"}
    for arms in found.values():
        assert set(arms) == set(protocols.ARMS)
        assert all(arm["unfinished"] == 0 and arm["p95_s"] > 0 for arm in arms.values())
        assert arms["plain"]["acceptance_rate"] == 0
    assert 0.2 < found["C n=20"]["pd"]["acceptance_rate"] < 0.7
    assert report["commit"] and report["claims_p95_s"]["B"]["20"] == [113.6, 123.2, 95.7]


def test_arrivals_are_the_same_for_every_arm(protocols: Any) -> None:
    assert protocols.arrivals(5, 2.0, 5, 100) == protocols.arrivals(5, 2.0, 5, 100)
    assert {a.at for a in protocols.arrivals(5, None, 5, 100)} == {0.0}
