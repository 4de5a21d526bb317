"""Answers of `/v1/chat/completions`: messages, tool calls and their logprobs. Knows calls; nothing of sockets."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from verifypd.request import Logprob
from verifypd.server.calls import Choice
from verifypd.server.render import Renderer
from verifypd.server.tools import FoundCall, Piece, ToolStream, calls_of, words_of
from verifypd.tokenizer import Tokenizer


class ChatRenderer(Renderer):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def _tools(self, choice: Choice) -> ToolStream | None:
        """Where a choice's text is split."""
        form = self.prepared.tools
        if form is not None and choice.tools is None:
            choice.tools = ToolStream(form, self.prepared.tool_names, one=self.prepared.one_tool_call)
        return choice.tools

    def fresh(self, choice: Choice, last: bool) -> list[Piece]:
        """Words and calls of a choice that have not been shown; `last`: no more will come."""
        text, stream = choice.new_text(), self._tools(choice)
        if stream is not None:
            return stream.push(text, last)
        return [Piece(text, choice.shown)] if text else []

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        pieces = self.fresh(choice, last=True)
        text, calls = words_of(pieces), calls_of(pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = _tool_calls(calls, 0, stream=False)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice, 0),
            "finish_reason": "tool_calls" if calls and choice.finish == "stop" else choice.finish,
            "stop_reason": choice.request.stop_reason,
            **self._prompt_logprobs(choice),
            **self._token_ids(choice, 0),
            **self._token_origins(choice, 0),
        }

    def opening(self) -> bytes:
        """Each choice says who speaks."""
        delta = {"role": "assistant", "content": ""}
        extra: dict[str, Any] = {}
        if self.prepared.include_usage:
            extra["usage"] = self.usage(opening=True) if self.prepared.continuous_usage else None
        return b"".join(
            self._event([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}], **extra)
            for choice in self.call.choices
        )

    def deltas(self, choice: Choice, finish: str | None) -> list[dict[str, Any]]:
        """What is new of a choice."""
        start, choice.shown_tokens = choice.shown_tokens, choice.tokens
        stream = self._tools(choice)
        before = stream.calls if stream is not None else 0
        pieces = self.fresh(choice, finish is not None)
        text, calls = words_of(pieces), calls_of(pieces)
        if finish == "stop" and stream is not None and stream.calls:
            finish = "tool_calls"
        logprobs = self._logprobs(choice, start)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = _tool_calls(calls, before, stream=True)
        quiet = not (self.prepared.continuous_usage or self.prepared.return_token_ids or choice.request.origins)
        prompt = self._prompt_logprobs(choice) if not start else {}
        if not (delta or prompt) and finish is None and logprobs is None and quiet:
            return []
        entry = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **prompt}
        if finish is not None:
            entry["stop_reason"] = choice.request.stop_reason
        return [entry | self._token_ids(choice, start) | self._token_origins(choice, start)]

    def _quick(self, index: int, text: str) -> bytes:
        return b"".join(
            (
                self._open,
                b'[{"index":%d,"delta":{"content":' % index,
                orjson.dumps(text),
                b'},"logprobs":null,"finish_reason":null}]' + self._shut,
            )
        )

    def _logprobs(self, choice: Choice, start: int) -> dict[str, Any] | None:
        if self.prepared.logprobs is None:
            return None
        rows = zip(choice.request.output_ids[start:], (choice.request.logprobs or [])[start:], strict=False)
        content = []
        for token, row in rows:
            ranked = sorted(row.items(), key=lambda item: item[1].rank)[: self.prepared.logprobs]
            top = [_chat_entry(other, entry, self.tokenizer) for other, entry in ranked]
            content.append({**_chat_entry(token, row[token], self.tokenizer), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _tool_calls(calls: Sequence[FoundCall], before: int, *, stream: bool) -> list[dict[str, Any]]:
    made = []
    for index, call in enumerate(calls, before):
        entry: dict[str, Any] = {"index": index} if stream else {}
        entry |= {
            "id": "call_" + uuid.uuid4().hex[:24],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        made.append(entry)
    return made


def _chat_entry(token: int, entry: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token) if tokenizer else b""
    return {"token": raw.decode("utf-8", "replace"), "logprob": entry.logprob, "bytes": list(raw)}
