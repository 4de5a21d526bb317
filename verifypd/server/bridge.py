"""The API worker's side of the engine: calls, their text as it arrives, and what becomes of them when the engine dies.

Knows messages, requests and tokenizers; nothing of HTTP, and it never waits for the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifypd.engine.output import TextOutput
from verifypd.request import Logprob, Request, SamplingParams
from verifypd.server.logs import event
from verifypd.server.messages import (
    Abort,
    Answer,
    Down,
    GrammarSpec,
    Output,
    Outputs,
    Stats,
    Submit,
    ToEngine,
    Up,
)
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class CallError(Exception):
    """A call cannot go on: an HTTP status, and OpenAI's error fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients expect it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unavailable(message: str, code: str, retry_after: int = 1) -> CallError:
    """503: not now."""
    return CallError(503, message, kind="service_unavailable", code=code, retry_after=retry_after)


def engine_lost(reason: str) -> CallError:
    """500: the engine died under a request that had begun to answer."""
    return CallError(
        500, f"the engine stopped ({reason}); send the request again", kind="server_error", code="engine_lost"
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """What a call asks of the engine."""

    prompts: list[list[int]]
    params: SamplingParams  # n is the call's
    seeds: list[int]
    key: int = 0
    bad_words: list[list[int]] = field(default_factory=list)
    grammar: GrammarSpec | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, for the message

    @property
    def choices(self) -> int:
        """Prompts × n."""
        return len(self.prompts) * self.params.n


class Choice:
    """One continuation, as the API knows it: tokens confirmed so far, and their text."""

    def __init__(self, ask: Ask, index: int, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.prompt = ask.prompts[index // ask.params.n]
        self.request = Request("", self.prompt, ask.params, seed=0, max_length=0, choice=index % ask.params.n)
        self.text = TextOutput(self.request, tokenizer)
        self.prompt_logprobs: list[dict[int, Logprob]] | None = None
        self.spec: list[int] = []
        self.finish: str | None = None
        self.shown = 0  # characters the client has
        self.shown_tokens = 0
        self.reported = False  # the client was told that it ended

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return self.request.output_len

    def take(self, output: Output) -> bool:
        """Add what a step gave. True when a stop string was found: the engine must be told to stop."""
        request = self.request
        request.tokens.extend(output.tokens)
        if output.logprobs is not None and request.logprobs is not None:
            request.logprobs.extend(_table(row) for row in output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [_table(row) for row in output.prompt_logprobs]
        self.spec = output.spec
        if output.finish is not None:
            self._end(output.finish, output.stop_reason)
        stopped = self.text.update()
        if stopped:
            self._end("stop", self.text.stopped_by)
        return stopped and output.finish is None

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        from verifypd.request import State

        self.request.state = State.FINISHED
        self.request.finish_reason = self.finish = reason
        self.request.stop_reason = stop_reason

    def new_text(self) -> str:
        """Text to show that has not been shown."""
        visible = self.text.visible()
        new = visible[self.shown :]
        self.shown = len(visible)
        return new


class Call:
    """One HTTP request and its choices."""

    def __init__(self, number: int, name: str, ask: Ask, tokenizer: Tokenizer | None, arrival: float) -> None:
        self.number = number
        self.name = name
        self.ask = ask
        self.tokenizer = tokenizer
        self.arrival = arrival
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.tries = 0
        self.sent = False  # the client has seen a token
        self.error: CallError | None = None
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices: list[Choice] = []
        self._waiter: asyncio.Future[None] | None = None
        self._news = False
        self.restart()

    def restart(self) -> None:
        """Forget everything that came."""
        self.choices = [Choice(self.ask, i, self.tokenizer) for i in range(self.ask.choices)]
        self.left = self.ask.choices
        self.first_token = self.last_token = None

    @property
    def done(self) -> bool:
        """Whether every choice has ended, or the call failed."""
        return self.error is not None or not self.left

    def wake(self) -> None:
        """There is something new."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: CallError) -> None:
        """End the call with an error."""
        self.error = error
        if not self.admitted.done():
            self.admitted.set_exception(error)
            self.admitted.exception()  # whoever waits raises it; nobody may wait
        self.wake()

    async def news(self) -> None:
        """Wait until something has come since the last time."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._news = False
        if self.error is not None:
            raise self.error


class Bridge:
    """All calls of a worker. Runs in the event loop; `take` is called with every message from outside."""

    def __init__(self, worker: int, tokenizer: Tokenizer | None, retries: int) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.retries = retries
        self.calls: dict[int, Call] = {}
        self.up: Up | None = None
        self.lost = False  # the engine will not come back
        self.draining = False
        self.figures: dict[str, Any] = {}
        self.on_idle: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self._parked: list[Call] = []  # to be tried again when the engine is back
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
    def ready(self) -> bool:
        """Whether new calls are welcome."""
        return self._send is not None and not self.draining

    # -- calls --------------------------------------------------------------------------------------------------------

    async def open(self, name: str, ask: Ask, arrival: float) -> Call:
        """Submit a call and wait until the engine admits it; raises CallError when it is refused."""
        if self.draining:
            raise unavailable("the server is shutting down", "draining")
        if self._send is None:
            raise unavailable("the engine is not up; try again soon", "engine_down")
        call = Call(next(self._numbers), name, ask, self.tokenizer, arrival)
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

    def close(self, call: Call) -> None:
        """The call is over, whatever state it is in; what still runs of it is aborted."""
        if call.number in self.calls and call.left:
            self._tell(Abort(self.worker, call.number, -1))
        self._forget(call)

    def _forget(self, call: Call) -> None:
        self.calls.pop(call.number, None)
        if call in self._parked:
            self._parked.remove(call)
        if self.draining and not self.calls:
            self.on_idle()

    def drain(self) -> None:
        """Take nothing new."""
        self.draining = True
        if not self.calls:
            self.on_idle()

    def fail_all(self, error: CallError) -> None:
        """End every call."""
        for call in list(self.calls.values()):
            if not call.done:
                call.fail(error)

    def _submit(self, call: Call) -> None:
        ask = call.ask
        call.tries += 1
        message = Submit(
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
        )
        self._tell(message)

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
        elif isinstance(message, Up):
            self._came_up(message)
        elif isinstance(message, Down):
            self._went_down(message)

    def _outputs(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            call = self.calls.get(output.call)
            if call is None or call.error is not None:
                continue
            choice = call.choices[output.choice]
            if choice.finish is not None:
                continue  # it ended by a stop string; what came after is not wanted
            if output.tokens:
                call.first_token = call.first_token or now
                call.last_token = now
            if choice.take(output):
                self._tell(Abort(self.worker, call.number, choice.index, "stop"))
            if choice.finish is not None:
                call.left -= 1
                if choice.finish == "error":
                    call.fail(_failed(call.ask))
            call.wake()

    def _answer(self, message: Answer) -> None:
        call = self.calls.get(message.call)
        if call is None:
            return
        if not message.status:
            if not call.admitted.done():
                call.admitted.set_result(None)
            return
        kind = "rate_limit_error" if message.status == 429 else "invalid_request_error"
        call.fail(
            CallError(
                message.status,
                message.message,
                kind=kind,
                code=message.code or None,
                param=message.param,
                retry_after=message.retry_after,
            )
        )

    def _came_up(self, message: Up) -> None:
        assert self.connect is not None
        if self.up is not None and self._send is not None and message.epoch == self.up.epoch:
            return
        self.up = message
        self._send = self.connect(message.address)
        parked, self._parked = self._parked, []
        for call in parked:
            event(log, "trying again", request_id=call.name, tries=call.tries + 1)
            self._submit(call)

    def _went_down(self, message: Down) -> None:
        self._send = None
        self.lost = message.final
        for call in list(self.calls.values()):
            if call.done or call in self._parked:
                continue
            if call.sent or call.tries > self.retries or message.final:
                call.fail(engine_lost(message.reason))
            else:
                call.restart()
                self._parked.append(call)


def _failed(ask: Ask) -> CallError:
    """A request that ended in an error: its own fault where it can have forbidden every token."""
    if ask.grammar is not None or {"allowed_token_ids", "bad_words", "logit_bias", "min_tokens"} & set(ask.fields):
        return CallError(400, "no token is left that this request allows", code="nothing_allowed")
    return CallError(500, "the request failed in the engine", kind="server_error", code="engine_error")


def _table(row: Sequence[tuple[int, float, int]]) -> dict[int, Logprob]:
    return {token: Logprob(value, rank) for token, value, rank in row}
