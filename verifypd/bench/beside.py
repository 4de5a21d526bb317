"""Arms side by side on one device: starts their workers, has them take turns, and pools what came of it.

Knows tasks, turns and time left; nothing of engines, whose settings come from `arms` and whose work is done in
processes of `worker`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifypd.bench.arms import OFFLINE, Arm
from verifypd.bench.figures import CLOSED, OPEN, Outcome, Ratio, Sample, figures, ratios, sample
from verifypd.bench.workload import Arrival
from verifypd.errors import VerifyPDError

ROOT = Path(__file__).resolve().parents[2]
AGAIN = " again"  # the control: an arm's name with this behind it
CLOSING = 15.0  # s; for an engine to end by itself
MARGIN, SEEN_MARGIN = 1.15, 1.05  # of what a task is expected to take; of what it took before
WARM_OUTPUT = 32  # tokens
WARM_ARRIVALS = 16
COLUMNS = (
    ("tok/s", 9), ("good/s", 7), ("TPOT p50/p95", 13), ("TTFT p50/p95", 13), ("gap p50", 8), ("p99 (max)", 14),
    ("tok/out", 8),
)  # fmt: skip
CACHES = {"VLLM_CACHE_ROOT": ".", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


class ArmError(VerifyPDError):
    """An arm did not start, or ended."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Something all arms are asked to do: a closed loop of some clients, or traffic at some rate."""

    name: str
    tasks: tuple[dict[str, Any], ...]  # one a seed
    expected: float  # s, before any arm has done it

    @property
    def closed(self) -> bool:
        """Whether clients wait for their answers."""
        return bool(self.tasks[0]["kind"] == "closed")

    @property
    def compared(self) -> tuple[str, ...]:
        """Figures that ratios are given of."""
        return CLOSED if self.closed else OPEN

    def warm_up(self) -> dict[str, Any]:
        """The same in short."""
        task = self.tasks[0]
        if self.closed:
            output = min(task["output"], WARM_OUTPUT)
            return {**task, "requests": task["concurrency"], "output": output, "seed": task["seed"] + 1000}
        few = [[at, prompt, min(output, WARM_OUTPUT)] for at, prompt, output in task["workload"][:WARM_ARRIVALS]]
        return {**task, "workload": few, "seed": task["seed"] + 1000}


def closed_cell(
    level: int, prompt: int, output: int, seeds: Sequence[int], vocab: int, least: int = 24, each: int = 3
) -> Cell:
    """A closed loop of `level` clients; over all seeds at least `least` requests, and `each` a client and seed."""
    requests = max(each * level, -(-least // len(seeds)))
    waves = math.ceil(requests / level)
    expected = waves * output * (0.005 + 0.0001 * level) + requests * prompt / 40_000  # a 7B model on a large GPU
    shape = {"concurrency": level, "requests": requests, "prompt": prompt, "output": output}
    tasks = tuple({"kind": "closed", **shape, "seed": seed + 1, "vocab": vocab} for seed in seeds)
    return Cell(f"closed {level}", tasks, expected)


def open_cell(rate: int, arrivals: Sequence[Sequence[Arrival]], seeds: Sequence[int], vocab: int) -> Cell:
    """Requests as they arrive, one sequence a seed."""
    tasks = tuple(
        {"kind": "open", "workload": [[a.at, a.prompt_tokens, a.output_tokens] for a in each], "seed": seed + 1}
        for seed, each in zip(seeds, arrivals, strict=True)
    )
    tasks = tuple({**task, "vocab": vocab} for task in tasks)
    return Cell(f"mixed {rate}", tasks, max(each[-1].at for each in arrivals) + 4.0)


class Worker:
    """A worker process: questions in, answers out."""

    def __init__(self, arm: Arm, start: dict[str, Any], log: Path, peer: Path | None) -> None:
        self.arm = arm
        self.log = log
        self.failed = False
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "verifypd.bench.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env=environment(arm, peer), process_group=0,
            )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._send(start)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` finds that it has ended
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next message, or ArmError."""
        try:
            message = self._answers.get(timeout=max(0.1, timeout))
        except queue.Empty:
            self.failed = True
            raise ArmError(f"{self.arm.name} gave no answer in {timeout:.0f} s: see {self.log.name}") from None
        if message is None:
            self.failed = True
            raise ArmError(f"{self.arm.name} ended: see {self.log.name}")
        if message["kind"] == "error":
            raise ArmError(f"{self.arm.name}: {message['message']}")
        return message

    def run(self, task: dict[str, Any], cap: float) -> Outcome:
        """Have a task done; what is not done after `cap` s is stopped."""
        self._send({**task, "cap": cap})
        return Outcome.unpacked(self.answer(cap + 30.0)["outcome"])

    def hang_up(self) -> None:
        """Tell it that nothing more comes."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, patience: float = CLOSING) -> None:
        """End it and whatever it started, after `patience` s at the latest."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.0 if self.failed else max(0.0, patience))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listener.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def environment(arm: Arm, peer: Path | None) -> dict[str, str]:
    """A worker's variables: this source tree, and for vLLM the packages and the caches of the folder `peer`."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    if arm.engine == "vllm":
        env = {**OFFLINE, **env}
        if peer is not None:
            paths.insert(0, str(peer.resolve() / "site"))
            for name, folder in CACHES.items():
                env.setdefault(name, str(peer.resolve() / "cache" / folder))
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(slots=True)
class Pace:
    """How long tasks take, as far as they have been done."""

    seen: dict[tuple[str, str], float] = field(default_factory=dict)  # (cell, arm) -> s
    warmed: set[tuple[str, str]] = field(default_factory=set)

    def expected(self, cell: Cell, arm: str) -> float:
        """s for one task of a cell, its warm-up included where it is still to come."""
        own = self.seen.get((cell.name, arm))
        if own is not None:
            return SEEN_MARGIN * own
        others = [seconds for (name, _), seconds in self.seen.items() if name == cell.name]
        return MARGIN * max(others, default=cell.expected) * (1.0 if (cell.name, arm) in self.warmed else 1.2)


class Comparison:
    """The arms, what they did, and the report of it."""

    def __init__(
        self,
        arms: Sequence[Arm],
        cells: Sequence[Cell],
        *,
        references: Sequence[str],
        control: str | None,
        save: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.arms = arms
        self.cells = cells
        self.references = references
        self.control = control
        self.save, self.say, self.keep = save, say, keep
        self.pace = Pace()
        self.outcomes: dict[str, dict[str, dict[int, Outcome]]] = {}  # cell -> arm -> seed
        self.began = time.monotonic()
        self.report: dict[str, Any] = {
            "complete": False,
            "arms": {},
            "skipped": [],
            "errors": [],
            "runs": [],
            "cells": {},
        }

    def run(self, groups: Sequence[Sequence[Arm]], start: Callable[[Arm], Worker], seconds: float) -> None:
        """Every group in turn, each with a part of the time that is left: as much an arm, the control being one."""
        end = self.began + seconds
        sizes = [len(group) + any(arm.name == self.control for arm in group) for group in groups]
        for index, group in enumerate(groups):
            now = time.monotonic()
            self._group(group, start, now + (end - now) * sizes[index] / sum(sizes[index:]))
        for cell in self.cells if len(groups) > 1 else ():  # arms of two groups are compared when both have run
            self._compare(cell)
        self.report["complete"] = not self.report["skipped"] and not self.report["errors"]
        self._save()

    def _group(self, group: Sequence[Arm], start: Callable[[Arm], Worker], deadline: float) -> None:
        workers: dict[str, Worker] = {}
        try:
            self._start(group, start, workers, deadline)
            ends = deadline - CLOSING
            for turn in range(len(self.cells[0].tasks)):
                for cell in self.cells:
                    self._cell(cell, turn, workers, ends)
        except BaseException:
            for worker in workers.values():
                worker.failed = True  # nobody waits for them
            raise
        finally:
            for worker in workers.values():
                worker.hang_up()
            latest = time.monotonic() + CLOSING
            for worker in workers.values():
                worker.close(latest - time.monotonic())

    def _start(
        self, group: Sequence[Arm], start: Callable[[Arm], Worker], workers: dict[str, Worker], deadline: float
    ) -> None:
        """All at once, but those that measure: they come afterwards, one by one, each alone on the device."""
        batches = [[arm for arm in group if not arm.starts_alone], *([arm] for arm in group if arm.starts_alone)]
        for batch in batches:
            for arm in batch:
                workers[arm.name] = start(arm)
            self._save()
            for arm in batch:
                worker = workers[arm.name]
                try:
                    ready = worker.answer(deadline - time.monotonic())
                except ArmError as error:
                    worker.failed = True
                    workers.pop(arm.name).close()
                    self.report["arms"][arm.name] = {"error": str(error)}
                    self._failed(str(error), worker.last_words())
                else:
                    ready.pop("kind")
                    self.report["arms"][arm.name] = ready
                    self.say(f"{arm.name}: ready in {ready['start_seconds']:.1f} s, {self._elapsed():.0f} s gone")
        self._save()

    def _cell(self, cell: Cell, turn: int, workers: dict[str, Worker], ends: float) -> None:
        """One seed of a cell by every arm in turn, if there is time for all of them."""
        turns = [(name, name) for name in workers]
        if self.control in workers:
            turns.append((self.control + AGAIN, self.control))
        turns = [*turns[turn % max(1, len(turns)) :], *turns[: turn % max(1, len(turns))]]
        needed = sum(self.pace.expected(cell, arm) for _, arm in turns)
        if not turns:
            return
        if time.monotonic() + needed > ends:
            self.report["skipped"].append({"cell": cell.name, "turn": turn, "arms": [label for label, _ in turns]})
            self.say(f"{cell.name}, seed {turn}: left out, {needed:.0f} s are too many")
            self._save()
            return
        for label, arm in turns:
            if arm in workers:
                try:
                    self._task(cell, turn, label, workers[arm], ends)
                except ArmError as error:
                    self._failed(f"{cell.name}: {error}", workers[arm].last_words())
                    if workers[arm].failed:
                        workers.pop(arm).close()
        self._compare(cell)
        self._save()

    def _task(self, cell: Cell, turn: int, label: str, worker: Worker, ends: float) -> None:
        task, key = cell.tasks[turn], (cell.name, worker.arm.name)
        if key not in self.pace.warmed:
            worker.run(cell.warm_up(), max(5.0, ends - time.monotonic()))
            self.pace.warmed.add(key)
        began = time.monotonic()
        outcome = worker.run(task, max(5.0, min(ends - began, 10.0 + 3.0 * cell.expected)))
        self.pace.seen[key] = time.monotonic() - began
        done = self.outcomes.setdefault(cell.name, {}).setdefault(label, {})
        done[turn] = outcome
        found = figures([outcome])
        run = {"cell": cell.name, "arm": label, "turn": turn, "at_s": round(began - self.began, 2)}
        self.report["runs"].append({**run, "figures": found})
        if self.keep is not None:
            self.keep({**run, **outcome.packed()})
        entry = self.report["cells"].setdefault(cell.name, {}).setdefault(label, {})
        entry |= {"seeds": len(done), "figures": figures(list(done.values())), "over": entry.get("over", {})}
        self._save()
        self.say(
            f"{cell.name:>11} seed {turn} {label:24} {found['tok_s']:9.1f} tok/s  TPOT p50 {found['tpot_ms_p50']:.2f}"
            f" p95 {found['tpot_ms_p95']:.2f} ms  TTFT p95 {found['ttft_ms_p95']:.0f} ms  {self._elapsed():.0f} s gone"
        )

    def _compare(self, cell: Cell) -> None:
        """Ratios of each arm over the references, and of the control over the arm it is: of the seeds both have."""
        done = self.outcomes.get(cell.name, {})
        samples: dict[tuple[str, tuple[int, ...]], Sample] = {}

        def over(one: str, two: str) -> dict[str, Ratio]:
            seeds = tuple(sorted(set(done[one]) & set(done[two])))
            for label in (one, two):
                if (label, seeds) not in samples:
                    samples[label, seeds] = sample([done[label][seed] for seed in seeds])
            return ratios(cell.compared, samples[one, seeds], samples[two, seeds])

        noise: dict[str, float] = {}
        again = f"{self.control}{AGAIN}"
        entries = self.report["cells"].get(cell.name, {})
        if self.control in done and again in done:
            control = over(again, self.control)
            noise = {name: abs(math.log(ratio.value)) for name, ratio in control.items()}
            entries[again]["over"] = {self.control: shown(control, {})}
        for label in done:
            if label != again:
                entries[label]["over"] = {
                    reference: shown(over(label, reference), noise)
                    for reference in self.references
                    if reference in done and reference != label
                }

    def _failed(self, message: str, log: str) -> None:
        self.report["errors"].append(message)
        self.say(f"FAILED {message}\n{log}")
        self._save()

    def _save(self) -> None:
        self.report["seconds"] = round(self._elapsed(), 1)
        self.save(self.report)

    def _elapsed(self) -> float:
        return time.monotonic() - self.began


def shown(found: dict[str, Ratio], noise: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Ratios as plain data."""
    return {
        name: {
            "ratio": ratio.value,
            "low": ratio.low,
            "high": ratio.high,
            "reading": ratio.reading(noise.get(name, 0.0)),
        }
        for name, ratio in found.items()
    }


def table(report: dict[str, Any]) -> str:
    """All cells, one line an arm: the figures, then ratios over each reference; `=` marks no difference."""
    lines = []
    for name, arms in report["cells"].items():
        rate = "tok_s" if name.startswith("closed") else "good_share"
        titles = "".join(f"{title:>{width}}" for title, width in COLUMNS)
        lines.append(f"{name:24}{titles}  ratios of {rate}, TPOT p95, TTFT p95 [95 %]")
        lines += [_line(label, entry, rate) for label, entry in arms.items()]
    notes = [f"left out: {each['cell']}, seed {each['turn']}" for each in report["skipped"]]
    return "\n".join([*lines, *notes, *(f"FAILED: {each}" for each in report["errors"])])


def _line(label: str, entry: dict[str, Any], rate: str) -> str:
    f = entry["figures"]
    tpot, ttft = (f"{f[f'{name}_p50']:.{n}f}/{f[f'{name}_p95']:.{n}f}" for name, n in (("tpot_ms", 2), ("ttft_ms", 0)))
    gap = f"{f['gap_ms_p99']:.1f} ({f['gap_ms_max']:.0f})"
    rates = f"{f['tok_s']:9.0f}{f['goodput']:7.2f}{tpot:>13}{ttft:>13}{f['gap_ms_p50']:8.2f}{gap:>14}"
    stopped = f"  {f['unfinished']} UNFINISHED" if f["unfinished"] else ""
    return f"  {label:22}{rates}{f['tokens_per_output']:8.2f}  {'; '.join(_over(entry['over'], rate))}{stopped}"


def _over(over: dict[str, dict[str, Any]], rate: str) -> list[str]:
    found = []
    for reference, ratio in over.items():
        texts = [
            f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]{'' if r['reading'] != 'no difference' else ' ='}"
            for r in (ratio.get(name) for name in (rate, "tpot_ms_p95", "ttft_ms_p95"))
            if r is not None
        ]
        found.append(f"/ {reference}: {', '.join(texts)}")
    return found
