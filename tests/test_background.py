"""Tests run in the background as they do in a terminal."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

CODE = """
import os, signal, subprocess, sys
from tests.conftest import pytest_configure
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
pytest_configure()
child = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
sys.exit(-subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL).returncode)
"""


def test_programs_can_be_interrupted_where_the_shell_ignores_it() -> None:
    command = ["sh", "-c", 'trap \'\' INT; exec "$0" -c "$1"', sys.executable, CODE]
    assert subprocess.run(command, cwd=ROOT).returncode == 2, "the child died of SIGINT"
