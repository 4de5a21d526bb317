"""An ingress's side of many engines: each call is in one replica, and goes on in another when that is lost.

Knows messages and calls. `run` brings a call to a replica of somebody's choice, and ends when it has ended there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from verifypd.server.bridge import Bridge
from verifypd.server.calls import Call, engine_lost
from verifypd.server.logs import event
from verifypd.server.messages import Abort, Answer, Output, Outputs, Stats, Submit, ToEngine, ToWorker, Up
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PAUSE = 0.1  # s before a call that lost its replica is sent to another
LAST_TOKENS = 5.0  # s that tokens may take longer than the word that they were all
SILENT = 10.0  # s without figures, or three times as long as they take, after which a replica is taken for gone
GREATEST = ("wait_p50_ms", "wait_p95_ms", "wait_p99_ms")  # figures of which the worst replica's is shown
# Figures that end with their replica; the others count what has happened, and only grow.
PRESENT = {"running", "waiting", "slots", "pools", "kv_bytes", "depth", *GREATEST, "gpu", "live"}

Run = Callable[[Submit], Awaitable[None]]
Line = Callable[[ToEngine], None]


class ClusterBridge(Bridge):
    """All calls of an ingress."""

    def __init__(
        self,
        worker: int,
        tokenizer: Tokenizer | None,
        retries: int,
        run: Run,
        line: Callable[[str], Line],
        model: str = "",
    ) -> None:
        """`worker` names this ingress among all; `line` makes a line to the replica at an address.

        `model` names whose tokens its calls have: a replica of another refuses them.
        """
        super().__init__(worker, tokenizer, retries)
        self.model = model
        self._run = run
        self._line = line
        self._lines: dict[int, Line] = {}  # replica -> the way there
        self._homes: dict[int, int] = {}  # call number -> replica
        self._tasks: dict[int, asyncio.Task[None]] = {}  # call number -> what waits for it
        self._reports: dict[int, tuple[float, dict[str, Any]]] = {}  # replica -> when it told its figures, and which
        self._past: dict[int, dict[str, Any]] = {}  # replica that is silent -> its counts
        self._silent = SILENT
        self._lost: set[int] = set()  # replicas

    def begin(self, info: dict[str, Any]) -> None:
        """There are replicas, of which one said this of itself."""
        self.connect = lambda address: self._pass_on
        super().take(Up(1, "", info))

    @property
    def restarts(self) -> int:
        """How many replicas were lost with calls of this ingress."""
        return len(self._lost)

    # -- calls out ----------------------------------------------------------------------------------------------------

    def _pass_on(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            following = self._follow(self.calls[message.call], message)
            self._tasks[message.call] = asyncio.get_running_loop().create_task(following)
        elif isinstance(message, Abort):
            line = self._lines.get(self._homes.get(message.call, -1))
            if line is not None:
                line(message)

    async def _follow(self, call: Call, message: Submit) -> None:
        """Wait for a call in its replica; where that fails, have another go on with it."""
        try:
            await self._run(message)
            reason = "its last tokens did not arrive"
            if not call.done:
                await asyncio.sleep(LAST_TOKENS)
        except (Exception, asyncio.CancelledError) as error:  # a replica can be lost in many ways
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # nobody waits here; Ray raises the same where the call was cancelled over there
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            await asyncio.sleep(PAUSE)
        home = self._homes.pop(message.call, None)
        if self._tasks.pop(message.call, None) is None or call.done:
            return
        if home is not None:
            self._lost.add(home)
        self._take_up(call, reason)

    def _message(self, call: Call) -> Submit:
        return msgspec.structs.replace(super()._message(call), model=self.model)

    def _take_up(self, call: Call, reason: str) -> None:
        """Send a call to another replica, under another number: what the first still sends is nobody's."""
        if call.died() > self.retries:
            call.fail(engine_lost(reason))
            return
        del self.calls[call.number]
        call.number = next(self._numbers)
        self.calls[call.number] = call
        tokens = sum(choice.tokens for choice in call.choices)
        event(log, "taken up again", request_id=call.name, tries=call.tries + 1, tokens=tokens, reason=reason)
        self._submit(call)

    def _forget(self, call: Call) -> None:
        task = self._tasks.pop(call.number, None)
        if task is not None and (call.left or call.error is not None):
            task.cancel()
        self._homes.pop(call.number, None)
        super()._forget(call)

    # -- messages in --------------------------------------------------------------------------------------------------

    def take(self, message: ToWorker) -> None:
        """Act on a message from a replica. `epoch` is its name here."""
        if isinstance(message, Up):
            self._lines[message.epoch] = self._line(message.address)
            self._silent = max(SILENT, 3 * message.info["metrics_interval"])
        elif isinstance(message, Answer):
            if message.call in self.calls:
                self._homes[message.call] = message.epoch
            self._answer(message)
        elif isinstance(message, Outputs):
            self._outputs(message.outputs)
        elif isinstance(message, Stats):
            self._report(message)

    def _output(self, call: Call, output: Output, now: float) -> None:
        """Take what a step gave, unless something before it is missing: lines may lose messages when they break.

        An abort that was not asked for here is none: the replica was told to end the call, and another goes on.
        """
        choice = call.choices[output.choice]
        follows = call.admitted.done() and output.start == choice.tokens and output.finish != "abort"
        if follows or choice.finish is not None:
            super()._output(call, output, now)
            return
        task = self._tasks.pop(call.number, None)
        if task is not None:
            task.cancel()  # which ends the call where it runs
        self._homes.pop(call.number, None)
        self._take_up(call, "the replica ended it" if output.finish == "abort" else "tokens were lost on their way")

    def _report(self, message: Stats) -> None:
        now = asyncio.get_running_loop().time()
        self._reports[message.epoch] = (now, message.figures)
        self._past.pop(message.epoch, None)
        for name in [name for name, (told, _) in self._reports.items() if now - told > self._silent]:
            self._past[name] = counts(self._reports.pop(name)[1])
        self.figures = merged([*(figures for _, figures in self._reports.values()), *self._past.values()])
        self.on_report()


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of several replicas as if they were one's: what counts is added, of the rest the first is shown."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merged(name, [part[name] for part in parts if name in part]) for name in names}


def counts(figures: dict[str, Any]) -> dict[str, Any]:
    """What stays of a replica's figures when it is gone."""
    kept = {name: value for name, value in figures.items() if name not in PRESENT}
    return {name: counts(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _merged(name: str, values: list[Any]) -> Any:
    if name == "live":  # of the dashboard: one replica's, and whole
        return values[0]
    if all(isinstance(value, dict) for value in values):
        return merged(values)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return max(values) if name in GREATEST else sum(values)
    return values[0]
