"""The site of replays and comparisons: what it serves, under which policy, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_trace import LINES
from tests.server.serving import ROOT
from verifypd.engine import trace
from verifypd.errors import ConfigError
from verifypd.watch.site import Arm, Log, Show, Site


def get(url: str) -> tuple[int, bytes, Any]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


@pytest.fixture
def site() -> Iterator[Site]:
    show = Show("<b>title</b>", [Arm("one", Log([{"time": 0}, {"time": 1}]))], Log([{"time": 0}]), live=False)
    with Site(show, "127.0.0.1", 0) as made:
        yield made


def test_pages_may_be_framed_by_themselves_only_and_load_nothing_from_elsewhere(site: Site) -> None:
    for path, mode in (("/compare", "replay"), ("/arms/0/dashboard", "replay")):
        status, body, headers = get(site.address + path)
        policy = headers["content-security-policy"]
        assert status == 200 and f'data-mode="{mode}"'.encode() in body
        assert "frame-ancestors 'self'; frame-src 'self'" in policy and "default-src 'none'" in policy
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
    assert get(site.address + "/dashboard/compare.js")[2]["content-type"].startswith("text/javascript")


def test_frames_and_events_come_whole(site: Site) -> None:
    assert json.loads(get(site.address + "/arms/0/dashboard/frames")[1]) == [{"time": 0}, {"time": 1}]
    assert json.loads(get(site.address + "/compare/events")[1]) == [{"time": 0}]
    about = json.loads(get(site.address + "/compare/about")[1])
    assert about["title"] == "<b>title</b>" and about["arms"] == [{"name": "one", "page": "/arms/0/dashboard"}]
    assert about["control"] is None


@pytest.mark.parametrize("path", ["/arms/1/dashboard", "/arms/1/dashboard/frames", "/compare/report", "/etc/passwd"])
def test_what_is_not_there_is_not_found(site: Site, path: str) -> None:
    assert get(site.address + path)[0] == 404


def test_a_port_that_is_taken_is_refused(site: Site) -> None:
    with pytest.raises(ConfigError, match="choose another --port, or 0"):
        Site(site.show, "127.0.0.1", int(site.address.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 65536, "--port 65536 must lie in 0..65535"),
        ("127.0.0.1", -1, "--port -1 must lie in"),
        ("", 0, "--host is empty"),
        ("nowhere.invalid", 0, "cannot listen on nowhere.invalid:0: .*; choose another --host"),
        ("a" * 70, 0, "choose another --host"),
    ],
)
def test_an_address_that_is_none_is_refused(site: Site, host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Site(site.show, host, port)


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / trace.FILE).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "verifypd", "replay", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        status, body, _ = get(address)
        assert status == 200 and b'data-mode="replay"' in body, "one record is shown on its own"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
