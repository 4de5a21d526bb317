"""Reports say where they come from, and name nobody's home."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verifypd.bench.provenance import files_hash, provenance, tracked


def test_a_report_names_commit_versions_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path.cwd() / "benchmarks" / "x.py"), "--json", str(tmp_path / "out.json")])
    found = provenance()
    assert found["command"] == "python benchmarks/x.py --json out.json"
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", found["commit"])
    assert {"verifypd", "python", "torch"} <= set(found["versions"])
    assert found["threads"] >= 1 and found["cores"] >= 1 and found["cpu"]


def test_a_tree_without_git_says_what_it_is_told() -> None:
    assert provenance("abc")["commit"] == "abc"


def _tree(folder: Path) -> Path:
    (folder / "verifypd").mkdir(parents=True)
    (folder / "verifypd" / "a.py").write_text("a = 1\n")
    (folder / "note.md").write_text("note\n")
    return folder.resolve()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_hash_tells_trees_apart(tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree")
    assert tracked(root) == [] and files_hash(root).startswith("package:")
    subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    assert tracked(root) == ["note.md", "verifypd/a.py"]
    first = files_hash(root)
    assert first.startswith("tracked:")
    (root / "untracked.txt").write_text("x")
    assert files_hash(root) == first
    (root / "note.md").write_text("another note\n")
    assert files_hash(root) != first


def test_without_git_the_package_is_hashed_and_nobody_says_it_is_unmodified(tmp_path: Path) -> None:
    one, two = _tree(tmp_path / "one"), _tree(tmp_path / "two")
    assert files_hash(one) == files_hash(two)
    (two / "note.md").write_text("not of the package")
    assert files_hash(one) == files_hash(two)
    (two / "verifypd" / "a.py").write_text("a = 2\n")
    assert files_hash(one) != files_hash(two)


def test_a_result_carries_the_hash() -> None:
    found = provenance(command="verifypd bench run")
    assert found["command"] == "verifypd bench run" and re.fullmatch(r"(tracked|package):[0-9a-f]{64}", found["files"])
    assert found["modified"] in ((True, False) if tracked() else (None,))
