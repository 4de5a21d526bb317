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


def format_field(body: GenerationBody) -> str:
    """The field of a body that constrains the output."""
    fields = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in fields if getattr(body, name) is not None), FIELD)


def told(error: CallError, field: str) -> CallError:
    """An error of a constraint, told of the field that it is from."""
    if error.param == FIELD:
        error.param = field
        if field == "tools":
            error.message = error.message.replace(CANNOT, "the parameters of a tool cannot be followed", 1)
    return error


def grammar_of(body: GenerationBody) -> GrammarSpec | None:
    """The one constraint a body puts on the output."""
    found = [spec for spec in (_from_format(body), *_from_guided(body)) if spec is not None]
    if len(found) > 1:
        raise bad(
            "the output is constrained twice: give one of response_format (text.format), structured_outputs, guided_…",
            "response_format",
        )
    return found[0] if found else None


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


def _from_guided(body: GenerationBody) -> list[GrammarSpec | None]:
    structured = body.structured_outputs
    schemas = [("guided_json", body.guided_json)]
    regexes, choices, grammars = [body.guided_regex], [body.guided_choice], [body.guided_grammar]
    found: list[GrammarSpec | None] = []
    if structured is not None:
        schemas.append(("structured_outputs", structured.json_))
        regexes.append(structured.regex)
        choices.append(structured.choice)
        grammars.append(structured.grammar)
        if structured.json_object:
            found.append(GrammarSpec("json", '{"type":"object"}'))
    for name, schema in schemas:
        if schema is not None:
            found.append(GrammarSpec("json", schema if isinstance(schema, str) else _dump(schema, name)))
    found += [GrammarSpec("regex", text) for text in regexes if text is not None]
    found += [GrammarSpec("lark", text) for text in grammars if text is not None]
    for options in choices:
        if options is not None:
            if not options or not all(options):
                raise bad("a choice needs at least one option, and none may be empty", "guided_choice")
            found.append(GrammarSpec("choice", json.dumps(options)))
    return found


def _dump(schema: Any, name: str) -> str:
    try:
        return json.dumps(schema)
    except (ValueError, RecursionError):
        raise bad(f"{name}: the schema is nested too deeply", name) from None
