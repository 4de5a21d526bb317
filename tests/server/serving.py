"""Starts the real server as a user would, on a port the system chooses, and stops it. Knows not what it serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
START = 90.0  # s, on a busy machine
METRIC = re.compile(r"^([a-zA-Z_:0-9]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)  # a label may hold braces

# Small, in full precision: texts are the same whatever runs beside them.
TINY: dict[str, Any] = {
    "arch": "unified",
    "controller": "fixed",
    "dtype": "float32",
    "kv-memory": "32MB",
    "batch-size": 8,
    "max-draft": 3,
    "max-model-len": 400,
    "block-size": 8,
    "metrics-interval": 0.05,
    "drain-timeout": 10,
}


def launch(folder: Path, draft: str, log: Any, **flags: Any) -> subprocess.Popen[str]:
    """Start `verifypd serve` and wait for nothing."""
    given = {"model": str(folder), "draft": draft, "port": 0, "served-model-name": "tiny", **TINY, **flags}
    arguments = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            arguments += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "verifypd", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Server:
    """One running server."""

    def __init__(self, folder: Path, draft: str, log: Path, **flags: Any) -> None:
        self.log = log
        self._log = log.open("w")
        self.process = launch(folder, draft, self._log, **flags)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"https?://\S+", line)
        if not match:
            raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")
        self.address = match.group()
        self.curl = self.process.stdout.readline()
        self.watch = self.process.stdout.readline()
        self.port = int(self.address.rpartition(":")[2])

    @property
    def base(self) -> str:
        return self.address + "/v1"

    def post(self, path: str, body: Any, timeout: float = 60.0, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON and headers of a POST; `body` may be bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json", **headers}, method="POST"
        )
        return _open(request, timeout)

    def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        return _open(urllib.request.Request(self.address + path, headers=headers), 30.0)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        status, body, _ = self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields})
        assert status == 200, body
        return body

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, without the labels all of them have."""
        with urllib.request.urlopen(self.address + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = {}
        for name, labels, value in METRIC.findall(text):
            own = [label for label in labels.split(",") if label and not label.startswith(("model_name", "engine="))]
            found[f"{name}{{{','.join(sorted(own))}}}" if own else name] = float(value)
        return found

    def idle(self, seconds: float = 15.0) -> dict[str, float]:
        """Wait until nothing runs and no KV block is held; returns the metrics then."""
        until = time.monotonic() + seconds
        while True:
            now = self.metrics()
            held = sum(v for k, v in now.items() if k.startswith("verifypd:kv_blocks") and 'state="used"' in k)
            busy = now.get("vllm:num_requests_running", 1) + now.get("vllm:num_requests_waiting", 1) + held
            if not busy:
                return now
            assert time.monotonic() < until, f"still busy after {seconds} s: {now}"
            time.sleep(0.05)

    def logged(self, words: str, seconds: float = 10.0) -> str:
        """The log, once these words are in it: a request is logged after its answer has gone out."""
        until = time.monotonic() + seconds
        while words not in (text := self.log.read_text()):
            assert time.monotonic() < until, f"{words!r} is not in the log"
            time.sleep(0.02)
        return text

    def children(self) -> dict[str, int]:
        """Process ids by what the process does."""
        found = {}
        for pid in children(self.process.pid):
            maps = Path(f"/proc/{pid}/maps").read_text()
            if "libtorch" in maps:
                found["engine"] = pid
            elif "httptools" in maps:
                found["api"] = pid
        return found

    def ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def wait_ready(self, seconds: float = START) -> None:
        until = time.monotonic() + seconds
        while not self.ready():
            assert time.monotonic() < until, "not ready"
            time.sleep(0.05)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 30.0) -> int:
        return self.process.wait(seconds)

    def stop(self) -> str:
        """End it; returns its log."""
        if self.process.poll() is None:
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
        return self.log.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _open(request: urllib.request.Request, timeout: float) -> tuple[int, Any, Any]:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, _read(answer), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _read(error), error.headers


def _read(answer: Any) -> Any:
    data = answer.read()
    return json.loads(data) if "json" in answer.headers.get("content-type", "") else data.decode()


def events(text: str) -> list[Any]:
    """The JSON of each event of a stream, without [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
