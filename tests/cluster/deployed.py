"""Runs `verifypd deploy --local` as a user would, changes it with another deploy, and ends it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.server.serving import ROOT, TINY, Server

START = 400.0  # s, on a busy machine
# Ray asks replicas for their load every 10 s, and would write a token into the user's home.
QUICK = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5", "RAY_AUTH_MODE": "disabled"}
REPLICA = "ServeReplica:verifypd:Engine"


class Deployed(Server):
    """One cluster on this machine."""

    def __init__(self, log: Path, port: int, **flags: Any) -> None:
        """These settings stay, unless a change names others."""
        self.log = log
        self._log = log.open("w")
        self._flags = {"served-model-name": "tiny", "port": port, **TINY, **flags}
        self.process = self._start("--local")
        assert self.process.stdout is not None
        self.address, self.port = f"http://127.0.0.1:{port}", port
        line = "verifypd deploy"
        while line and "--address" not in line:
            line = self.process.stdout.readline()
        found = re.search(r"--address (\S+);", line)
        assert found, f"it did not start:\n{log.read_text()[-3000:]}"
        self.ray = found.group(1)

    def _start(self, *more: str, **flags: Any) -> subprocess.Popen[str]:
        arguments = [f"--{name}={value}" for name, value in {**self._flags, **flags}.items()]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-m", "verifypd", "deploy", *more, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **QUICK, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def change(self, **flags: Any) -> subprocess.Popen[str]:
        """Begin to deploy it with other settings."""
        return self._start("--address", self.ray, **flags)

    def changed(self, **flags: Any) -> str:
        """Deploy it with other settings; returns what that printed."""
        process = self.change(**flags)
        said, _ = process.communicate(timeout=START)
        assert process.returncode == 0, self.log.read_text()[-3000:]
        return said

    def replicas(self) -> list[int]:
        """Process ids of the engines."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(process.pid for process in below if _is_replica(process))


def _is_replica(process: psutil.Process) -> bool:
    try:
        return any(REPLICA in part for part in process.cmdline())
    except psutil.Error:
        return False


def until(true: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until something is so; returns how long that took, s."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, what
        time.sleep(0.05)
    return time.monotonic() - begun
