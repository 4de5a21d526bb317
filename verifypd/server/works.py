"""What is done with the body of a request, by name: from bytes to what the routes need. Knows bodies; no sockets.

The same works are done in the API worker, for bodies FastAPI has read there, and in the reader's process, for large
ones, which are read there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError

from verifypd.server import ask as asking
from verifypd.server.calls import CallError, bad
from verifypd.server.responses import ResponsesBody, chat_body, renamed, repeated
from verifypd.server.schema import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from verifypd.server.tools import ToolFormat
from verifypd.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Desk:
    """What a work needs beside the body."""

    limits: asking.Limits
    tokenizer: Tokenizer | None
    tool_format: ToolFormat | None
    key: int = 0  # which API key

    @property
    def words(self) -> Tokenizer:
        """The tokenizer, for works that are about nothing else."""
        if self.tokenizer is None:
            raise CallError(404, "this model has no tokenizer here", code="no_tokenizer")
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class Done:
    """A work's result, and what its body says about itself."""

    model: str | None
    request_id: str | None
    value: Any


def completion(body: CompletionBody, desk: Desk) -> asking.Prepared:
    """A call of `/v1/completions`."""
    return asking.completion(body, desk.limits, desk.tokenizer, desk.key)


def chat(body: ChatBody, desk: Desk) -> asking.Prepared:
    """A call of `/v1/chat/completions`."""
    return asking.chat(body, desk.limits, desk.tokenizer, desk.tool_format, desk.key)


def responses(body: ResponsesBody, desk: Desk) -> asking.Prepared:
    """A call of `/v1/responses`: the same call of chat, and what its answer repeats."""
    if isinstance(body.input, list) and body.truncate_prompt_tokens is None:
        asking.check_count(len(body.input), desk.limits, "input")
    asked = chat_body(body)
    try:
        made = asking.chat(asked, desk.limits, desk.tokenizer, desk.tool_format, desk.key, param="input")
        return replace(made, given=repeated(body, desk.limits))
    except CallError as error:
        raise renamed(error) from None


def tokenize(body: TokenizeBody, desk: Desk) -> bytes:
    """The answer of `/tokenize`."""
    if (body.prompt is None) == (not body.messages):
        raise bad("give prompt or messages", "prompt")
    words = desk.words
    ids = asking.token_ids(body, words, desk.limits)
    strings = [words.token(index) for index in ids] if body.return_token_strs else None
    longest = desk.limits.max_model_len
    return orjson.dumps({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})


def detokenize(body: DetokenizeBody, desk: Desk) -> bytes:
    """The answer of `/detokenize`."""
    words, longest = desk.words, desk.limits.max_model_len
    if len(body.tokens) >= longest:
        what = f"{len(body.tokens)} tokens: send fewer than {longest} at a time, as many as a prompt may have"
        raise bad(what, "tokens", "context_length_exceeded")
    asking.check_tokens(body.tokens, desk.limits, "tokens")
    return orjson.dumps({"prompt": words.decode(body.tokens, skip_special_tokens=False)})


WORKS: dict[str, tuple[type[Body], Callable[[Any, Desk], Any]]] = {
    "completion": (CompletionBody, completion),
    "chat": (ChatBody, chat),
    "responses": (ResponsesBody, responses),
    "tokenize": (TokenizeBody, tokenize),
    "detokenize": (DetokenizeBody, detokenize),
}


def do(work: str, body: Any, desk: Desk) -> Any:
    """The result of a work on a body; raises CallError for what is wrong with it."""
    return WORKS[work][1](body, desk)


def read_and_do(work: str, data: bytes, desk: Desk) -> Done:
    """The same for a body that nobody has looked at yet."""
    try:
        body: Any = WORKS[work][0].model_validate(orjson.loads(data))
    except orjson.JSONDecodeError:
        raise invalid([{"type": "json_invalid"}]) from None
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False, include_context=False)) from None
    return Done(body.model, getattr(body, "request_id", None), do(work, body, desk))


def invalid(errors: Sequence[Any]) -> CallError:
    """400 for a body of the wrong form: what is wrong with its first wrong field.

    Where that may be one of several things, it is held to the one that went furthest.
    """
    places = [[str(part) for part in error.get("loc", ()) if part != "body"] for error in errors]
    same = [index for index, place in enumerate(places) if place[:1] == places[0][:1]]
    chosen = max(same, key=lambda index: len(places[index]))
    first, place = errors[chosen], places[chosen]
    field = place[0] if place else None
    if first["type"] == "json_invalid":
        return bad("the body is not valid JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return bad(f"unknown field {'.'.join(place)[:200]!r}", field, "unknown_parameter")
    code = "unsupported_parameter" if first["type"] == "unsupported_parameter" else "invalid_value"
    why = first["msg"].removeprefix("Value error, ")
    what = f"{'.'.join(place)[:200]}: {why}" if place else f"the body: {why}"
    return bad(what[:500], field, code)
