"""Tool calls in model output: how a chat template writes them, finding them in text as it grows, forcing one.

Knows the formats of a few model families; nothing of requests or of HTTP.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urldefrag, urljoin

from verifypd.errors import RequestError
from verifypd.server.messages import GrammarSpec
from verifypd.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call the model wrote."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Piece:
    """Words, or a call, in the order in which the model wrote them."""

    said: str | FoundCall
    end: int  # characters of the text up to its end


def words_of(pieces: Sequence[Piece]) -> str:
    """All words."""
    return "".join(piece.said for piece in pieces if isinstance(piece.said, str))


def calls_of(pieces: Sequence[Piece]) -> list[FoundCall]:
    """All calls."""
    return [piece.said for piece in pieces if isinstance(piece.said, FoundCall)]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`begin` JSON `end`; with neither, the whole output is the JSON of one call."""

    begin: str
    end: str
    arguments: str  # key of the arguments
    special: bool = False  # the markers are special tokens, which text usually leaves out
    many: bool = False  # the JSON is a list of calls

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ToolFormat | None:
        """Read off the model's chat template; None where it knows no tools, or writes calls in another way."""
        if tokenizer is None:
            return None
        source = "\n".join(tokenizer.chat_template.sources.values())
        if "tools" not in source or "<function=" in source:
            return None
        if "<tool_call>" in source:
            return cls("<tool_call>", "</tool_call>", "arguments", _special(tokenizer, "<tool_call>"))
        if "[TOOL_CALLS]" in source:
            return cls("[TOOL_CALLS]", "", "arguments", _special(tokenizer, "[TOOL_CALLS]"), many=True)
        return cls("", "", "parameters" if '"parameters"' in source else "arguments")

    def grammar(self, tools: Sequence[Any], name: str) -> GrammarSpec:
        """A grammar under which the output is one call: of the tool `name`, or of any."""
        functions = [tool.function for tool in tools if not name or tool.function.name == name]
        schema = self._schema(functions, {function.name for function in functions})
        if self.many:
            schema["maxItems"] = 1
        if not self.begin:
            return GrammarSpec("json", json.dumps(schema))
        parts = [self._mark(self.begin), '"\\n"?' if self.end else "", "call"]
        parts += ['"\\n"?', self._mark(self.end)] if self.end else []
        return GrammarSpec("tool", f"start: {' '.join(filter(None, parts))}\ncall: %json {json.dumps(schema)}\n")

    def strict_grammar(self, tools: Sequence[Any]) -> GrammarSpec | None:
        """A grammar for words and calls in any order, under which calls of strict functions follow their schemas.

        None where nothing marks a call: then words cannot be told from one before it is whole.
        """
        if not self.begin:
            return None
        functions = [tool.function for tool in tools]
        schema = self._schema(functions, {function.name for function in functions if function.strict})
        special = self.special and self.begin.startswith("<")
        words = f"words: TEXT {self.begin}" if special else f"words[lazy]: TEXT {json.dumps(self.begin)}"
        end = f'"\\n"? {self._mark(self.end)}' if self.end else ""
        rules = [
            "start: tool* rest" if self.end else "start: tool | rest",
            "rest: TEXT",
            f'tool: words "\\n"? call {end}',
            words,
            r"TEXT: /(.|\n)*/",
            f"call: %json {json.dumps(schema)}",
        ]
        return GrammarSpec("tool", "\n".join(rules) + "\n")

    def _schema(self, functions: Sequence[Any], strict: Container[str]) -> dict[str, Any]:
        """Of the JSON of a call; arguments of functions that are not strict may be any object."""
        taken: set[str] = set()  # names of schemas
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    self.arguments: _own(function, index, taken) if function.name in strict else {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for index, function in enumerate(functions)
        ]
        schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if self.many:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return schema

    def _mark(self, text: str) -> str:
        return text if self.special and text.startswith("<") else json.dumps(text)

    def read(self, text: str) -> list[FoundCall] | None:
        """The calls in the JSON between two markers; None when it is none."""
        try:
            value = json.loads(text, parse_float=_finite)
        except (ValueError, RecursionError):
            return None
        found = []
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            given = {"arguments", self.arguments} & call.keys()
            if not given and not self.begin:
                return None  # any JSON with a name
            arguments = _arguments(call.get(self.arguments, call.get("arguments")))
            if arguments is None:
                return None
            found.append(FoundCall(call["name"], arguments))
        return found or None


def _own(function: Any, index: int, taken: set[str]) -> dict[str, Any]:
    """The schema of a function's arguments as a document of its own: `#` in its references stays the schema itself.

    It keeps its own name, made absolute, unless another function's has it or it is none. `$schema` goes: a version
    that does not know `$id` would undo all this.
    """
    none: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # as OpenAI has it
    schema = dict(none if function.parameters is None else function.parameters or {"type": "object"})
    schema.pop("$schema", None)
    kinds = schema.get("type", "object")
    if kinds != "object" and (not isinstance(kinds, list) or "object" not in kinds):
        raise RequestError(f"tool {function.name!r}: parameters are those of an object, not {kinds!r}", param="tools")
    schema["type"] = "object"
    base, given = f"https://function.invalid/{index}/", schema.get("$id")
    try:
        name = urljoin(base, urldefrag(given).url) if isinstance(given, str) else base
    except ValueError:
        name = base
    schema["$id"] = base if name in taken else name
    taken.add(name)
    return schema


def _arguments(value: Any) -> str | None:
    """A call's arguments as the JSON of an object, {} where there are none; None where they are anything else."""
    try:
        if isinstance(value, str):
            value = json.loads(value, parse_float=_finite) if value.strip() else None
        value = {} if value is None else value
        return _json(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    """A number that JSON can say again."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _json(value: Any) -> str:
    """Readable JSON, or escaped where the text holds half of a surrogate pair, which no UTF-8 can carry."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _special(tokenizer: Tokenizer, text: str) -> bool:
    index = tokenizer.token_id(text)
    return index is not None and index in tokenizer.special_ids


class ToolStream:
    """Splits text into words for the user and calls. What might begin a call is held back until that is decided."""

    def __init__(self, form: ToolFormat, names: Sequence[str], one: bool = False) -> None:
        """`one`: nothing is shown after the first call."""
        self.form = form
        self.names = frozenset(names)
        self.one = one
        self.calls = 0
        self._held = ""
        self._end = 0  # characters of the text before what is held
        self._inside = False
        self._blank: str | None = None  # white space since the last call: said when words follow it

    def push(self, text: str, last: bool) -> list[Piece]:
        """New words and new calls; `last`: the text is complete."""
        self._held += text
        made = self._marked(last) if self.form.begin else self._whole(last)
        self.calls += len(calls_of(made))
        return made

    def _marked(self, last: bool) -> list[Piece]:
        """Calls that stand between marks."""
        made: list[Piece] = []
        while not (self.one and (self.calls or calls_of(made))):
            if not self._inside:
                at = self._held.find(self.form.begin)
                keep = _overlap(self._held, self.form.begin) if at < 0 and not last else 0
                made += self._say(self._take(len(self._held) - keep if at < 0 else at))
                if at < 0:
                    return made
                self._take(len(self.form.begin))
                self._inside = True
            end = self._held.find(self.form.end) if self.form.end else -1
            if end < 0 and not last:
                return made
            body = self._take(len(self._held) if end < 0 else end)
            mark = self._take(len(self.form.end) if end >= 0 else 0)
            calls = self._known(body)
            if calls:
                made += [Piece(call, self._end) for call in calls]
                self._blank = ""
            else:
                made += self._say(self.form.begin + body + mark)
            self._inside = False
            if end < 0:
                return made
        self._take(len(self._held))
        return made

    def _take(self, size: int) -> str:
        """The next characters of what is held, which is held no more."""
        taken, self._held = self._held[:size], self._held[size:]
        self._end += size
        return taken

    def _say(self, text: str) -> list[Piece]:
        """Words for the user. White space between calls, and after the last, is none."""
        if self._blank is not None:
            text, self._blank = self._blank + text, None
            if not text.strip():
                text, self._blank = "", text
        return [Piece(text, self._end)] if text else []

    def _whole(self, last: bool) -> list[Piece]:
        """The call that is all there is."""
        if self._held.lstrip()[:1] in ("", "{", "[") and not last:
            return []
        text = self._take(len(self._held))
        calls = self._known(text) if last else []
        return [Piece(call, self._end) for call in calls] or ([Piece(text, self._end)] if text else [])

    def _known(self, body: str) -> list[FoundCall]:
        calls = self.form.read(body.strip()) or []
        known = calls if all(call.name in self.names for call in calls) else []
        return known[:1] if self.one else known


def _overlap(text: str, mark: str) -> int:
    """How much of the end of `text` might be the start of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
