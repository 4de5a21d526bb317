"""The program itself: help, its time, and what must not load torch."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.cli.program import ROOT, program


def test_help_needs_no_torch_and_little_time():
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = program("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0
        assert "generate" in result.stdout
    assert min(spent) < 0.3  # seconds of processor time: the machine may be busy with something else
    code = "import sys, verifypd.cli as c; c.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("command", ["generate", "chat", "pull", "models", "trace", "explain", "version"])
def test_every_command_has_help(command):
    result = program(command, "--help")
    assert result.returncode == 0
    assert result.stderr == ""


def test_bad_setting_is_refused_before_torch_is_loaded():
    code = "import sys; from verifypd import cli; assert cli.main(sys.argv[1:]) == 2; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "generate", "x", "--max-draft", "99"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "error: --max-draft 99 must lie in 0..64\n")
