"""Keys in a real Chromium: a link never holds one, and the operator's sets an architecture that no stream notices."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.server.browser import NEEDS, Watched
from tests.server.clients import Stream
from tests.server.samples import IDS
from tests.server.serving import Server
from tests.server.test_playground_browser import MARKUP, run

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow, NEEDS]

CLIENT = {"Authorization": "Bearer client-secret"}
LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def keyed(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key for clients, and one for its operator."""
    log = tmp_path_factory.mktemp("log") / "keyed.log"
    keys = {"api-key": "client-secret", "admin-key": "operator-secret"}
    with Server(folders[0], str(folders[1]), log, **keys) as running:
        yield running


def connect(watched: Watched, server: Server) -> None:
    """Open the page, and give it the clients' key."""
    watched.page.goto(f"{server.address}/dashboard")
    watched.page.fill("#key", "client-secret")
    watched.page.click("#key-form button")
    watched.state("live")


@contextmanager
def streaming(server: Server, bodies: list[dict[str, Any]]) -> Iterator[list[list[str]]]:
    """Each body sent again and again as a stream; the texts that came, of each."""
    over, told = threading.Event(), [[] for _ in bodies]

    def ask(body: dict[str, Any], texts: list[str]) -> None:
        while not over.is_set():
            texts.append(Stream(server, body, key="client-secret").start().join().text)

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(bodies, told, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_link_restores_the_settings_and_never_holds_the_key(keyed: Server, watched: Watched) -> None:
    page = watched.page
    connect(watched, keyed)
    run(watched, prompt=MARKUP, max="7", seed="9", schema="")
    assert page.inner_text("#s-drafts").startswith("7 tokens"), page.inner_text("#play-error")
    page.uncheck("#p-race")
    page.click("#p-share")
    link = page.input_value("#p-link")
    settings = json.loads(unquote(link.partition("#play=")[2]))
    assert settings["prompt"] == MARKUP and "secret" not in unquote(link) + page.url + page.content()
    other = watched.context.new_page()
    other.goto(link)
    assert other.input_value("#p-prompt") == MARKUP and other.input_value("#p-max") == "7"
    assert other.is_visible("#p-run") and not other.is_checked("#p-race") and other.is_hidden("#plain-arm")
    assert other.evaluate("document.getElementById('w-drafts').textContent") == "", "a link does not run by itself"
    assert all("secret" not in url for url in watched.requests)


def test_a_switch_from_the_page_that_no_stream_notices(keyed: Server, watched: Watched) -> None:
    page = watched.page
    asked = [{**LONG, "prompt": IDS[i:], "temperature": t, "seed": i} for i, t in enumerate((0.0, 0.8, 0.0, 0.5))]
    plain = [
        keyed.post("/v1/completions", {**each, "speculation": False}, **CLIENT)[1]["choices"][0]["text"]
        for each in asked
    ]
    connect(watched, keyed)
    page.click("#operator summary")
    page.select_option("#switch-to", "pdv")
    page.fill("#switch-key", "wrong")
    page.click("#switch-form button")
    page.wait_for_selector("#switch-error:not([hidden])")
    assert "key is missing or wrong" in page.inner_text("#switch-error")
    page.fill("#switch-key", "operator-secret")
    with streaming(keyed, asked) as told:
        watched.until("Number(document.getElementById('t-running').textContent) > 2", 5.0)
        page.click("#switch-form button")
        watched.until("document.getElementById('arch-policy').textContent.includes('pdv')")
        page.select_option("#switch-to", "pd")
        page.click("#switch-form button")  # the key is still known
        watched.until("document.getElementById('arch-policy').textContent.includes('is set')")
        watched.until("/^Set to pd. Of [1-9].* none failed/.test(document.getElementById('noticed').textContent)")
    assert [set(texts) for texts in told] == [{text} for text in plain], "what was under way, and what came after"
    figures = keyed.metrics()
    assert figures["verifypd:architecture_switches_total"] == 2
    assert page.input_value("#switch-key") == "" and "operator-secret" not in page.content()
    changes = page.inner_text("#changes")
    assert "unified → pdv: set by the operator" in changes and "pdv → pd: set by the operator" in changes
    assert all("secret" not in url for url in watched.requests)
    unexpected = [error for error in watched.errors if "Failed to load resource" not in error]
    assert unexpected == [], "what a browser says of refused requests is not the page's"


def test_without_an_operators_key_there_is_no_form(server: Server, watched: Watched) -> None:
    watched.page.goto(f"{server.address}/dashboard")
    watched.frames(2)
    assert watched.page.is_hidden("#operator") and watched.page.is_hidden("#noticed")
