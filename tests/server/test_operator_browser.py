"""Another architecture from the page, in a real Chromium: with the operator's key only, and no stream notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import NEEDS, Watched
from tests.server.clients import Stream
from tests.server.samples import IDS
from tests.server.serving import Server

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow, NEEDS]

LONG = {"max_tokens": 300, "ignore_eos": True}


@contextmanager
def streaming(server: Server, bodies: list[dict[str, Any]]) -> Iterator[list[list[str]]]:
    """Each body sent again and again as a stream; the texts that came, of each."""
    over, told = threading.Event(), [[] for _ in bodies]

    def ask(body: dict[str, Any], texts: list[str]) -> None:
        while not over.is_set():
            texts.append(Stream(server, body).start().join().text)

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(bodies, told, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_switch_from_the_page_that_no_stream_notices(
    folders: tuple[Path, Path], tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFYPD_ADMIN_KEY", "the-secret")
    page = watched.page
    asked = [{**LONG, "prompt": IDS[i:], "temperature": t, "seed": i} for i, t in enumerate((0.0, 0.8, 0.0, 0.5))]
    with Server(folders[0], str(folders[1]), tmp_path / "log") as server:
        plain = [server.complete(**each, speculation=False)["choices"][0]["text"] for each in asked]
        page.goto(f"{server.address}/dashboard")
        watched.state("live")
        page.click("#operator summary")
        page.select_option("#switch-to", "pdv")
        page.fill("#switch-key", "wrong")
        page.click("#switch-form button")
        page.wait_for_selector("#switch-error:not([hidden])")
        assert "key is missing or wrong" in page.inner_text("#switch-error")
        page.fill("#switch-key", "the-secret")
        with streaming(server, asked) as told:
            watched.until("Number(document.getElementById('t-running').textContent) > 2", 5.0)
            page.click("#switch-form button")
            watched.until("document.getElementById('arch-policy').textContent.includes('pdv')")
            page.select_option("#switch-to", "pd")
            page.click("#switch-form button")  # the key is still known
            watched.until("document.getElementById('arch-policy').textContent.includes('is set')")
            watched.until("/^Set to pd. Of [1-9].* none failed/.test(document.getElementById('noticed').textContent)")
        assert [set(texts) for texts in told] == [{text} for text in plain], "what was under way, and what came after"
        figures = server.metrics()
        assert figures["verifypd:architecture_switches_total"] == 2
        assert page.input_value("#switch-key") == "" and "the-secret" not in page.content()
        changes = page.inner_text("#changes")
        assert "unified → pdv: set by the operator" in changes and "pdv → pd: set by the operator" in changes
        assert all("secret" not in url for url in watched.requests)
        unexpected = [error for error in watched.errors if "Failed to load resource" not in error]
        assert unexpected == [], "what a browser says of refused requests is not the page's"


def test_without_an_operators_key_there_is_no_form(server: Server, watched: Watched) -> None:
    watched.page.goto(f"{server.address}/dashboard")
    watched.frames(2)
    assert watched.page.is_hidden("#operator") and watched.page.is_hidden("#noticed")
