"""The benchmark of fp8 weights, on a tiny model: every arm has its steps."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.scripts import load


def test_every_arm_has_its_steps(tmp_path: Path) -> None:
    module = load("fp8")
    module.main(["--tiny", "--parts", "steps", "--json", str(tmp_path / "fp8.json")])
    report = json.loads((tmp_path / "fp8.json").read_text())
    assert set(report["steps"]) == set(module.arms())
    for entry in report["steps"].values():
        assert entry["kv_tokens"] > 0 and entry["plain_ms_1"] > 0 and entry["cycle_ms_1"] > 0
    assert report["commit"]
