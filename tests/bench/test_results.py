"""Every committed result can be traced: it has a command, came from an unmodified tree, and its commit has its hash."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench.provenance import History, files_hash

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IDENTITY = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
HERE = shutil.which("git") is not None and (ROOT / ".git").exists()


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def refusal(found: dict[str, Any], history: History) -> str | None:
    """Why a result cannot stand; None: it can. A commit that is not here is refused, but in a shallow clone."""
    if not found.get("command"):
        return "it has no command"
    if not found.get("files"):
        return "it has no hash of the tree"
    for each in [found, *found.get("sittings", ())]:
        if each.get("modified"):
            return "it was made from a modified tree"
        hashes = history.hashes(each["commit"])
        if hashes is None:
            if not history.shallow:
                return f"commit {each['commit'][:12]} is not here"
        elif each["files"] not in hashes.values():
            return f"commit {each['commit'][:12]} has another hash"
    return None


@pytest.fixture(scope="module")
def history() -> History:
    return History(ROOT)


@pytest.mark.skipif(not HERE, reason="no git here: nothing to check the hashes against")
def test_results_come_from_the_commits_they_name(history: History) -> None:
    refused, unknown = {}, []
    for path in sorted(RESULTS.glob("*.json")):
        found = read(path)
        if reason := refusal(found, history):
            refused[path.name] = reason
        elif history.hashes(found["commit"]) is None:
            unknown.append(path.name)
    assert refused == {}
    if unknown:
        pytest.skip(f"a shallow clone: the commits of {', '.join(unknown)} are not here")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one commit."""
    root = (tmp_path / "tree").resolve()
    (root / "verifypd").mkdir(parents=True)
    (root / "verifypd" / "a.py").write_text("a = 1\n")
    (root / "note ä.md").write_text("note\n")
    (root / "link.md").symlink_to("note ä.md")
    for command in (["init", "-q"], ["add", "."], [*IDENTITY, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def head(root: Path) -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commits_hash_is_that_of_its_tree(tree: Path) -> None:
    history = History(tree)
    hashes = history.hashes("HEAD")
    assert hashes is not None and hashes["tracked"] == files_hash(tree)
    good = {"command": "x", "commit": head(tree), "modified": False, "files": hashes["tracked"]}
    assert refusal(good, history) is None
    assert refusal({**good, "modified": None, "files": hashes["package"]}, history) is None
    assert "another hash" in str(refusal({**good, "files": "tracked:0"}, history))
    assert "modified" in str(refusal({**good, "modified": True}, history))
    assert "modified" in str(refusal({**good, "sittings": [good, {**good, "modified": True}]}, history))
    assert "no command" in str(refusal({**good, "command": ""}, history))
    assert "no hash" in str(refusal({**good, "files": None}, history))
    unknown = {**good, "commit": "f" * 40}
    assert "is not here" in str(refusal(unknown, history)) and not history.shallow
    assert "is not here" in str(refusal({**good, "sittings": [good, unknown]}, history))
    (tree / "verifypd" / "a.py").write_text("a = 2\n")
    assert files_hash(tree) != hashes["tracked"], "a change is another tree"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_shallow_clone_refuses_no_commit_that_it_lacks(tree: Path, tmp_path: Path) -> None:
    first, files = head(tree), files_hash(tree)
    clone = ["git", "clone", "-q", "--depth", "1", tree.as_uri(), str(tmp_path / "clone")]
    for command in (["git", *IDENTITY, "commit", "-qm", "two", "--allow-empty"], clone):
        subprocess.run(command, cwd=tree, check=True)
    history = History(tmp_path / "clone")
    found = {"command": "x", "commit": first, "modified": False, "files": files}
    assert history.shallow and history.hashes(first) is None and refusal(found, history) is None
    assert "another hash" in str(refusal({**found, "commit": "HEAD", "files": "tracked:0"}, history))
