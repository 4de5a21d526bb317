"""Arms through scenarios, seed by seed, in turns; every run is kept as a file, so that what was done is not done again.

A scenario is a kind of traffic; with a seed it is a workload, the same for every arm. A cell is one arm's run of one
workload. A folder holds:

    run.json          arms, scenarios, seeds, targets, and where the figures come from, once a sitting
    workloads/        every workload, as `--workload` reads it
    cells/            every run: when each output of each request came

Knows arms by their protocol; nothing of HTTP or engines, and nothing of reports.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verifypd.bench.figures import Outcome, Targets
from verifypd.bench.meter import Parts, metered
from verifypd.bench.play import (
    Arm,
    Call,
    Drafts,
    Limits,
    Pausing,
    Player,
    Tunable,
    counted,
    play,
    refuse_unanswered,
    warm_up,
)
from verifypd.bench.workload import Workload
from verifypd.errors import ConfigError, VerifyPDError

PLAN = ("scenarios", "arms", "seeds", "sittings", "targets")  # what it has at least
MADE = ("cells", "results.json", "summary.md", "report.html")  # beside the plan
AGAIN = " again"  # the name of an arm that runs twice has this behind it the second time


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of traffic: one workload a seed."""

    name: str
    workloads: tuple[Workload, ...]
    cut: float | None = None  # s after which a run is stopped
    settings: dict[str, Any] = field(default_factory=dict)  # of every arm that can be tuned to it
    pair: str = ""  # where models are compared: those that it runs on
    level: str = ""  # and its load
    group: str = ""  # scenarios of one group run together, seed by seed, before those of the next


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm's run of one workload."""

    scenario: str
    seed: int
    arm: str
    outcome: Outcome
    drafts: Drafts | None
    workload: str  # its digest
    spec: str  # the arm's digest
    files: str  # the code's hash
    parts: Parts | None = None  # what the arm was doing, where it says
    pauses: dict[str, float] | None = None  # what held up its steps besides their work, where it says

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        names = ("scenario", "seed", "arm", "workload", "spec", "files", "pauses")
        drafts = None if self.drafts is None else self.drafts.packed()
        parts = None if self.parts is None else self.parts.packed()
        own = {name: getattr(self, name) for name in names}
        return {**own, "drafts": drafts, "parts": parts, "outcome": self.outcome.packed()}

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Cell:
        """What `packed` made."""
        drafts = Drafts.unpacked(data["drafts"])
        parts, outcome = Parts.unpacked(data.get("parts")), Outcome.unpacked(data["outcome"])
        return cls(**{**data, "outcome": outcome, "drafts": drafts, "parts": parts})


class Folder:
    """What a campaign keeps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        if (path / "run.json").exists():
            self.head = _read(path / "run.json")
            if lacking := [name for name in PLAN if name not in self.head]:
                raise ConfigError(f"{path / 'run.json'} is none of a benchmark's: it has no {lacking[0]}")

    def begin(self, plan: dict[str, Any], sitting: dict[str, Any] | None) -> None:
        """Write down what is run, and by which code. A folder takes one plan; more arms or seeds may join it.

        sitting: None where nothing is left to run.
        """
        if self.head.get("targets", plan["targets"]) != plan["targets"]:
            raise ConfigError(f"{self.path} holds a run with other targets; choose another --out")
        other = next((name for name in MADE if not self.head and (self.path / name).exists()), None)
        if other is not None:
            raise ConfigError(f"{self.path} holds {other} of something else: choose another --out")
        before = self.head.get("arms", {})
        known = before | {name: before.get(name, {}) | arm for name, arm in plan["arms"].items()}
        seeds = sorted({*self.head.get("seeds", []), *plan["seeds"]})
        scenarios = list(dict.fromkeys([*self.head.get("scenarios", []), *plan["scenarios"]]))
        grid = {**self.head.get("grid", {}), **plan.get("grid", {})}
        self.head = {
            "run": self.head.get("run") or secrets.token_hex(3),
            **({"note": self.head["note"]} if "note" in self.head else {}),  # a run that goes on may not say it again
            **plan,
            "arms": known,
            "scenarios": scenarios,
            "grid": grid,
            "seeds": seeds,
            "sittings": [*self.head.get("sittings", []), *([] if sitting is None else [sitting])],
        }
        self.save_head()

    def save_head(self) -> None:
        """Write the plan."""
        write_whole(self.path / "run.json", json.dumps(self.head, indent=1, ensure_ascii=False) + "\n")

    def file(self, scenario: str, seed: int, arm: str) -> Path:
        """Where a cell is kept."""
        return self.path / "cells" / f"{file_name(scenario)}-seed{seed}-{file_name(arm)}.json"

    def find(self, scenario: str, seed: int, arm: str) -> Cell | None:
        """A cell that was run before."""
        path = self.file(scenario, seed, arm)
        return _cell(path) if path.exists() else None

    def keep(self, cell: Cell) -> None:
        """Write a cell."""
        write_whole(self.file(cell.scenario, cell.seed, cell.arm), json.dumps(cell.packed()) + "\n")

    def cells(self) -> list[Cell]:
        """All of them, in the order of the plan."""
        found = [_cell(path) for path in sorted((self.path / "cells").glob("*.json"))]
        scenarios, arms = list(self.head["scenarios"]), list(self.head["arms"])
        for cell in found:
            if cell.scenario not in scenarios or cell.arm.removesuffix(AGAIN) not in arms:
                path = self.file(cell.scenario, cell.seed, cell.arm)
                raise ConfigError(f"{path} is of no arm or workload of {self.path / 'run.json'}: remove it")
        return sorted(
            found,
            key=lambda c: (scenarios.index(c.scenario), arms.index(c.arm.removesuffix(AGAIN)), c.arm, c.seed),
        )


def digest(value: Any) -> str:
    """What tells two of a kind apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def spec_digest(arm: Arm, scenario: Scenario) -> str:
    """What tells two arms of one name apart. A server that has moved is still the same."""
    spec = {name: value for name, value in arm.spec.items() if name != "url"}
    return digest([spec, scenario.settings] if isinstance(arm, Tunable) and scenario.settings else spec)


def file_name(text: str) -> str:
    """A name in letters that any file system takes; long ones are cut and told apart by a number."""
    plain = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)
    return plain if len(plain) <= 80 and plain == text else f"{plain[:70]}-{digest(text)[:6]}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never there in part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _cell(path: Path) -> Cell:
    try:
        return Cell.unpacked(_read(path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} is no run ({error!r}); remove it to measure again") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it to measure again") from None


@dataclass(frozen=True, slots=True)
class Turn:
    """What is run next."""

    scenario: Scenario
    index: int  # of the seed
    arm: Arm
    label: str  # the arm's name, or that with `again` behind it

    @property
    def workload(self) -> Workload:
        """Of its scenario and seed."""
        return self.scenario.workloads[self.index]

    @property
    def settings(self) -> dict[str, Any]:
        """Of its scenario, and how many requests come, where that does not say."""
        return {"requests": len(self.workload.arrivals), **self.scenario.settings}

    @property
    def requests(self) -> str:
        """How many there are, in words."""
        count, clients = len(self.workload.arrivals), self.workload.clients
        return f"{count} requests" + (f", {clients} at once" if clients else "")


class Watch:
    """Told how a campaign goes; this one says nothing."""

    def begin(self, turn: Turn, done: int, total: int) -> None:
        """A run begins."""

    def call(self, call: Call) -> None:
        """A request has ended."""

    def tick(self, going: Sequence[Call]) -> None:
        """A run goes on: once a second, with the requests that are under way."""

    def end(self, turn: Turn, cell: Cell) -> None:
        """A run has ended."""

    def failed(self, turn: Turn, message: str) -> None:
        """A run did not take place."""


class Campaign:
    """Runs what is still to be run."""

    def __init__(
        self,
        folder: Folder,
        arms: Sequence[Arm],
        scenarios: Sequence[Scenario],
        seeds: Sequence[int],
        *,
        limits: Limits,
        files: str,
        control: str | None,
    ) -> None:
        """control: the arm that runs twice. files: hash of the code."""
        self.folder, self.arms, self.scenarios, self.seeds = folder, list(arms), scenarios, seeds
        self.limits, self.files, self.control = limits, files, control
        self.errors: list[str] = []
        twice = [name for name, count in Counter(file_name(each.name) for each in scenarios).items() if count > 1]
        if twice:
            raise ConfigError(
                f"two workloads are called {twice[0]!r}: give each a name of its own, or run one at a time"
            )
        names = [arm.name for arm in arms]
        if len(set(names)) < len(names):
            raise ConfigError(
                "two arms have the same name; give NAME=URL, or leave one out: the first runs twice anyway"
            )

    def turns(self) -> Iterator[Turn]:
        """Seed by seed and scenario by scenario all arms, each time in another order, which a seed draws: what an arm
        leaves behind (heat, clocks, caches) falls on one arm now and on another then."""
        for group in dict.fromkeys(scenario.group for scenario in self.scenarios):
            yield from self._turns([scenario for scenario in self.scenarios if scenario.group == group])

    def _turns(self, scenarios: Sequence[Scenario]) -> Iterator[Turn]:
        for index, seed in enumerate(self.seeds):
            for scenario in scenarios:
                row = [Turn(scenario, index, arm, arm.name) for arm in self.arms]
                row += [Turn(scenario, index, a, a.name + AGAIN) for a in self.arms if a.name == self.control]
                random.Random(f"{scenario.name}, seed {seed}").shuffle(row)
                yield from row

    def left(self) -> list[Turn]:
        """What is still to be run. A cell of another workload or arm is not taken for this one's."""
        left = []
        for turn in self.turns():
            found = self.folder.find(turn.scenario.name, self.seeds[turn.index], turn.label)
            if found is None:
                left.append(turn)
            elif (found.workload, found.spec) != (turn.workload.digest, spec_digest(turn.arm, turn.scenario)):
                raise ConfigError(
                    f"{self.folder.path} holds {turn.scenario.name!r} by {turn.label!r} with other settings; choose"
                    " another --out"
                )
        return left

    async def run(self, watch: Watch) -> None:
        """Start the arms, and run what is left."""
        left, warmed = self.left(), set()
        if not left:
            return
        for turn in left:
            turn.workload.write(self.workload_file(turn))
        try:
            for arm in self.arms:
                self.folder.head["arms"][arm.name]["about"] = await arm.start()
            self.folder.save_head()
            for done, turn in enumerate(left):
                watch.begin(turn, done, len(left))
                try:
                    if isinstance(turn.arm, Tunable):
                        about = await turn.arm.prepare(turn.settings)
                        self.folder.head["arms"][turn.arm.name]["about"].update(about)
                    if (turn.arm.name, turn.scenario.name) not in warmed:
                        before = await turn.arm.drafts()
                        tokens = await warm_up(turn.arm, turn.workload, self.limits)
                        warmed.add((turn.arm.name, turn.scenario.name))
                        await counted(turn.arm, before, tokens)
                    cell = await self._cell(turn, watch)
                except VerifyPDError as error:
                    self.errors.append(f"{turn.scenario.name}, {turn.label}: {error}")
                    watch.failed(turn, str(error))
                    continue
                self.folder.keep(cell)
                watch.end(turn, cell)
        finally:
            self.folder.save_head()
            for arm in self.arms:
                await arm.close()

    def workload_file(self, turn: Turn) -> Path:
        """Where a workload is written."""
        return self.folder.path / "workloads" / f"{file_name(turn.scenario.name)}-seed{self.seeds[turn.index]}.json"

    async def _cell(self, turn: Turn, watch: Watch) -> Cell:
        """One run. Its prompts bear a mark of their own, so that no cache knows them from an earlier one; a simulated
        arm has no such cache, and the mark draws its chances: there it is the same in every folder."""
        seed = self.seeds[turn.index]
        folder = "" if isinstance(turn.arm, Player) else self.folder.head["run"]
        mark = digest([folder, turn.scenario.name, seed, turn.label.endswith(AGAIN)])[:6]
        seconds = min(self.limits.seconds, turn.scenario.cut or self.limits.seconds)
        before, paused = await turn.arm.drafts(), await _pauses(turn.arm)
        limits = replace(self.limits, seconds=seconds)
        async with metered(turn.arm) as parts:
            outcome = await play(turn.arm, turn.workload.marked(mark), limits, watch.call, watch.tick)
        refuse_unanswered(turn.arm, outcome)  # it is not kept: the next sitting runs it again
        after = await counted(turn.arm, before, sum(record.tokens for record in outcome.records))
        drafts = None if after is None else after.since(before or Drafts())
        pauses = {name: value - paused.get(name, 0) for name, value in (await _pauses(turn.arm)).items()}
        if min(pauses.values(), default=0) < 0:  # the count began anew
            pauses = {}
        return Cell(
            turn.scenario.name, seed, turn.label, outcome, drafts, turn.workload.digest,
            spec_digest(turn.arm, turn.scenario), self.files, next(iter(parts), None), pauses or None,
        )  # fmt: skip


async def _pauses(arm: Arm) -> dict[str, float]:
    """What held up an arm's steps so far; nothing where it does not say."""
    return (await arm.pauses() if isinstance(arm, Pausing) else None) or {}


def plan_of(
    arms: Sequence[Arm], scenarios: Sequence[Scenario], seeds: Sequence[int], targets: Targets, control: str | None
) -> dict[str, Any]:
    """What a folder keeps of a campaign."""
    return {
        "targets": asdict(targets),
        "control": control,
        "seeds": list(seeds),
        "scenarios": [scenario.name for scenario in scenarios],
        "grid": {scenario.name: [scenario.pair, scenario.level] for scenario in scenarios if scenario.level},
        "arms": {arm.name: {"spec": arm.spec} for arm in arms},
    }
