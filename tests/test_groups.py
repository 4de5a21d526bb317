"""Tests that share a server run in one process: every file that says so is understood, and nothing else is grouped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, group, pytest_xdist_make_scheduler


def test_every_mark_is_read() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    marked = {path for path, text in files.items() if "xdist" + "_group" in text}
    assert len(marked) > 10 and marked == {path for path in files if group(path)}


def test_the_scheduler_keeps_groups_together() -> None:
    pytest.importorskip("xdist")
    config: Any = SimpleNamespace(getvalue=lambda name: {"dist": "loadgroup", "tx": ["2*popen"]}.get(name))
    made = pytest_xdist_make_scheduler(config, None)
    scope = made._split_scope
    assert scope("tests/server/test_chat.py::test_chat") == scope("tests/server/test_load.py::test_x[a@b]") == "server"
    assert scope("tests/server/test_faults.py::test_a") == "server-faults"
    greedy = "tests/engine/test_greedy.py"
    assert scope(f"{greedy}::test_every_family[llama3-head]") == f"{greedy}/llama3"
    assert scope(f"{greedy}::test_self_draft_is_accepted") == f"{greedy}::test_self_draft_is_accepted"
    assert scope("tests/test_groups.py::test_a") == "tests/test_groups.py::test_a"
    config.getvalue = lambda name: "load"
    assert pytest_xdist_make_scheduler(config, None) is None
