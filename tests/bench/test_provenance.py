"""Reports say where they come from, and name nobody's home."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from verifypd.bench.provenance import provenance


def test_a_report_names_commit_versions_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path.cwd() / "benchmarks" / "x.py"), "--json", str(tmp_path / "out.json")])
    found = provenance()
    assert found["command"] == "python benchmarks/x.py --json out.json"
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", found["commit"])
    assert {"verifypd", "python", "torch"} <= set(found["versions"])
    assert found["threads"] >= 1 and found["cores"] >= 1 and found["cpu"]


def test_a_tree_without_git_says_what_it_is_told() -> None:
    assert provenance("abc")["commit"] == "abc"
