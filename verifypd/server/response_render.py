"""Answers of `/v1/responses`: the response object, its items, and the events of a stream. Knows calls; no sockets.

Words and calls are found as in chat. A stream and a whole answer build the same items in the same way.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson

from verifypd.server.ask import Prepared
from verifypd.server.calls import Call, CallError, Choice
from verifypd.server.chat_render import ChatRenderer
from verifypd.server.responses import renamed
from verifypd.server.tools import FoundCall
from verifypd.tokenizer import Tokenizer

REASONS = {"length": "max_output_tokens"}  # OpenAI's word for why an answer is not complete; others are ours


class ResponsesRenderer(ChatRenderer):
    """One response. Its items come one after the other: a message is closed before a call begins."""

    prefix = "resp_"

    def __init__(self, call: Call, prepared: Prepared, model: str, tokenizer: Tokenizer | None, max_draft: int) -> None:
        super().__init__(call, prepared, model, tokenizer, max_draft)
        self.output: list[dict[str, Any]] = []  # items, the last of which may be open
        self._given = prepared.given or {}
        self._said: list[str] = []  # text of the open message
        self._scores: list[dict[str, Any]] = []  # logprobs of its tokens
        self._unsaid: list[tuple[int, dict[str, Any]]] = []  # those of tokens not shown yet, and where these begin
        self._speaking = False
        self._sequence = 0

    # -- the answer ---------------------------------------------------------------------------------------------------

    async def whole(self) -> bytes:
        """The answer without a stream."""
        self._advance(self.call.choices[0])
        return orjson.dumps(self._response())

    def opening(self) -> bytes:
        """The response, before any item."""
        begun = self._object("in_progress")
        return self._emit("response.created", response=begun) + self._emit("response.in_progress", response=begun)

    def news(self) -> bytes:
        """Events for everything that came since the last time."""
        choice = self.call.choices[0]
        if choice.reported or (choice.tokens == choice.shown_tokens and choice.finish is None):
            return b""
        return b"".join(self._advance(choice))

    def closing(self) -> bytes:
        """The whole response."""
        made = self._response()
        return self._emit(f"response.{made['status']}", response=made)

    @staticmethod
    def told(error: CallError) -> CallError:
        """See Renderer.told: fields have other names here."""
        return renamed(error)

    def failure(self, error: CallError) -> bytes:
        """The response ends here, with what it has."""
        told = {"code": error.code, "message": error.message}
        events = self._close("incomplete")
        return b"".join([*events, self._emit("response.failed", response=self._object("failed", error=told))])

    def _response(self) -> dict[str, Any]:
        choice = self.call.choices[0]
        if choice.finish == "stop":
            return self._object("completed", usage=self._tokens(), completed_at=int(time.time()), **self.metrics())
        reason = REASONS.get(choice.finish or "", choice.finish)
        return self._object("incomplete", incomplete_details={"reason": reason}, usage=self._tokens(), **self.metrics())

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.head["model"],
            "output": self.output,
            "usage": None,
            **self._given,
            **more,
        }

    def _tokens(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    # -- items --------------------------------------------------------------------------------------------------------

    def _advance(self, choice: Choice) -> list[bytes]:
        """Take in what is new of the answer; returns its events."""
        finish = choice.finish
        start, choice.shown_tokens = choice.shown_tokens, choice.tokens
        self._score(choice, start)
        events = []
        for piece in self.fresh(choice, finish is not None):
            scores = self._scored(piece.end)
            if isinstance(piece.said, str):
                events += self._say(piece.said, scores)
            else:
                events += [*self._close("completed"), *self._call(piece.said)]
        if finish is not None:
            choice.reported = True
            if not self.output:
                events += self._say("", [])  # it said nothing
            scores = self._scored(None)  # of the token that ended it
            self._scores += scores if self._speaking else ()
            events += self._close("completed" if finish == "stop" else "incomplete")
        return events

    def _score(self, choice: Choice, start: int) -> None:
        """Keep the logprobs of new tokens until their text is shown."""
        scores = self._logprobs(choice, start)
        if scores is not None:
            offsets = self._offsets(choice, choice.request.output_ids[start:])
            self._unsaid += zip(offsets, scores["content"], strict=False)

    def _scored(self, end: int | None) -> list[dict[str, Any]]:
        """Logprobs of tokens that begin before this place in the text; None: of all."""
        count = sum(1 for offset, _ in self._unsaid if end is None or offset < end)
        told, self._unsaid = self._unsaid[:count], self._unsaid[count:]
        return [score for _, score in told]

    def _say(self, words: str, scores: list[dict[str, Any]]) -> list[bytes]:
        """Words of the open message, or of a new one, and logprobs of their tokens."""
        events = []
        if not self._speaking:
            item = {"id": _name("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            self.output.append(item)
            self._speaking, self._said, self._scores = True, [], []
            events.append(self._emit("response.output_item.added", **self._place(), item=item))
            events.append(self._emit("response.content_part.added", **self._part(), part=_text("", [])))
        self._said.append(words)
        self._scores += scores
        if words:
            events.append(self._emit("response.output_text.delta", **self._part(), delta=words, logprobs=scores))
        return events

    def _close(self, status: str) -> list[bytes]:
        """End the open message, if there is one."""
        if not self._speaking:
            return []
        self._speaking = False
        text, item = "".join(self._said), self.output[-1]
        part = _text(text, self._scores)
        item |= {"status": status, "content": [part]}
        return [
            self._emit("response.output_text.done", **self._part(), text=text, logprobs=self._scores),
            self._emit("response.content_part.done", **self._part(), part=part),
            self._emit("response.output_item.done", **self._place(), item=item),
        ]

    def _call(self, found: FoundCall) -> list[bytes]:
        """A call, which comes whole."""
        item = {
            "id": _name("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": _name("call"),
            "name": found.name,
            "arguments": "",
        }
        self.output.append(item)
        place = {**self._place(), "item_id": item["id"]}
        events = [
            self._emit("response.output_item.added", **self._place(), item=item),
            self._emit("response.function_call_arguments.delta", **place, delta=found.arguments),
            self._emit("response.function_call_arguments.done", **place, name=found.name, arguments=found.arguments),
        ]
        item |= {"status": "completed", "arguments": found.arguments}
        return [*events, self._emit("response.output_item.done", **self._place(), item=item)]

    def _place(self) -> dict[str, Any]:
        """Where the last item stands."""
        return {"output_index": len(self.output) - 1}

    def _part(self) -> dict[str, Any]:
        """Where the text of the last item stands."""
        return {**self._place(), "item_id": self.output[-1]["id"], "content_index": 0}

    def _emit(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:24]}"


def _text(text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
