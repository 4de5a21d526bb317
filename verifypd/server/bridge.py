"""The API worker's side of the engine: submits calls, hands out what comes back, looks after calls when it dies.

Knows messages and calls; nothing of HTTP, and it never waits for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verifypd.server.calls import Ask, Call, CallError, broken, engine_lost, failed, overdue, unavailable
from verifypd.server.logs import event
from verifypd.server.messages import Abort, Answer, Down, Output, Outputs, Stats, Submit, Switch, ToEngine, Up
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}  # of refusals; others are bad input


class Bridge:
    """All calls of a worker. Runs in the event loop; `take` is called with every message from outside, then `flush`."""

    def __init__(self, worker: int, tokenizer: Tokenizer | None, retries: int) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.retries = retries
        self.calls: dict[int, Call] = {}
        self.up: Up | None = None
        self.lost = False  # the engine will not come back
        self.drained_from = math.inf  # s of the machine's monotonic clock: calls that arrive later are refused
        self.figures: dict[str, Any] = {}
        self.on_idle: Callable[[], None] = lambda: None
        self.on_report: Callable[[], None] = lambda: None  # the engine's figures came, or it went or came back
        # a worker that is started again must not take what the engine had queued for the one before it
        self._numbers = itertools.count(secrets.randbits(40) << 20)
        self._reads: set[asyncio.Future[CallError]] = set()  # what is done around calls; told why all must end
        self._fresh: dict[int, Call] = {}  # calls with tokens nobody has been told of
        self._parked: list[Call] = []  # to be taken up again when the engine is back
        self._switches: dict[int, asyncio.Future[None]] = {}  # of architecture, that wait for the engine's answer
        self._send: Callable[[ToEngine], None] | None = None
        self.connect: Callable[[str], Callable[[ToEngine], None]] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was last up."""
        return self.up.info if self.up else {}

    @property
    def restarts(self) -> int:
        """How often the engine was started again."""
        return self.up.epoch - 1 if self.up else 0

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self.drained_from < math.inf

    @property
    def ready(self) -> bool:
        """Whether new calls are welcome."""
        return self._send is not None and not self.draining

    # -- calls --------------------------------------------------------------------------------------------------------

    async def open(self, name: str, ask: Ask, arrival: float) -> Call:
        """Submit a call and wait until the engine admits it; raises CallError when it is refused."""
        self._check_open(arrival)
        if self._send is None:
            raise unavailable("the engine is not up; try again soon", "engine_down")
        call = Call(next(self._numbers), name, ask, self.tokenizer, arrival)
        self._set_alarm(call)
        self.calls[call.number] = call
        self._submit(call)
        try:
            await call.admitted
        except asyncio.CancelledError:
            self.close(call)
            raise
        except CallError:
            self._forget(call)
            raise
        return call

    @contextlib.contextmanager
    def reading(self, arrival: float) -> Iterator[asyncio.Future[CallError]]:
        """Count what is done around a call, reading its body and writing its answer, as work that is open.

        The future tells when all work must end.
        """
        self._check_open(arrival)
        ended: asyncio.Future[CallError] = asyncio.get_running_loop().create_future()
        self._reads.add(ended)
        try:
            yield ended
        finally:
            self._reads.discard(ended)
            self._check_idle()

    def _check_open(self, arrival: float) -> None:
        if arrival > self.drained_from:
            raise unavailable("the server is shutting down", "draining")

    def close(self, call: Call) -> None:
        """The call is over, whatever state it is in; what still runs of it is aborted."""
        if call.number in self.calls and call.left:
            self._tell(Abort(self.worker, call.number, -1))
        self._forget(call)

    async def switch(self, architecture: str) -> None:
        """Have the engine run under another architecture; raises CallError when it cannot."""
        if self._send is None:
            raise unavailable("the engine is not up; try again soon", "engine_down")
        number = next(self._numbers)
        made = self._switches[number] = asyncio.get_running_loop().create_future()
        try:
            self._tell(Switch(self.worker, number, architecture))
            await made
        finally:
            del self._switches[number]

    def _forget(self, call: Call) -> None:
        self.calls.pop(call.number, None)
        if call.alarm is not None:
            call.alarm.cancel()
        if call in self._parked:
            self._parked.remove(call)
        self._check_idle()

    def drain(self) -> None:
        """Take nothing new: what arrives from here on is refused, what was being read is let in."""
        self.drained_from = time.monotonic()
        self._check_idle()

    def _check_idle(self) -> None:
        if self.draining and not self.calls and not self._reads:
            self.on_idle()

    def fail_all(self, error: CallError) -> None:
        """End every call, and what would become one."""
        for read in self._reads:
            if not read.done():
                read.set_result(error)
        for call in list(self.calls.values()):
            if not call.done:
                call.fail(error)

    def _submit(self, call: Call) -> None:
        """Hand a call to the engine; one that was let in before goes on where it stands."""
        call.tries += 1
        call.sent = time.monotonic()
        self._tell(self._message(call))

    def _message(self, call: Call) -> Submit:
        ask = call.ask
        return Submit(
            self.worker,
            call.number,
            call.name,
            ask.prompts,
            ask.params.n,
            ask.fields,
            ask.seeds,
            call.arrival,
            ask.key,
            ask.bad_words,
            ask.grammar,
            call.take_up() if call.admitted.done() else None,
        )

    def _tell(self, message: ToEngine) -> None:
        if self._send is not None:
            self._send(message)

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self, message: Any) -> None:
        """Act on a message from the engine or the supervisor."""
        if isinstance(message, Outputs):
            if self.up is not None and message.epoch == self.up.epoch and self._send is not None:
                self._outputs(message.outputs)
        elif isinstance(message, Answer):
            if self.up is not None and message.epoch == self.up.epoch:
                self._answer(message)
        elif isinstance(message, Stats):
            self.figures = message.figures
            self.on_report()
        elif isinstance(message, Up):
            self._came_up(message)
            self.on_report()
        elif isinstance(message, Down):
            self._went_down(message)
            self.on_report()

    def _outputs(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            call = self.calls.get(output.call)
            if call is None or call.error is not None:
                continue
            try:
                self._output(call, output, now)
            except Exception:
                log.exception("a call failed", extra={"fields": {"request_id": call.name}})
                call.fail(broken())  # whoever waits for it closes it, which aborts what is left

    def _output(self, call: Call, output: Output, now: float) -> None:
        choice = call.choices[output.choice]
        if choice.finish is not None:
            return  # it ended by a stop string; what came after is not wanted
        if output.tokens:
            call.first_token = call.first_token or now
            call.last_token = now
            if choice.last_token is not None:
                call.gaps.add(now - choice.last_token)
            choice.last_token = now
        if choice.take(output):
            self._tell(Abort(self.worker, call.number, choice.index, "stop"))
        if choice.finish is not None:
            call.left -= 1
            if choice.finish == "error":
                call.fail(failed(call.ask, output.error))
        self._fresh[call.number] = call

    def flush(self) -> None:
        """Pass on what has come. Called when no message is left: a worker that is behind sends fewer, larger events."""
        fresh, self._fresh = self._fresh, {}
        for call in fresh.values():
            call.wake()

    def _answer(self, message: Answer) -> None:
        switch = self._switches.get(message.call)
        if switch is not None and not switch.done():
            if message.status:
                switch.set_exception(_refusal(message))
            else:
                switch.set_result(None)
        call = self.calls.get(message.call)
        if call is None:
            return
        if message.status:
            call.fail(_refusal(message))
        elif not call.admitted.done():
            call.admitted.set_result(None)

    def _came_up(self, message: Up) -> None:
        assert self.connect is not None
        if self.up is not None and self._send is not None and message.epoch == self.up.epoch:
            return
        self.up = message
        self._send = self.connect(message.address)
        parked, self._parked = self._parked, []
        for call in parked:
            tokens = sum(choice.tokens for choice in call.choices)
            event(log, "taken up again", request_id=call.name, tries=call.tries + 1, tokens=tokens)
            self._submit(call)

    def _went_down(self, message: Down) -> None:
        self._send = None
        self.lost = message.final
        for switch in self._switches.values():
            if not switch.done():
                switch.set_exception(engine_lost(message.reason))
        for call in list(self.calls.values()):
            if call.done or (call in self._parked and not message.final):
                continue
            if call.died() > self.retries or message.final:
                call.fail(engine_lost(message.reason))
            else:
                self._parked.append(call)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _set_alarm(self, call: Call) -> None:
        """Watch a call's deadline here too: an engine that hangs, or is none, does not look at its clock."""
        deadline = call.ask.params.deadline_ms
        if deadline is None:
            return
        left = call.arrival + deadline / 1e3 - time.monotonic()  # s
        if left <= 0:
            raise overdue(deadline)
        call.alarm = asyncio.get_running_loop().call_later(left, self._expire, call)

    def _expire(self, call: Call) -> None:
        if call.done:
            return
        if call in self._parked:
            self._parked.remove(call)
        else:
            self._tell(Abort(self.worker, call.number, -1, "deadline"))
        call.expire()


def _refusal(answer: Answer) -> CallError:
    """What the engine refused, as its client is told."""
    return CallError(
        answer.status,
        answer.message,
        kind=KINDS.get(answer.status, "invalid_request_error"),
        code=answer.code or None,
        param=answer.param,
        retry_after=answer.retry_after,
    )
