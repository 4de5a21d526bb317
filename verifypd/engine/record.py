"""Writes what the engine did, one JSON object a line, to DIR/steps.jsonl. Knows plans and verdicts; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Reversible, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from verifypd.batch import Verdict, VerifyBatch
from verifypd.control.architectures import Architecture
from verifypd.control.auto import Auto, Decision
from verifypd.engine.timing import TimedPlan
from verifypd.errors import ConfigError

BELIEFS_EVERY = 64  # steps between two lines about the policy's beliefs


class Recorder:
    """Appends a line for each plan, absorbed batch and decision, and beliefs now and then. Writes no token ids."""

    def __init__(self, folder: str) -> None:
        self._written: Decision | None = None  # the last decision of the policy that was
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = (Path(folder) / "steps.jsonl").open("w")
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error.strerror}; give a folder that can be written") from None

    def plan(self, timed: TimedPlan, time: float) -> None:
        """A plan that has run: `start` on the host, and seconds by kind of batch (`draft_seconds`, …).

        `policy` is the architecture in force, `arch` the one whose plan it is: they differ under `auto` and `table`.
        """
        plan = timed.plan
        batches = {
            name: [span._asdict() for span in batch.spans] if batch else []
            for name, batch in (("draft", plan.draft), ("verify", plan.verify), ("prefill", plan.prefill))
        }
        head = {"event": "plan", "step": timed.step, "time": time, "policy": timed.policy, "arch": timed.architecture}
        why = {"why": timed.why} if timed.why else {}
        self._write({**head, "start": timed.start, **batches, **timed.seconds(), **why})

    def verdicts(self, time: float, batch: VerifyBatch, verdicts: Sequence[Verdict | None]) -> None:
        """A batch that was absorbed."""
        rows = [
            {"slot": v.slot, "drafted": v.drafted, "accepted": v.accepted, "tokens": len(v.tokens), "finish": v.finish}
            for v in verdicts
            if v is not None
        ]
        self._write({"event": "verdicts", "time": time, "rows": batch.rows, "verdicts": rows})

    def policy(self, step: int, time: float, architecture: Architecture, idle: bool) -> None:
        """What the policy has decided since the last call, and now and then what it believes."""
        fresh = list(takewhile(lambda decision: decision is not self._written, reversed(_decisions(architecture))))
        for decision in reversed(fresh):
            self._write({"time": time, **asdict(decision), "event": "decision"})
        self.switched(architecture)
        if idle or step % BELIEFS_EVERY == 1:
            self._write({"event": "policy", "step": step, "time": time, **architecture.state()})

    def switched(self, architecture: Architecture) -> None:
        """Whose decisions are written from now on; earlier ones are not."""
        self._written = next(reversed(_decisions(architecture)), None)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _decisions(architecture: Architecture) -> Reversible[Decision]:
    """The latest, of an architecture that makes any."""
    return architecture.decisions if isinstance(architecture, Auto) else ()
