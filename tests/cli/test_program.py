"""The program itself: help, its time, and what must not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.program import ROOT, program


def test_help_imports_nothing_that_takes_long():
    """No installed package at all, torch least of all: these make help slow, and how slow is the machine's affair."""
    result = program("--help")
    assert result.returncode == 0 and "generate" in result.stdout
    code = (
        "import sys, verifypd.cli as c; c.build_parser().format_help();"
        "print(*{n.partition('.')[0] for n, m in sys.modules.items()"
        " if 'site-packages' in (getattr(m, '__file__', None) or '')}, len(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *packages, count = shown.stdout.split()
    assert not [name for name in packages if not name.startswith("_")]  # an editable install has helpers of its own
    assert int(count) < 400


@pytest.mark.slow
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
