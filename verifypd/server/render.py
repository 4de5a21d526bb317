"""What answers of OpenAI's API share: objects, stream events, usage, scores. Knows calls; nothing of sockets.

`completion_render` and `chat_render` have what is their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import orjson

from verifypd import __version__
from verifypd.server.ask import Prepared
from verifypd.server.calls import Call, CallError, Choice
from verifypd.server.messages import Scores
from verifypd.server.offsets import Offsets
from verifypd.tokenizer import Tokenizer

T = TypeVar("T")
FINGERPRINT = f"verifypd-{__version__}"
DONE = b"data: [DONE]\n\n"
TURN = 256  # tokens of a prompt whose scores are written down before others have their turn


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def speculation(choice: Choice, max_draft: int) -> dict[str, Any]:
    """What speculation did for one choice, in vLLM's names."""
    spans, drafted, accepted = [*choice.spec, 0, 0, 0][:3]
    positions = choice.spec[5:]
    size = max(max_draft, len(positions))
    reached = [spans, *positions, *[0] * (size - len(positions))]  # spans that accepted at least j
    histogram = [reached[j] - (reached[j + 1] if j + 1 < len(reached) else 0) for j in range(size + 1)]
    return {
        "mean_acceptance_length": 1.0 + accepted / spans if spans else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_steps": spans,
        "num_spec_tokens": size,
    }


class Renderer:
    """What both APIs share: the head of every object, usage, metrics."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, call: Call, prepared: Prepared, model: str, tokenizer: Tokenizer | None, max_draft: int) -> None:
        self.call = call
        self.prepared = prepared
        self.tokenizer = tokenizer
        self.max_draft = max_draft
        self.head = {
            "id": self.prefix + call.name,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        chunk_head = orjson.dumps({**self.head, "object": self.chunk_kind, "system_fingerprint": FINGERPRINT})
        self._open = b"data: " + chunk_head[:-1] + b',"choices":'
        self._shut = (b',"usage":null}' if prepared.include_usage else b"}") + b"\n\n"
        self._written: dict[int, Any] = {}  # scores of a prompt, which all its choices repeat, by prompt
        params = call.ask.params
        self._plain = not (
            prepared.continuous_usage
            or prepared.return_token_ids
            or prepared.tools is not None
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.token_origins
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def usage(self, opening: bool = False) -> dict[str, Any]:
        """Tokens in and out, over all choices; none are out in the `opening` of a stream, whatever has come already."""
        ask, choices = self.call.ask, self.call.choices
        prompt = sum(len(ids) for ids in ask.prompts)
        output = 0 if self.prepared.score_only or opening else sum(choice.tokens for choice in choices)
        cached = sum(choice.spec[4] for choice in choices if len(choice.spec) > 4 and choice.request.choice == 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """Speculation of the whole call, where it has one choice; vLLM leaves it out for more."""
        if len(self.call.choices) != 1 or not self.max_draft:
            return {}
        return {"metrics": {"speculative_decoding": speculation(self.call.choices[0], self.max_draft)}}

    async def whole(self) -> bytes:
        """The answer without a stream. Others have their turns between two choices, of which each may be long."""
        await self.write_scores()
        choices = []
        for choice in self.call.choices:
            choices.append(orjson.Fragment(orjson.dumps(self.choice(choice))))
            await asyncio.sleep(0)
        body = {
            **self.head,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            "usage": self.usage(),
            **self.metrics(),
        }
        return orjson.dumps(body)

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    # -- stream -------------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """What a stream begins with, before any token."""
        return b""

    def news(self) -> bytes:
        """Events for everything that came since the last time."""
        parts = []
        for choice in self.call.choices:
            if choice.reported or (choice.tokens == choice.shown_tokens and choice.finish is None):
                continue
            if not self._unscored(choice):
                parts += self._choice_news(choice)
        return b"".join(parts)

    def _unscored(self, choice: Choice) -> bool:
        """Whether its first event must wait for the scores of its prompt, which come with another choice."""
        if self.call.ask.params.prompt_logprobs is None or choice.shown_tokens:
            return False
        first = self._first(choice)
        return first.prompt_logprobs is None and first.finish is None

    def _choice_news(self, choice: Choice) -> list[bytes]:
        finish = choice.finish
        if self._plain and finish is None and choice.shown_tokens:
            text = choice.new_text()
            choice.shown_tokens = choice.tokens
            return [self._quick(choice.index, text)] if text else []
        deltas = self.deltas(choice, finish)
        choice.reported = finish is not None
        extra: dict[str, Any] = {}
        if self.prepared.continuous_usage:
            extra["usage"] = self.usage()
        elif self.prepared.include_usage:
            extra["usage"] = None
        return [self._event([delta], **extra) for delta in deltas]

    def deltas(self, choice: Choice, finish: str | None) -> list[dict[str, Any]]:
        """What is new of a choice, as one or more entries of `choices`."""
        raise NotImplementedError

    def _quick(self, index: int, text: str) -> bytes:
        """The common event, without building an object."""
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        tail = orjson.dumps(extra)[1:] if extra else b"}"
        return self._open + orjson.dumps(choices) + (b"," if extra else b"") + tail + b"\n\n"

    def closing(self) -> bytes:
        """What a stream ends with."""
        last = b""
        if self.prepared.include_usage:
            last = self._event([], usage=self.usage(), **self.metrics())
        return last + DONE

    @staticmethod
    def told(error: CallError) -> CallError:
        """An error of the call in the words of this API."""
        return error

    def failure(self, error: CallError) -> bytes:
        """What a stream ends with that fails."""
        return sse({**error.body(), "code": error.status}) + DONE

    def _token_ids(self, choice: Choice, start: int) -> dict[str, Any]:
        if not self.prepared.return_token_ids:
            return {}
        prompt = {} if start else {"prompt_token_ids": choice.prompt}
        return {"token_ids": [] if self.prepared.score_only else choice.request.output_ids[start:], **prompt}

    def _token_origins(self, choice: Choice, start: int) -> dict[str, Any]:
        """Who wrote each new token, where it begins in the text, and the texts of drafted tokens that fell there."""
        request = choice.request
        if request.origins is None:
            return {}
        if self.prepared.score_only:
            return {"token_origins": []}
        if choice.origin_offsets is None:
            skip = request.params.skip_special_tokens
            choice.origin_offsets = Offsets(self.tokenizer, choice.prompt, skip, self.text_start(choice))
        offsets = [choice.origin_offsets.take(token) for token in request.output_ids[start:]]
        return {
            "token_origins": [
                {"origin": origin.writer, "text_offset": offset}
                | ({"rejected": self._drafted(origin.rejected)} if origin.rejected else {})
                for origin, offset in zip(request.origins[start:], offsets, strict=False)
            ]
        }

    def _drafted(self, tokens: Sequence[int]) -> str:
        """The text of tokens that were drafted; what is no whole character in it is replaced."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return b"".join(self.tokenizer.token_bytes(token) for token in tokens).decode("utf-8", "replace")

    def text_start(self, choice: Choice) -> int:
        """Characters of the answer before the first output token."""
        return 0

    def _offsets(self, choice: Choice, tokens: Sequence[int]) -> list[int]:
        """Where the next output tokens begin in the text, which may repeat the prompt."""
        if choice.offsets is None:
            params = self.call.ask.params
            begin = self.text_start(choice)
            choice.offsets = Offsets(self.tokenizer, choice.prompt, params.skip_special_tokens, begin)
        return [choice.offsets.take(token) for token in tokens]

    def _prompt_rows(self, choice: Choice) -> list[Scores]:
        """Logprobs of the prompt's tokens from the second on; the first choice of a prompt has them for all."""
        return self._first(choice).prompt_logprobs or []

    def _first(self, choice: Choice) -> Choice:
        """The first choice of the same prompt."""
        return self.call.choices[choice.index - choice.request.choice]

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        if self.call.ask.params.prompt_logprobs is None or self.prepared.echo_scored:
            return {}
        return {"prompt_logprobs": self._prompt_scores(choice)}

    # -- scores of prompts --------------------------------------------------------------------------------------------

    @property
    def unwritten(self) -> list[Choice]:
        """The first choices of prompts whose scores have come and are not written down yet."""
        if self.call.ask.params.prompt_logprobs is None:
            return []
        firsts = self.call.choices[:: self.call.ask.params.n]
        return [first for prompt, first in enumerate(firsts) if first.prompt_logprobs and prompt not in self._written]

    async def write_scores(self) -> None:
        """Write down the scores of prompts that have come. Others have their turns in between: they may be many."""
        while unwritten := self.unwritten:  # others may come meanwhile
            first = unwritten[0]
            writing = self.scores(first)
            while (written := next(writing)) is None:
                await asyncio.sleep(0)
            self._written[first.index // self.call.ask.params.n] = written
            first.prompt_logprobs = []  # a long answer has no use for them twice

    def scores(self, choice: Choice) -> Iterator[Any]:
        """What every choice of a prompt says of its scores, as its answer has it; before that None, again and again."""
        written = [b"[null"]
        for rows in batched(self._prompt_rows(choice), TURN):
            for row in rows:
                entries = {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": spelt(token, self.tokenizer)}
                    for token, value, rank in row
                }
                written.append(orjson.dumps(entries))
            yield None
        written[-1] += b"]"
        yield orjson.Fragment(b",".join(written))

    def _prompt_scores(self, choice: Choice) -> Any:
        """Written down for the first choice of the prompt that needs them."""
        prompt = choice.index // self.call.ask.params.n
        if prompt not in self._written:
            self._written[prompt] = next(made for made in self.scores(choice) if made is not None)
        return self._written[prompt]


def batched(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """So many at a time."""
    return (rows[at : at + size] for at in range(0, len(rows), size))


def spelt(token: int, tokenizer: Tokenizer | None) -> str:
    """A token as text; bytes that are no whole character are written out, so that no two tokens look alike."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
