"""What a body says about the form of its output, as one constraint for the engine. Knows fields; compiles nothing."""

from __future__ import annotations

import json
from typing import Any

from verifypd.server.calls import CallError, bad
from verifypd.server.messages import CANNOT, FIELD, GrammarSpec
from verifypd.server.schema import GenerationBody

MOST_BYTES = 32 << 10  # of a constraint
MOST_RULES = 500  # of a Lark grammar


def check(spec: GrammarSpec) -> None:
    """400 for a constraint that is too large to be compiled; the engine finds out whether it can be."""
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise bad(f"{CANNOT}: it holds half of a surrogate pair", FIELD) from None
    if size > MOST_BYTES:
        reason = f"it has {size} bytes; at most {MOST_BYTES} are compiled"
    elif spec.kind == "lark" and spec.text.count(":") > MOST_RULES:
        reason = f"it has more than {MOST_RULES} rules"
    else:
        return
    raise bad(f"{CANNOT}: {reason}", FIELD)


def told(error: CallError, field: str) -> CallError:
    """An error of a constraint, told of the field that it is from."""
    if error.param == FIELD:
        error.param = field
        if field == "tools":
            error.message = error.message.replace(CANNOT, "the parameters of a tool cannot be followed", 1)
    return error


def grammar_of(body: GenerationBody) -> tuple[GrammarSpec | None, str]:
    """The one constraint a body puts on the output, and the field that it is from."""
    form = _from_format(body)
    found = [*([] if form is None else [(FIELD, form)]), *_from_guided(body)]
    if len(found) > 1:
        raise bad(
            "the output is constrained twice: give one of response_format (text.format), structured_outputs, guided_…",
            found[-1][0],
        )
    return (found[0][1], found[0][0]) if found else (None, FIELD)


def _from_format(body: GenerationBody) -> GrammarSpec | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return GrammarSpec("json", '{"type":"object"}')
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise bad("response_format of type json_schema needs json_schema.schema", "response_format")
        return GrammarSpec("json", _dump(form.json_schema.schema_, "response_format"))
    text = form.pattern if form.type == "regex" else form.grammar
    if not text:
        needed = "pattern" if form.type == "regex" else "grammar"
        raise bad(f"response_format of type {form.type} needs {needed}", "response_format")
    return GrammarSpec("regex" if form.type == "regex" else "lark", text)


def _from_guided(body: GenerationBody) -> list[tuple[str, GrammarSpec]]:
    """Each with its field."""
    structured = body.structured_outputs
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "lark", body.guided_grammar),
    ]
    if structured is not None:
        parts = {
            "json": structured.json_,
            "regex": structured.regex,
            "choice": structured.choice,
            "lark": structured.grammar,
        }
        given += [("structured_outputs", kind, value) for kind, value in parts.items()]
        if structured.json_object:
            given.append(("structured_outputs", "json", {"type": "object"}))
    return [(field, _spec(field, kind, value)) for field, kind, value in given if value is not None]


def _spec(field: str, kind: str, value: Any) -> GrammarSpec:
    if kind == "choice":
        if not value or not all(value):
            raise bad("a choice needs at least one option, and none may be empty", field)
        value = json.dumps(value)
    return GrammarSpec(kind, value if isinstance(value, str) else _dump(value, field))


def _dump(schema: Any, name: str) -> str:
    try:
        return json.dumps(schema)
    except (ValueError, RecursionError):
        raise bad(f"{name}: the schema is nested too deeply", name) from None
