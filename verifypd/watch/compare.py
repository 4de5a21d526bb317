"""Arms on the same arrivals, in turns or at the same time, and what a page shows of it while it goes on.

The benchmark does the measuring: its campaign, its files, its report. Knows no HTML and no processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verifypd.bench import report
from verifypd.bench.campaign import Campaign, Cell, Scenario, Turn, Watch, digest, spec_digest
from verifypd.bench.play import Drafts, counted, warm_up
from verifypd.bench.results import headlines, itself_line
from verifypd.bench.workload import Workload
from verifypd.errors import VerifyPDError
from verifypd.metrics.stats import percentile
from verifypd.watch.arms import Shown, Tally
from verifypd.watch.load import Load, steer
from verifypd.watch.replay import Keeper
from verifypd.watch.site import Arm, Log, Show

TICK = 0.5  # s between two events
KEPT = 1.0  # s between two frames of an arm that are written down
CHARTS = [
    {"name": "tokens", "title": "Tokens written (mean of 2 s)", "unit": "tokens/s"},
    {"name": "flight", "title": "Requests under way", "unit": "requests"},
    {"name": "ttft", "title": "First token, p50 of the last 50", "unit": "ms"},
    {"name": "tpot", "title": "Time per token after it, p50 of the last 50", "unit": "ms"},
]
COLUMNS = ["ended", "failed", "tokens/s", "first token p50, ms", "p95, ms", "per token p50, ms", "p95, ms"]
TOGETHER = "All arms run at the same time, on the same arrivals. Those that share a machine slow each other down."
TURNS = "Arms take turns, so that none slows another down; each gets the same requests at the same times."

STEERED = "The load can be changed now."


@dataclass(slots=True)
class Latest:
    """The newest frame of an arm. One thread sets it, others read."""

    frame: dict[str, Any] = field(default_factory=dict)
    length: int = 0

    def add(self, frame: dict[str, Any]) -> None:
        """A newer one."""
        self.frame = frame
        self.length += 1

    def since(self, index: int) -> list[dict[str, Any]]:
        """The newest, where there is one that has not been seen: as many as there are new ones."""
        return [self.frame] * (self.length - index)


class Compared(Campaign):
    """A campaign whose runs are told. Together, a turn runs all arms, and the turns after it find theirs done.

    With a load that is steered, the first run of a seed sends what the operator asks for, and the others the same.
    """

    together = False
    load: Load | None = None
    seconds = 0.0  # of a steered run

    def prepare(self, begin: Callable[[Sequence[Turn], bool], None]) -> None:
        """`begin` is told the runs that begin, and whether the load can be changed now."""
        self._begin = begin
        self._done: dict[tuple[str, int, str], Cell | BaseException] = {}
        self._sent: dict[tuple[str, int], Workload] = {}

    async def _cell(self, turn: Turn, watch: Watch) -> Cell:
        key = (turn.scenario.name, turn.index, turn.label)
        if key not in self._done:
            turns = [Turn(turn.scenario, turn.index, arm, arm.name) for arm in self.arms] if self.together else [turn]
            for other in turns if self.together else ():
                await warm_up(other.arm, other.workload, self.limits)
            for each, cell in zip(turns, await self._run(turns, watch), strict=True):
                self._done[turn.scenario.name, turn.index, each.label] = cell
        found = self._done[key]
        if isinstance(found, BaseException):
            raise found
        return found

    async def _run(self, turns: Sequence[Turn], watch: Watch) -> list[Cell | BaseException]:
        """Runs that begin at the same time."""
        row = (turns[0].scenario.name, turns[0].index)
        steered = self.load is not None and row not in self._sent
        self._begin(turns, steered)
        try:
            if steered:
                return list(await self._steered(turns, watch))
            if row in self._sent:
                same = replace(turns[0].scenario, workloads=_put(turns[0], self._sent[row]))
                turns = [replace(turn, scenario=same) for turn in turns]
            return list(await asyncio.gather(*(self._timed(turn, watch) for turn in turns), return_exceptions=True))
        finally:
            for turn in turns:
                _ended(turn.arm)

    async def _timed(self, turn: Turn, watch: Watch) -> Cell:
        try:
            return await super()._cell(turn, watch)
        finally:
            _ended(turn.arm)

    async def _steered(self, turns: Sequence[Turn], watch: Watch) -> list[Cell]:
        assert self.load is not None
        seed, first, arms = self.seeds[turns[0].index], turns[0], [turn.arm for turn in turns]
        before = [await arm.drafts() for arm in arms]
        mark = digest([self.folder.head["run"], first.scenario.name, seed, False])[:6]  # as of the runs after it
        workload, outcomes = await steer(arms, self.load, self.seconds, seed, self.limits, mark, watch.call)
        self._sent[first.scenario.name, first.index] = workload
        workload.write(self.workload_file(first))
        cells = []
        for turn, then, outcome in zip(turns, before, outcomes, strict=True):
            now = await counted(turn.arm, then, sum(record.tokens for record in outcome.records))
            drafts = None if now is None else now.since(then or Drafts())
            about = (workload.digest, spec_digest(turn.arm, turn.scenario), self.files)
            cells.append(Cell(turn.scenario.name, seed, turn.label, outcome, drafts, *about))
        return cells


def _put(turn: Turn, workload: Workload) -> tuple[Workload, ...]:
    return tuple(workload if i == turn.index else each for i, each in enumerate(turn.scenario.workloads))


def _ended(arm: Any) -> None:
    if isinstance(arm, Shown) and arm.tally.running:
        arm.tally.ended = time.monotonic()


class Stage(Watch):
    """Keeps the page informed: what runs, each arm's figures, and the verdict in the end."""

    def __init__(self, arms: Sequence[Shown], show: Show, keeper: Keeper, together: bool) -> None:
        self.arms, self.show, self.keeper, self.together = arms, show, keeper, together
        self.started = time.monotonic()
        self.state, self.words = "starting", "Starting the servers."
        self.verdict: list[str] = []
        self.errors: list[str] = []
        self._plan = ""
        self._last: dict[int, float] = {}

    # -- as the campaign tells it --------------------------------------------------------------------------------------

    def begin(self, turn: Turn, done: int, total: int) -> None:
        """A run is next; its arm is warmed up first."""
        self.state = "running"
        self._plan = f"Run {done + 1} of {total}: {turn.scenario.name}"
        self.words = f"{self._plan}: warming {turn.label} up."

    def run(self, turns: Sequence[Turn], steered: bool) -> None:
        """It begins."""
        names = ", ".join(turn.label for turn in turns)
        now = f" {STEERED}" if steered else ""
        self.words = f"{self._plan}, {names}. {TOGETHER if self.together else TURNS}{now}"
        for turn in turns:
            if isinstance(turn.arm, Shown):
                turn.arm.tally = Tally(begun=time.monotonic(), ended=None)

    def failed(self, turn: Turn, message: str) -> None:
        """A run did not take place."""
        self.errors.append(f"{turn.label}: {message}")

    # -- as the page is told -------------------------------------------------------------------------------------------

    def event(self) -> dict[str, Any]:
        """What the page shows now."""
        now = time.monotonic()
        running = {str(i): arm.tally.point(now) for i, arm in enumerate(self.arms) if arm.tally.running}
        return {
            "time": round(now - self.started, 2),
            "state": self.state,
            "words": self.words,
            "columns": COLUMNS,
            "rows": [[arm.name, *_row(arm, now)] for arm in self.arms],
            "now": running,
            "verdict": self.verdict,
            "report": self.state == "done",
        }

    def tell(self) -> None:
        """Show it, and write it down."""
        event = self.event()
        assert isinstance(self.show.events, Log)
        self.show.events.add(event)
        self.keeper.write(event)

    def frame(self, index: int, frame: dict[str, Any]) -> None:
        """A frame of an arm's dashboard."""
        latest = self.show.arms[index].frames
        assert isinstance(latest, Latest)
        latest.add(frame)
        self.arms[index].count(frame["metrics"])
        at = time.monotonic() - self.started
        if self.state == "running" and at - self._last.get(index, -KEPT) >= KEPT:
            self._last[index] = at
            self.keeper.write({"arm": index, "frame": {**frame, "time": round(at, 2)}})

    async def ticking(self) -> None:
        """Until cancelled."""
        while True:
            self.tell()
            await asyncio.sleep(TICK)


def _row(arm: Shown, now: float) -> list[float | str | None]:
    tally = arm.tally
    if not tally.sent:
        return [None] * len(COLUMNS)
    figures: list[float | str | None] = [
        f"{tally.done} of {tally.sent}",
        str(tally.failed),
        tally.mean(now),
    ]
    for values in (tally.firsts, tally.each):
        figures += [1e3 * percentile(values, share) if values else None for share in (0.5, 0.95)]
    return figures


def make_show(arms: Sequence[Shown], title: str, folder: Path) -> Show:
    """The page of a comparison."""
    return Show(title, [Arm(arm.name, Latest()) for arm in arms], Log(), live=True, charts=CHARTS, report=folder)


def about(show: Show) -> dict[str, Any]:
    """What is written down of a show, so that it can be played back."""
    return {"title": show.title, "arms": [arm.name for arm in show.arms], "charts": show.charts}


async def compare(campaign: Compared, stage: Stage, pictures: bool = False) -> dict[str, Any]:
    """Run it all, and write the report. The page is told of everything, also of what fails."""
    campaign.together = stage.together
    campaign.prepare(stage.run)
    beside = [asyncio.ensure_future(stage.ticking())]
    beside += [
        asyncio.ensure_future(arm.follow(lambda frame, i=i: stage.frame(i, frame)))  # type: ignore[misc]
        for i, arm in enumerate(stage.arms)
    ]
    try:
        await campaign.run(stage)
        found = report.write(campaign.folder.path, None, pictures)
        stage.verdict = [*verdict(found), *stage.errors]
        stage.state, stage.words = "done", "All runs have ended. The charts show each arm's last one."
        return found
    except VerifyPDError as error:
        stage.state, stage.words = "failed", f"It failed: {error}"
        raise
    finally:
        for task in beside:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*beside, return_exceptions=True)
        stage.tell()


def verdict(found: dict[str, Any]) -> list[str]:
    """How each arm compares with the first, in words."""
    names = {"tok_s": "tokens/s", "e2e_ms_mean": "mean time of a request"}
    lines = [
        f"{scenario}: {names[metric]} of {arm} over {found['reference']}: {ratio}"
        for scenario, arm, metric, ratio in headlines(found)
    ]
    return [*lines, itself_line(found)]


def labelled(scenario: Scenario, together: bool) -> Scenario:
    """Runs at the same time bear that in the name of their scenario, also in the report."""
    if not together:
        return scenario
    return replace(scenario, name=f"{scenario.name}, all at the same time")
