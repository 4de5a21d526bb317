"""Files and folders to be written are looked at before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.speller import run
from verifypd.cli.files import writable_file, writable_folder
from verifypd.errors import ConfigError

ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A file where a folder should be."""
    path = tmp_path / "taken"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "serve", "http://127.0.0.1:9"],
        ["bench", "run", "--model", "nosuch"],
        ["bench", "simulate", "cluster"],
        ["compare", "http://127.0.0.1:9", "b=http://127.0.0.1:9"],
        ["distil", "--model", "nosuch"],
    ],
)
@pytest.mark.parametrize("below", ["", "further"])
def test_a_folder_that_cannot_be_made_is_one_line(
    command: list[str], below: str, taken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, "--out", str(taken / below)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out {taken / below}: ") and error.count("\n") == 1
    assert error.endswith("give a folder that can be written\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--json", "missing/x.json"], "--json missing/x.json: there is no folder missing"),
        (["--json", "."], "--json . cannot be written"),
        (["--plot", "missing/x.png"], "--plot missing/x.png: there is no folder missing"),
        (["--plot", "x.gif"], "--plot x.gif: the name must end in .png"),
    ],
)
def test_an_evaluation_does_not_begin_where_it_could_not_be_written(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("evaluate-draft", "--model", "nosuch", *flags) == 2
    assert words in capsys.readouterr().err


@ROOT
def test_what_others_own_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        writable_folder("--out", tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        writable_file("--json", tmp_path / "x.json")


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    writable_folder("--out", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    writable_file("--json", tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()
