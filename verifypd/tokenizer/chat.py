"""Chat messages to prompt text by a model's Jinja template, as transformers renders it. Knows nothing of token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verifypd.errors import RequestError, TokenizerError


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  # the name and type Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & ' for HTML, which a prompt must not have
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The templates of one model: `default`, and perhaps `tool_use` for requests with tools."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], where: str) -> None:
        environment = _environment()
        self._where = where
        self._variables = dict(variables)  # bos_token, eos_token and the like
        self.sources = dict(sources)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateSyntaxError as error:
            raise TokenizerError(f"{where}: the chat template is broken ({error}); download the model again") from None

    @property
    def variables(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as text."""
        return dict(self._variables)

    @property
    def available(self) -> bool:
        """Whether there is a template for an ordinary conversation."""
        return "default" in self._templates

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **kwargs: Any) -> str:
        """The prompt for these messages. What the template refuses is the request's fault."""
        tools = kwargs.get("tools")
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            names = ", ".join(self._templates) or "none"
            raise RequestError(
                f"{self._where} has no default chat template (it has: {names}); send a plain prompt instead,"
                " or put the template into chat_template.jinja beside tokenizer.json",
                param="messages",
            )
        values = {**self._variables, "tools": None, "documents": None, **kwargs}
        try:
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            text = " ".join(str(error).split())
            raise RequestError(f"the chat template refuses these messages: {text}", param="messages") from None
