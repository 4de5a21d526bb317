"""The page /docs: the OpenAPI document as plain HTML. It needs no script and nothing from another host."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#8882}"
    "table{border-collapse:collapse}td{border-top:1px solid #8884;padding:.2em .8em;vertical-align:top}"
    "summary{cursor:pointer;margin:.4em 0}details{overflow-x:auto}"
)


def page(document: dict[str, Any]) -> str:
    """The whole page."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">/openapi.json</a>.</p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(document, f"{method.upper()} {path}", operation)
    parts.append("<h2>Shapes</h2><p>What fields above have as their kind.</p>")
    for name, schema in document["components"]["schemas"].items():
        if "properties" in schema:
            parts.append(
                f"<details><summary><code>{escape(name)}</code></summary>{_fields(document, schema)}</details>"
            )
    return "\n".join(parts)


def _operation(document: dict[str, Any], name: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        yield f"<details><summary>body</summary>{_fields(document, body)}</details>"
    answers = "".join(
        f"<tr><td>{status}</td><td>{escape(answer.get('description', ''))}</td></tr>"
        for status, answer in sorted(operation["responses"].items())
    )
    yield f"<details><summary>answers</summary><table>{answers}</table></details>"


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """A table of the fields of an object."""
    whole = _resolved(document, schema)
    needed = whole.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code>{' (needed)' if name in needed else ''}</td>"
        f"<td>{escape(_kind(each))}</td><td>{escape(each.get('description', ''))}</td></tr>"
        for name, each in whole.get("properties", {}).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _kind(schema: dict[str, Any]) -> str:
    """What a value may be, in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " | ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[key]:.15g}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema.get("type", "any"), *bounds])


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
