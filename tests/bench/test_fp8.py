"""The benchmark of fp8 weights, on a tiny model: every arm has its steps."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_arm_has_its_steps(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fp8", ROOT / "benchmarks" / "fp8.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fp8"] = module
    spec.loader.exec_module(module)
    module.main(["--tiny", "--parts", "steps", "--json", str(tmp_path / "fp8.json")])
    report = json.loads((tmp_path / "fp8.json").read_text())
    assert set(report["steps"]) == set(module.arms())
    for entry in report["steps"].values():
        assert entry["kv_tokens"] > 0 and entry["plain_ms_1"] > 0 and entry["cycle_ms_1"] > 0
    assert report["commit"]
