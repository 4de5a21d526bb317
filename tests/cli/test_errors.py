"""Bad input, errors of the engine, Ctrl-C and closed pipes: one line at most, and an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.program import ROOT
from tests.cli.speller import Speller, run
from verifypd.cli import running
from verifypd.errors import ModelError


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "x", "--no-such-flag"],
        ["generate", "x", "--max", "3"],  # no guessing of flags
        ["generate", "x", "--top-p", "much"],
        ["generate", "x", "--top-p", "3"],
        ["generate", "x", "--arch", "gothic"],
        ["generate", "x", "--logit-bias", "five"],
        ["generate", "x", "--stop-token-ids", "1,two"],
        ["generate", "x", "--max-draft", "-1"],
        ["generate", "x", "--kv-memory", "lots"],
        ["generate", "x", "--synthetic-acceptance", "2"],
        ["generate", "x", "--min-tokens", "9", "--max-tokens", "3"],
        ["generate", "-", "-"],
        ["generate", "five", "--token-ids"],
        ["chat", "--n", "2"],
        ["pull", ""],
    ],
)
def test_bad_input_is_one_line_and_code_2(llm, capsys, args):
    try:
        code = run(*args)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_errors_of_the_engine_are_one_line(monkeypatch, capsys):
    def fail(settings):
        raise ModelError("weights are\n truncated; pull them again")

    monkeypatch.setattr(running, "load", fail)
    assert run("generate", "x") == 2
    assert capsys.readouterr().err == "error: weights are truncated; pull them again\n"


def test_ctrl_c_is_130(monkeypatch, capsys):
    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    speller = Speller(on_step=interrupt)
    monkeypatch.setattr(running, "load", speller)
    assert run("generate", "x") == 130
    assert "Traceback" not in capsys.readouterr().err
    assert speller.closed == 1


SPELL_FOR_EVER = """
import sys
from tests.cli.speller import Speller
from verifypd import cli
from verifypd.cli import flags, running
running.load = Speller("x\\n" * 100_000)
sys.exit(cli.main(["generate", "x"]))
"""


def test_a_full_disk_is_one_line():
    command = f"{sys.executable} -m verifypd models > /dev/full"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_closed_pipe_is_quiet():
    command = f"{sys.executable} -c '{SPELL_FOR_EVER}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("x\n", "", 141)
