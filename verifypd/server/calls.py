"""One HTTP request as the API worker knows it: what it asks, its choices, their text as it arrives, how it failed.

Knows requests and tokenizers; nothing of HTTP or of the engine's whereabouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from verifypd.engine.output import TextOutput
from verifypd.request import Logprob, Request, SamplingParams, State, TokenOrigin
from verifypd.server.messages import Begun, GrammarSpec, Output, Scores
from verifypd.server.offsets import Offsets
from verifypd.server.tools import ToolStream
from verifypd.server.totals import GAP_BUCKETS, Spread
from verifypd.tokenizer import Tokenizer

HEALTHY = 60.0  # s for which a call writes in one engine, after which the deaths of those before are forgotten
CACHED = 4  # place of the cached tokens in `Output.spec`


NOT_WHOLE = "the body did not arrive whole"


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


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> CallError:
    """400."""
    return CallError(400, message, code=code, param=param)


def context_exceeded(limit: int, prompt: int, output: int, param: str) -> CallError:
    """400 for more tokens than the model has room for, in OpenAI's words: clients look for them.

    `param`: the field of the prompt, which is also what it is called.
    """
    return bad(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + output} tokens"
        f" ({prompt} in the {param}, {output} in the completion). Please reduce the length of the {param} or"
        " completion.",
        param,
        "context_length_exceeded",
    )


def unavailable(message: str, code: str, retry_after: int = 1) -> CallError:
    """503: not now."""
    return CallError(503, message, kind="service_unavailable", code=code, retry_after=retry_after)


def overdue(deadline_ms: float) -> CallError:
    """429: the deadline passed before the engine let the call in."""
    return CallError(
        429,
        f"deadline_ms={deadline_ms:g} passed before the engine took the request",
        kind="rate_limit_error",
        code="deadline_unreachable",
        param="deadline_ms",
        retry_after=1,
    )


def engine_lost(reason: str) -> CallError:
    """500: the engine died under a request, and none is there to go on with it, or it has died under it too often."""
    return CallError(
        500, f"the engine stopped ({reason}); send the request again", kind="server_error", code="engine_lost"
    )


def broken() -> CallError:
    """500: something went wrong here."""
    return CallError(500, "the server failed on this request", kind="server_error", code="internal_error")


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
        self.prompt_logprobs: list[Scores] | None = None
        self.spec: list[int] = []
        self.spec_before: list[int] = []  # of engines that died under it
        self.last_token: float | None = None  # s, when the latest came
        self.finish: str | None = None
        self.shown = 0  # characters the client has
        self.shown_tokens = 0
        self.offsets: Offsets | None = None  # of the tokens whose logprobs the client has
        self.origin_offsets: Offsets | None = None  # of the tokens whose origins the client has
        self.reported = False  # the client was told that it ended
        self.tools: ToolStream | None = None  # its text split into words and calls, where the call has tools

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return self.request.output_len

    def take(self, output: Output) -> bool:
        """Add what a step gave. True when a stop string was found: the engine must be told to stop."""
        request = self.request
        request.tokens.extend(output.tokens)
        if output.logprobs is not None and request.logprobs is not None:
            request.logprobs.extend(table(row) for row in output.logprobs)
        if output.origins is not None and request.origins is not None:
            request.origins.extend(TokenOrigin(writer, rejected) for writer, rejected in output.origins)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.spec = added(self.spec_before, output.spec)
        if output.finish is not None:
            self.end(output.finish, output.stop_reason)
        stopped = self.text.update()
        if stopped:
            self.end("stop", self.text.stopped_by)
        return stopped and output.finish is None

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Nothing more comes."""
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
        self.arrival = arrival
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.gaps = Spread(GAP_BUCKETS)  # between two arrivals of tokens of a choice
        self.tries = 0  # engines it was given to
        self.sent = 0.0  # s, when it was given to the last
        self._deaths = 0  # of engines, since one had it for long
        self.error: CallError | None = None
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices = [Choice(ask, i, tokenizer) for i in range(ask.choices)]
        self.left = ask.choices
        self.alarm: asyncio.TimerHandle | None = None  # rings at its deadline
        self.sink: Callable[[], bool] | None = None  # takes news at once, where it can
        self._waiter: asyncio.Future[None] | None = None
        self._news = False

    @property
    def done(self) -> bool:
        """Whether every choice has ended, or the call failed."""
        return self.error is not None or not self.left

    def take_up(self) -> list[Begun]:
        """Where another engine must go on. What is known of text, stop strings and tool calls stays as it is here."""
        still = [choice for choice in self.choices if choice.finish is None]
        for choice in still:
            choice.spec_before = choice.spec
        return [Begun(choice.index, choice.request.output_ids) for choice in still]

    def died(self) -> int:
        """Its engine was lost; returns how many were in a row. One that it wrote in for long begins a new row."""
        if self.last_token is not None and self.last_token - self.sent >= HEALTHY:
            self._deaths = 0
        self._deaths += 1
        return self._deaths

    def wake(self) -> None:
        """There is something new: for whoever waits, unless the sink takes it."""
        waiting = self._waiter is not None and not self._waiter.done()  # all that came before is out
        if waiting and self.sink is not None and not self.done and self.sink():
            return
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

    def expire(self) -> None:
        """End the call because its deadline has passed: with what has come, or refused where it was not let in."""
        if not self.admitted.done():
            self.fail(overdue(self.ask.params.deadline_ms or 0.0))
            return
        for choice in self.choices:
            if choice.finish is None:
                choice.end("deadline")
                choice.text.update()
        self.left = 0
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


def failed(ask: Ask, grammar_error: str | None = None) -> CallError:
    """A request that ended in an error: its own fault where it can have forbidden every token."""
    if grammar_error is not None:
        text = f"the output format took too much work to follow: {grammar_error}; make it simpler"
        return CallError(400, text, code="format_too_complex", param="response_format")
    if ask.grammar is not None or {"allowed_token_ids", "bad_words", "logit_bias", "min_tokens"} & set(ask.fields):
        return CallError(400, "no token is left that this request allows", code="nothing_allowed")
    return CallError(500, "the request failed in the engine", kind="server_error", code="engine_error")


def added(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Totals of a choice's speculation over two engines, as `Output.spec` has them."""
    if not before:
        return list(now)
    both = [sum(pair) for pair in zip_longest(before, now, fillvalue=0)]
    both[CACHED] = before[CACHED]  # of the prompt; the second engine looked for the output too
    return both


def table(row: Scores) -> dict[int, Logprob]:
    """Logprobs at one position by token."""
    return {token: Logprob(value, rank) for token, value, rank in row}
