"""Comparisons in a real Chromium: arms that are started and a stranger, to their verdicts; and a load to change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from tests.server.browser import NEEDS, Watched
from tests.server.serving import ROOT
from verifypd.bench.campaign import Folder

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow, NEEDS]

READ = "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"


@contextmanager
def comparing(out: Path, *arguments: str, **environment: str) -> Iterator[str]:
    """A comparison that runs; its page's address."""
    command = [sys.executable, "-m", "verifypd", "compare", *arguments, "--out", str(out), "--port", "0"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1].removesuffix("/compare")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def post(address: str, body: Any, key: str | None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{address}/compare/control", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_plain_pdv_and_a_stranger_run_to_their_verdicts(tmp_path: Path, stranger: str, watched: Watched) -> None:
    verifier = tiny("llama", tmp_path / "verifier", max_position_embeddings=512)
    draft = noisy_copy(verifier, tmp_path / "draft", 0.15)
    flags = ["--model", str(verifier), "--draft", str(draft), "--controller", "fixed", "--dtype", "float32"]
    flags += ["--kv-memory", "32MB", "--batch-size", "8", "--max-draft", "3", "--max-model-len", "400"]
    load = ["--seeds", "1", "--rate", "20", "--duration", "1", "--output-tokens", "8", "--source", "fixed:20x8"]
    page = watched.page
    with comparing(
        tmp_path / "out", "plain", "pdv", f"vllm={stranger}", *load, *flags, VERIFYPD_ADMIN_KEY="the-secret"
    ) as address:
        page.goto(address)
        watched.until("document.documentElement.dataset.state === 'running'", 120.0)
        frames = page.frames[1:]
        assert len(frames) == 3
        assert page.is_hidden("#control") and post(address, {"rate": 5}, "the-secret") == 404, "it was not asked for"
        watched.until("document.documentElement.dataset.state === 'done'", 120.0)
        watched.until("document.querySelector('[data-chart=tokens]').dataset.points > 2")
        verdict = page.inner_text("#verdict-lines")
        assert "mean time of a request of pdv over plain" in verdict
        assert "mean time of a request of vllm over plain" in verdict and "plain ran twice" in verdict
        rows = page.eval_on_selector_all("#rows tbody tr", READ)
        assert [row[0] for row in rows] == ["plain", "pdv", "vllm"]
        for _, ended, failed, *figures in rows:
            done, _, sent = ended.split()
            assert done == sent and int(sent) > 5 and failed == "0"
            assert all(float(each.replace(",", "")) > 0 for each in figures)
        ours, theirs = frames[1], frames[2]
        assert ours.inner_text("#arch-ran").startswith("pdv") and ours.is_visible("#h-lanes")
        assert theirs.is_hidden("#h-lanes") and "25 % of the KV cache" in theirs.inner_text("#pools")
        written = '[data-metric="vllm:generation_tokens_total"]'
        assert float(theirs.get_attribute(written, "data-value")) > 100, "its own /metrics fill its panels"
        with page.context.expect_page() as opened:
            page.click("#report a")
        opened.value.wait_for_selector("h1")
        assert "pdv" in opened.value.content()
    assert watched.outside(address) == set()
    assert [error for error in watched.errors if "ERR_CONNECTION" not in error and "network" not in error] == []


def test_the_load_changes_from_the_page_with_the_key_alone(tmp_path: Path, stranger: str, watched: Watched) -> None:
    arms = [f"one={stranger}", f"two={stranger}"]
    load = ["--seeds", "1", "--rate", "2", "--duration", "8", "--output-tokens", "4", "--source", "fixed:5x4"]
    limits = ["--control", "--max-rate", "40", "--burst", "3x70", "--together"]
    page = watched.page
    with comparing(tmp_path / "out", *arms, *load, *limits, VERIFYPD_ADMIN_KEY="the-secret") as address:
        page.goto(address)
        watched.until("/The load can be changed now/.test(document.getElementById('words').textContent)")
        assert "at the same time" in page.inner_text("#words")
        assert post(address, {"rate": 5}, None) == 401 and post(address, {"rate": 5}, "wrong") == 401
        assert post(address, {"rate": 41}, "the-secret") == 400 and post(address, [1], "the-secret") == 400
        page.fill("#control-key", "the-secret")
        page.fill("#control-rate", "10")
        page.click("#control-form button[type=submit]")
        watched.until("document.getElementById('control-said').textContent === 'Set.'")
        page.click("#control-burst")
        watched.until("document.documentElement.dataset.state === 'done'", 120.0)
        assert "the-secret" not in page.content() and all("secret" not in url for url in watched.requests)
    one, two = Folder(tmp_path / "out").cells()
    assert one.workload == two.workload and len(one.outcome.records) == len(two.outcome.records) > 20
    [path] = (tmp_path / "out" / "workloads").iterdir()
    sent = json.loads(path.read_text())["requests"]
    assert sum(each["prompt_tokens"] == 70 for each in sent) == 3 and len(sent) == len(one.outcome.records)
    assert "the-secret" not in "".join(p.read_text() for p in (tmp_path / "out").rglob("*.json*"))
    unexpected = [error for error in watched.errors if "ERR_CONNECTION" not in error and "network" not in error]
    assert unexpected == []
