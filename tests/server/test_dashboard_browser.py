"""The dashboard in a real Chromium: it draws, says what /metrics says, takes no markup, asks nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.browser import NEEDS, Watched
from tests.server.samples import IDS, PROMPT
from tests.server.serving import Server

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow, NEEDS]

MARKUP = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script>"
DRAWN = ["c-tokens", "c-steps", "c-length", "c-position", "c-context", "c-device"]


NOTHING_OF_NOW = """
document.getElementById("status").textContent.startsWith("The engine stopped")
&& [...document.querySelectorAll(".lane b, #t-running")].every((each) => each.textContent === "–")
&& !document.querySelector(".dot:not(.left)")
&& ["t-waiting", "pools"].every((id) => document.getElementById(id).textContent === "the engine is not up")
"""


@pytest.fixture
def busy(server: Server) -> Iterator[None]:
    """Requests one after the other, until the test is over."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            server.complete(IDS, max_tokens=120, temperature=0, ignore_eos=True)

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    over.set()
    asking.join()


def test_charts_get_data_within_two_seconds(server: Server, watched: Watched, busy: None) -> None:
    page = watched.page
    page.goto(f"{server.address}/dashboard")
    watched.points(*DRAWN, seconds=2.0)
    assert page.title() == "Verify-PD dashboard" and page.inner_text("#model") == "tiny"
    watched.until("document.querySelectorAll('.dot').length > 0")
    watched.until("/a pass gives a request/.test(document.getElementById('why').textContent)")
    watched.points("c-latency", "c-spread", "c-requests", seconds=10.0)
    assert page.inner_text("#arch-ran") == "unified"
    labels = page.eval_on_selector_all("[role=img]", "(all) => all.map((each) => each.getAttribute('aria-label'))")
    assert len(labels) == 10 and all(labels), "a chart that says nothing to a reader of the screen"
    assert watched.errors == []
    assert watched.outside(server.address) == set()


def test_numbers_are_those_of_metrics(server: Server, watched: Watched) -> None:
    server.complete(IDS, max_tokens=50, temperature=0, ignore_eos=True)
    server.idle()
    watched.page.goto(f"{server.address}/dashboard")
    watched.frames(3)
    said = server.metrics()
    cells = watched.page.eval_on_selector_all(
        "[data-metric]", "(all) => all.map((each) => [each.dataset.metric, each.dataset.value, each.textContent])"
    )
    assert len(cells) == 15
    for metric, value, text in cells:
        assert float(value) == float(text.replace(",", "")) == said.get(metric, 0.0), metric
    assert float(watched.page.inner_text("#t-running")) == said["vllm:num_requests_running"] == 0
    assert watched.page.inner_text("#why") == "Nothing decodes now."
    used = said['verifypd:kv_blocks{pool="verifier",state="used"}']
    assert f"{used:.0f} of" in watched.page.inner_text("#pools") and watched.errors == []


def test_keyboard_pause_and_narrow_screens(server: Server, browser: Any, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{server.address}/dashboard")
    watched.state("live")
    page.focus("input[value=ttft]")
    page.keyboard.press("ArrowRight")
    assert "per token" in page.inner_text("#latency-note")
    page.focus("#pause")
    page.keyboard.press("Enter")
    assert page.get_attribute("#pause", "aria-pressed") == "true" and page.inner_text("#status") == "Paused"
    drawn = page.evaluate("document.documentElement.dataset.frames")
    page.wait_for_timeout(700)
    assert page.evaluate("document.documentElement.dataset.frames") == drawn
    page.keyboard.press("Enter")
    watched.frames(1)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    watched.frames(1)
    page.set_viewport_size({"width": 360, "height": 700})
    watched.until("document.documentElement.scrollWidth <= 360")
    assert watched.errors == []


@contextmanager
def below(address: str, path: str) -> Iterator[str]:
    """A proxy that has the server below a path of its own, which it takes off."""
    mark = f" {path}/".encode()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data.replace(mark, b" /", 1))
            target.shutdown(socket.SHUT_WR)

    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", urlsplit(address).port)) as behind:
                back = threading.Thread(target=pump, args=(behind, self.request))
                back.start()
                pump(self.request, behind)
                back.join()

    class Listening(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Listening(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}{path}"
        proxy.shutdown()


def test_below_a_path_of_a_proxy(server: Server, watched: Watched) -> None:
    with below(server.address, "/llm") as address:
        page = watched.page
        page.goto(f"{address}/dashboard")
        watched.state("live")
        page.click("#play-box > summary")
        page.fill("#p-prompt", PROMPT)
        page.fill("#p-max", "8")
        page.click("#p-run")
        watched.until("!document.getElementById('p-run').disabled")
        assert "The texts are the same" in page.inner_text("#play-verdict")
        assert page.evaluate("document.querySelector('#metrics-note a').href") == f"{address}/metrics"
        assert watched.errors == [] and watched.outside(address) == set()
        page.close()


def test_a_key_a_name_full_of_markup_and_a_restart(
    folders: tuple[Path, Path], tmp_path: Path, watched: Watched
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"engine-factory": "verifypd.testing.instant:build", "api-key": "secret-key", "port": port}
    page = watched.page
    with Server(folders[0], "none", tmp_path / "first", **flags, **{"served-model-name": MARKUP}) as server:
        page.goto(f"{server.address}/dashboard")
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-wrong:not([hidden])")
        page.fill("#key", "secret-key")
        page.click("#key-form button")
        watched.state("live")
        body = {"model": MARKUP, "prompt": [5, 6], "max_tokens": 5}
        assert server.post("/v1/completions", body, Authorization="Bearer secret-key")[0] == 200
        watched.frames(2)
        assert page.inner_text("#model") == MARKUP and page.is_hidden("#key-form")
        assert page.evaluate("window.hacked") is None and page.query_selector("main img, header img") is None
        assert page.input_value("#key") == "" and "secret" not in page.content()
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0 and page.context.cookies() == []
        assert all("secret" not in url for url in watched.requests)
        os.kill(server.children()["engine"], signal.SIGKILL)
        watched.until(NOTHING_OF_NOW)
    watched.state("down")
    unexpected = [error for error in watched.errors if "Failed to load resource" not in error]
    assert unexpected == [], "what a browser says of refused requests is not the page's"
    with Server(folders[0], "none", tmp_path / "second", **flags) as server:
        watched.state("live")  # with the key it still has
        watched.until("document.getElementById('model').textContent === 'tiny'")
        watched.frames(2)
        assert float(page.get_attribute('[data-metric="vllm:generation_tokens_total"]', "data-value")) == 0
    assert watched.outside(server.address) == set()
