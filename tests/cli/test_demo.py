"""`verifypd demo` as a user runs it: traffic without a client, and nothing left when it ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cli.program import ROOT, program
from tests.models.checkpoints import tiny
from tests.server.serving import children
from verifypd.bench.traffic import body


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_it_lives_without_a_client_and_ends_whole(tmp_path: Path, interrupt: signal.Signals) -> None:
    folder = tiny("llama", tmp_path / "model", max_position_embeddings=512)
    flags = ["--model", str(folder), "--draft", "none", "--port", "0", "--clients", "2", "--api-key", "secret"]
    factory = ["--engine-factory", "verifypd.testing.instant:build"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "verifypd", "demo", *flags, *factory],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert "/dashboard" in lines[2] and "2 clients ask for 60 minutes" in lines[3], (tmp_path / "log").read_text()
        match = re.search(r"https?://\S+", lines[0])
        assert match
        until = time.monotonic() + 20
        while True:
            text = urllib.request.urlopen(match.group() + "/metrics", timeout=10).read().decode()
            done = re.search(r'^verifypd:calls_total\{outcome="ok"\} (\S+)$', text, re.MULTILINE)
            if done and float(done.group(1)) >= 3:
                break
            assert time.monotonic() < until, "nobody asks"
            time.sleep(0.1)
        below = children(process.pid)
        process.send_signal(interrupt)
        assert process.wait(20) == 0
    assert len(below) >= 3
    until = time.monotonic() + 5  # Python's own keeper of shared memory notices a moment later
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < until, "something is left"
        time.sleep(0.05)


def test_what_it_refuses() -> None:
    for flags, words in ((["--clients", "0"], "--clients"), (["--minutes", "0"], "--minutes")):
        found = program("demo", *flags)
        assert found.returncode == 2 and words in found.stderr and "Traceback" not in found.stderr


def test_requests_are_mixed() -> None:
    draw = random.Random(0)
    bodies = [body("m", draw) for _ in range(200)]
    assert {each["temperature"] for each in bodies} == {0.0, 0.7}
    assert min(each["max_tokens"] for each in bodies) >= 24 and max(each["max_tokens"] for each in bodies) <= 96
    assert len({each["prompt"] for each in bodies}) > 30
