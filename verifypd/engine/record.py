"""Writes what the engine did, one JSON object a line, to DIR/steps.jsonl. Knows plans and verdicts; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifypd.batch import Verdict, VerifyBatch
from verifypd.engine.timing import TimedPlan
from verifypd.errors import ConfigError


class Recorder:
    """Appends a line for each plan, absorbed batch and decision, and beliefs now and then. Writes no token ids."""

    def __init__(self, folder: str) -> None:
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

    def decision(self, time: float, decision: dict[str, Any]) -> None:
        """A choice of the policy, with its reason."""
        self._write({"time": time, **decision, "event": "decision"})

    def policy(self, step: int, time: float, state: dict[str, Any]) -> None:
        """What the policy believes now."""
        self._write({"event": "policy", "step": step, "time": time, **state})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
