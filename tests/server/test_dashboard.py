"""The dashboard without a browser: its files, its frames, who may see them, and what they cost nobody."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.inprocess import api, connected
from tests.server.samples import IDS
from tests.server.serving import Server
from verifypd.server import dashboard
from verifypd.server.gate import PAGE_FILES, PAGE_SCRIPTS
from verifypd.server.messages import Stats
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

STATIC = Path(dashboard.__file__).parent / "static"


@contextmanager
def watching(server: Server) -> Iterator[Iterator[Any]]:
    """The frames a viewer gets."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/dashboard/events")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: "))
    finally:
        connection.close()


def welcome(server: Server) -> bool:
    """Whether another viewer is let in, and gets a frame."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/dashboard/events")
        answer = connection.getresponse()
        return answer.status == 200 and answer.readline().startswith(b"data: ")
    finally:
        connection.close()


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_served(server: Server) -> None:
    for path, kind in {"": "text/html", "/dashboard.js": "text/javascript", "/uplot.css": "text/css"}.items():
        status, body, headers = server.get("/dashboard" + path)
        assert status == 200 and headers["content-type"].startswith(kind) and body
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert server.get("/dashboard/other.js")[0] == 404
    assert server.get("/dashboard/../gate.py")[0] == 404
    status, body, _ = server.get("/dashboard", **{"If-None-Match": headers["etag"]})
    assert status == 200 and body
    assert server.get("/dashboard/uplot.css", **{"If-None-Match": headers["etag"]})[0] == 304


def test_the_page_needs_nothing_from_elsewhere_and_holds_no_script() -> None:
    page = (STATIC / "dashboard.html").read_text()
    asked = set(re.findall(r'(?:src|href)="([^"#:]*)"', page))
    own = {name: (STATIC / name).read_text() for name in PAGE_SCRIPTS if name != "uplot.js"}
    modules = {name for text in own.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert asked | {f"dashboard/{name}" for name in modules} == {
        *(f"dashboard/{name}" for name in PAGE_FILES),
        "metrics",
    }, "a path from the root is another one behind a proxy"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage"
    for name, text in own.items():
        assert not re.search(banned, text), name
        assert set(re.findall(r"https?://[^\"'`\s]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_the_page_is_small() -> None:
    assert {path.name for path in STATIC.iterdir()} == {"dashboard.html", "compare.html", "compare.js", *PAGE_FILES}
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 300_000


def test_the_address_is_printed(server: Server) -> None:
    assert server.watch.strip() == f"watch it at {server.address}/dashboard"
    assert 'href="dashboard"' in server.get("/")[1]


# -- the frames --------------------------------------------------------------------------------------------------------


def test_frames_hold_what_metrics_says(server: Server) -> None:
    server.complete(IDS, max_tokens=40, temperature=0, ignore_eos=True)
    server.idle()
    with watching(server) as frames:
        next(frames)
        shown, said = next(frames)["metrics"], server.metrics()
    moving = ("http_requests", "cpu_seconds")
    same = {name for name in said if not any(part in name for part in moving) and not re.search(r"_created\b", name)}
    assert len(same) > 150 and {name: shown[name] for name in same} == {name: said[name] for name in same}
    assert said["verifypd:verdict_tokens_total"] >= said["verifypd:verdicts_total"] > 0
    assert said["verifypd:verifier_passes_total"] > 0
    by_context = [v for k, v in said.items() if k.startswith("verifypd:draft_tokens_by_context_total")]
    by_position = [v for k, v in said.items() if k.startswith("verifypd:draft_tokens_per_pos_total")]
    assert sum(by_context) == sum(by_position) == said["vllm:spec_decode_num_draft_tokens_total"] > 0


def test_the_live_view_shows_steps_and_requests(server: Server) -> None:
    server.idle()
    with watching(server) as frames:
        body = json.dumps({"model": "tiny", "prompt": IDS, "max_tokens": 300, "ignore_eos": True, "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        seen = next(frame for frame in frames if frame["live"]["requests"])
        connection.close()
    live = seen["live"]
    [[_, lane, _, tokens, waited]] = live["requests"]
    assert lane in (0, 1, 2) and 0 <= tokens <= 300 and waited >= 0
    step, architecture, prefill, draft, verify, rest, drafting, longest, verifying, chunk = live["steps"][-1]
    assert step > 0 and architecture == "unified" and min(prefill, draft, rest) >= 0 and verify + prefill > 0
    assert (drafting, longest, verifying) == (1, 3, 1) or chunk
    assert live["policy"]["draft_length"] == 3 and seen["architecture"] == "unified"
    assert seen["server"]["model"] == "tiny" and seen["server"]["ready"]
    assert (seen["server"]["slo_ttft"], seen["server"]["slo_tpot"]) == (500.0, 15.0), "what a CPU's engine aims at"


def test_viewers_are_few(server: Server) -> None:
    with watching(server) as frames:
        next(frames)
        others = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(dashboard.VIEWERS)]
        statuses = []
        for other in others:
            other.request("GET", "/dashboard/events")
            statuses.append(other.getresponse().status)
        for other in others:
            other.close()
        assert set(statuses[:-5]) == {200} and statuses[-1] == 503  # those of other tests may still be leaving
    until = time.monotonic() + 20
    while not welcome(server):
        assert time.monotonic() < until, "those who left have made no room"
        time.sleep(0.05)


def test_a_report_without_viewers_makes_no_frame(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(dashboard.Frames, "frame", lambda self, now: made.append(now))
    bridge, _ = connected(tokenizer)
    with api(tokenizer, bridge) as client:
        for _ in range(10):
            bridge.take(Stats(1, {}))
        assert client.get("/dashboard").status_code == 200
    assert made == []


def test_the_figures_want_the_key_and_the_page_does_not(tokenizer: Tokenizer) -> None:
    with api(tokenizer, api_key=("secret",)) as client:
        assert client.get("/dashboard").status_code == client.get("/dashboard/dashboard.js").status_code == 200
        refused = client.get("/dashboard/events")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/dashboard/events?api_key=secret").status_code == 401


@pytest.mark.slow
def test_viewers_that_do_not_read_and_the_end(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Who does not read is dropped; who does holds up the end no longer than it takes."""
    flags = {"engine-factory": "verifypd.testing.instant:build", "send-timeout": 0.5, "drain-timeout": 90}
    with Server(folders[0], "none", tmp_path / "log", **flags) as server:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
        with deaf:
            server.logged("path=/dashboard/events", 90.0)
        with watching(server) as frames:
            assert next(frames)["server"]["ready"]
            begun = time.monotonic()
            server.terminate()
            rest = list(frames)  # the stream ends whole
            assert server.wait() == 0 and time.monotonic() - begun < 30, "no waiting for the drain to time out"
            assert all(frame["server"]["draining"] for frame in rest[-1:])
