"""The dashboard's pictures, in a real Chromium: a server with traffic of its own, after a minute; two side by side.

python docs/images/draw_dashboard.py      # with playwright and Chromium, on a machine that does nothing else
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
WATCHED = 60  # s of traffic that a picture shows
Shot = tuple[int, int, Literal["light", "dark"], bool]  # width and height in pixels, colours, whether the whole page
SHOTS: dict[str, Shot] = {
    "dashboard-top.png": (1280, 1150, "light", False),
    "dashboard-top-dark.png": (1280, 1150, "dark", False),
    "dashboard.png": (1280, 900, "light", True),
    "dashboard-dark.png": (1280, 900, "dark", True),
    "dashboard-narrow.png": (390, 844, "light", True),
}
RACE = ["plain", "auto", "--concurrency", "1", "--num-requests", "8", "--output-tokens", "96", "--duration", "120"]
ENDED = "() => document.body.innerText.includes('All runs have ended')"
BUSY = "() => Number(document.getElementById('t-running').textContent) > 1"


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(address: str, seconds: float = 600.0) -> None:
    """Until that page is there."""
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(1)


def shoot(browser: Browser, address: str) -> None:
    """All pictures, of one page: a second one would take time from the server."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.goto(f"{address}/dashboard")
    time.sleep(WATCHED)
    for name, (width, height, colours, whole) in SHOTS.items():
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=colours)
        page.wait_for_timeout(1500)
        page.wait_for_function(BUSY)
        page.screenshot(path=str(HERE / name), full_page=whole)
        print(f"docs/images/{name}: drawn")


def race(browser: Browser, address: str) -> None:
    """Two architectures side by side, when all runs have ended."""
    page = browser.new_page(viewport={"width": 1280, "height": 1340}, reduced_motion="reduce")
    page.goto(address)
    page.wait_for_function(ENDED, timeout=900_000)
    page.wait_for_timeout(3000)
    page.screenshot(path=str(HERE / "compare.png"))
    print("docs/images/compare.png: drawn")


def main() -> None:
    """Serve, watch, shoot."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as out:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for draw, ready, command in (
            (shoot, "/ready", ["demo", "--clients", "2"]),
            (race, "/", ["compare", *RACE, "--out", out]),
        ):
            address = f"http://127.0.0.1:{(port := free_port())}"
            server = subprocess.Popen([sys.executable, "-m", "verifypd", *command, "--port", str(port)])
            try:
                wait_for(address + ready)
                draw(browser, address)
            finally:
                server.terminate()
                server.wait()
        browser.close()


if __name__ == "__main__":
    main()
