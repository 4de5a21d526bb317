"""What was recorded, for the page: one engine's record, several side by side, or a comparison as it was watched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifypd.engine import trace
from verifypd.errors import RequestError
from verifypd.watch import records
from verifypd.watch.site import Arm, Log, Show

WATCHED = "watched.jsonl"  # in the folder of a comparison: what its page showed
MEAN = 2.0  # s over which rates are taken
CHARTS = [
    {"name": "tokens", "title": "Tokens written", "unit": "tokens/s"},
    {"name": "running", "title": "Requests in the engine", "unit": "requests"},
    {"name": "accepted", "title": "Draft tokens that stood", "unit": "share of drafted"},
    {"name": "length", "title": "Draft length", "unit": "tokens a draft"},
]
COLUMNS = ["tokens", "requests ended", "tokens/s", "drafts accepted", "tokens a pass", "architecture"]
TOKENS, PASSES, GAINED = "vllm:generation_tokens_total", "verifypd:verdicts_total", "verifypd:verdict_tokens_total"
DRAFTS, DRAFTED, ACCEPTED = (
    f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
)


def show(folders: Sequence[Path]) -> Show:
    """A page for these folders. Raises RequestError where one holds nothing to show."""
    if len(folders) == 1 and (folders[0] / WATCHED).is_file():
        return watched(folders[0])
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    arms = [Arm(name, Log(records.frames(folder))) for name, folder in zip(names, folders, strict=True)]
    return Show(" and ".join(names), arms, Log(side_by_side(arms)), live=False, charts=CHARTS)


def side_by_side(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Events of records, each from its own beginning: an event for each moment at which any has a frame."""
    every = [arm.frames.since(0) for arm in arms]
    times = sorted({frame["time"] for frames in every for frame in frames})
    places, before = [0] * len(every), [0] * len(every)
    made = []
    for at in times:
        now = {}
        for i, frames in enumerate(every):
            while places[i] + 1 < len(frames) and frames[places[i] + 1]["time"] <= at:
                places[i] += 1
            while frames[places[i]]["time"] - frames[before[i]]["time"] > MEAN:
                before[i] += 1
            if at <= frames[-1]["time"]:
                now[str(i)] = {"x": at, **_point(frames[places[i]], frames[before[i]])}
        rows = [[arm.name, *_row(frames[places[i]])] for i, (arm, frames) in enumerate(zip(arms, every, strict=True))]
        words = "Records, each from its own beginning: what their engines did at that moment, and in all up to it."
        made.append({"time": at, "state": "done", "words": words, "columns": COLUMNS, "rows": rows, "now": now})
    return made


def _point(frame: dict[str, Any], before: dict[str, Any]) -> dict[str, float | None]:
    def grown(name: str) -> float:
        return float(frame["metrics"].get(name, 0) - before["metrics"].get(name, 0))

    seconds = frame["time"] - before["time"]
    drafts, drafted = grown(DRAFTS), grown(DRAFTED)
    return {
        "tokens": grown(TOKENS) / seconds if seconds > 0 else None,
        "running": frame["metrics"]["vllm:num_requests_running"],
        "accepted": grown(ACCEPTED) / drafted if drafted else None,
        "length": drafted / drafts if drafts else None,
    }


def _row(frame: dict[str, Any]) -> list[Any]:
    metrics, seconds = frame["metrics"], frame["time"]
    drafted, passes = metrics.get(DRAFTED, 0), metrics.get(PASSES, 0)
    return [
        str(metrics.get(TOKENS, 0)),
        str(metrics.get('verifypd:calls_total{outcome="ok"}', 0)),
        metrics.get(TOKENS, 0) / seconds if seconds else None,
        f"{100 * metrics.get(ACCEPTED, 0) / drafted:.0f} %" if drafted else None,
        metrics.get(GAINED, 0) / passes if passes else None,
        frame["architecture"] or None,
    ]


def watched(folder: Path) -> Show:
    """A comparison as its page showed it."""
    about: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    frames: dict[int, list[dict[str, Any]]] = {}
    for line in trace.lines(folder, WATCHED):
        if "about" in line:
            about = line["about"]
        elif "arm" in line:
            frames.setdefault(line["arm"], []).append(line["frame"])
        else:
            events.append(line)
    if not about or not events:
        raise RequestError(f"{folder / WATCHED} holds no comparison; was it interrupted at its start?")
    arms = [Arm(name, Log(frames.get(i, []))) for i, name in enumerate(about["arms"])]
    return Show(about["title"], arms, Log(events), live=False, charts=about["charts"], report=folder)


class Keeper:
    """Writes what a comparison's page shows, line by line, as `watched` reads it."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / WATCHED).open("w", encoding="utf-8")
        self.write({"about": about})

    def write(self, line: dict[str, Any]) -> None:
        """One more line."""
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()
