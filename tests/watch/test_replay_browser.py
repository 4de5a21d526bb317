"""Replays in a real Chromium: the slider moves what is shown, and two records stand side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_trace import draft_span, verdict, verify_span
from tests.server.browser import NEEDS, Watched
from verifypd.engine import trace
from verifypd.watch import replay
from verifypd.watch.site import Site

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow, NEEDS]

MARKUP = "<img src=x onerror=window.hacked=1>"


def record(folder: Path, steps: int, arch: str) -> Path:
    """A request that gets three tokens every tenth of a second, under an architecture of this name."""
    lines: list[dict[str, Any]] = []
    for step in range(steps):
        at = 50.0 + step / 10
        spans = [verify_span(0, start=0, rows=9)] if not step else [verify_span(0, 2)]
        plan = {"event": "plan", "step": step + 1, "time": at + 0.05, "start": at, "policy": arch, "arch": arch}
        lines.append({**plan, "draft": [draft_span(0, 2)] if step else [], "verify": spans, "verify_seconds": 0.04})
        last = "length" if step == steps - 1 else None
        lines.append({"event": "verdicts", "time": at + 0.05, "rows": 3, "verdicts": [verdict(0, 2, 2, last)]})
    folder.mkdir()
    (folder / trace.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_slider_moves_through_a_record(tmp_path: Path, watched: Watched) -> None:
    page = watched.page
    with Site(replay.show([record(tmp_path / "one", 40, MARKUP)]), "127.0.0.1", 0) as site:
        page.goto(site.address)
        watched.state("replay")
        tokens = '[data-metric="vllm:generation_tokens_total"]'
        watched.until(f"document.querySelector('{tokens}')?.dataset.value === '120'")
        watched.points("c-tokens", "c-steps", "c-length", "c-position", seconds=5.0)
        assert page.inner_text("#moment-text") == "3.9 of 3.9 s" or page.inner_text("#moment-text") == "4.0 of 4.0 s"
        page.fill("#moment", "2")
        early = float(page.get_attribute(tokens, "data-value"))
        assert 50 < early < 70 and page.inner_text("#t-running") == "1"
        page.focus("#moment")
        page.keyboard.press("Home")
        assert float(page.get_attribute(tokens, "data-value")) <= 3
        page.select_option("#speed", "16")
        page.click("#play")
        watched.until(f"document.querySelector('{tokens}').dataset.value === '120'", 5.0)
        assert page.inner_text("#arch-ran") == MARKUP and page.evaluate("window.hacked") is None
        assert page.is_hidden("#playground") and page.is_hidden("#h-memory") and page.is_hidden("#h-device")
        assert watched.errors == [] and watched.outside(site.address) == set()


def test_two_records_side_by_side(tmp_path: Path, watched: Watched) -> None:
    folders = [record(tmp_path / "left", 40, "pd"), record(tmp_path / "right", 60, "pdv")]
    page = watched.page
    with Site(replay.show(folders), "127.0.0.1", 0) as site:
        page.goto(site.address)
        watched.state("replay")
        read = "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
        assert [row[:3] for row in page.eval_on_selector_all("#rows tbody tr", read)] == [
            ["left", "120", "1"],
            ["right", "180", "1"],
        ]
        frames = page.frames[1:]
        assert len(frames) == 2
        for frame in frames:
            frame.wait_for_selector("html[data-replay=ready]", state="attached")
        page.fill("#moment", "3")
        watched.until("document.querySelector('[data-chart=tokens]').dataset.points > 5")
        for frame, arch in zip(frames, ("pd", "pdv"), strict=True):
            value = '[data-metric="vllm:generation_tokens_total"]'
            for _ in range(50):
                if 80 < float(frame.get_attribute(value, "data-value")) < 100:
                    break
                page.wait_for_timeout(50)
            assert 80 < float(frame.get_attribute(value, "data-value")) < 100, "both stand at the same moment"
            assert frame.inner_text("#arch-ran") == arch and frame.is_hidden("#player")
        assert watched.errors == [] and watched.outside(site.address) == set()
