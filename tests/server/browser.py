"""A real Chromium for tests of pages: what a page drew, said, asked for and complained of."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

NEEDS = pytest.mark.skipif(CHROMIUM is None, reason="no browser here: apt-get install chromium")

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def launched() -> Iterator[Any]:
    """A browser: while it runs, no other event loop can in this thread."""
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


class Watched:
    """A page, and what it did."""

    def __init__(self, browser: Any, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def until(self, condition: str, seconds: float = 60.0) -> None:
        """Wait for a condition in the page. Playwright's own way needs `eval`, which the page's policy forbids."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            self.page.wait_for_timeout(80)  # looking takes time that the page needs

    def outside(self, address: str) -> set[str]:
        """What was asked of anybody else."""
        return {url for url in self.requests if not url.startswith((address, "data:"))}

    def state(self, wanted: str) -> None:
        self.until(f"document.getElementById('status').dataset.state === '{wanted}'")

    def points(self, *charts: str, seconds: float) -> None:
        """Wait until all these charts have data."""
        self.until(f"{json.dumps(charts)}.every((id) => document.getElementById(id).dataset.points > 0)", seconds)

    def frames(self, more: int = 2) -> None:
        """Wait until so many more frames are drawn."""
        drawn = int(self.page.evaluate("document.documentElement.dataset.frames || 0"))
        self.until(f"document.documentElement.dataset.frames >= {drawn + more}")
