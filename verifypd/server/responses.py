"""`/v1/responses`: its body, and the chat call that it comes to. Knows fields; renders and runs nothing.

Nothing is kept from one call to the next: a conversation goes on by sending its earlier items again.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from verifypd.server.ask import Limits, understood
from verifypd.server.calls import CallError, bad
from verifypd.server.schema import (
    Body,
    ChatBody,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    GenerationBody,
    JsonSchemaFormat,
    Listed,
    Message,
    NamedFunction,
    NamedTool,
    Positive,
    ResponseFormat,
    Tool,
    ToolCall,
    Unsupported,
)

KINDS = ("message", "function_call", "function_call_output")  # of items
LOGPROBS = "message.output_text.logprobs"  # in `include`


Name = Annotated[str, Field(strict=True, max_length=64)]
Value = Annotated[str, Field(strict=True, max_length=512)]


class InputItem(Body):
    """A message, a call the model made, or what that call gave: which of the fields it has goes by its type."""

    type: StrictStr | None = Field("message", examples=list(KINDS))
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: StrictStr | Listed[ContentPart] | None = None
    call_id: StrictStr | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    output: StrictStr | Listed[ContentPart] | None = None
    # as they stand in an answer; nothing hangs on them
    id: StrictStr | None = None
    status: StrictStr | None = None
    phase: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def known_kind(cls, value: Any) -> Any:
        """Refuse an item of another type as such, before its fields are looked at."""
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in KINDS:
            text = "an item of type {kind} is not supported: send messages, function_call and function_call_output"
            raise PydanticCustomError("unsupported_parameter", text, {"kind": repr(kind[:100])})
        return value


class TextFormat(JsonSchemaFormat):
    """What the text must follow; `json_schema` brings its schema along."""

    type: Literal["text", "json_object", "json_schema"]


class TextSettings(Body):
    """Of the text of an answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionKind(Body):
    """Functions are the only kind of tool."""

    type: Literal["function"]


class ResponsesTool(FunctionDefinition, FunctionKind):
    """A function the model may call."""


class ChosenTool(NamedFunction, FunctionKind):
    """A tool the model must call."""


class Reasoning(Body):
    """No model here is told how much to reason."""

    effort: Literal["none"] | None = None
    summary: StrictStr | None = None
    generate_summary: StrictStr | None = None


class ResponsesBody(GenerationBody):
    """`POST /v1/responses`. Fields of generation that it has under another name, or has no place for, are refused."""

    input: StrictStr | Listed[InputItem] = Field(examples=["Hello"])
    instructions: StrictStr | None = None
    max_output_tokens: Positive | None = None
    text: TextSettings | None = None
    tools: Listed[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: StrictBool | None = None
    top_logprobs: int | None = Field(None, strict=True, ge=0, le=20)
    include: Listed[StrictStr] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[Name, Value], Field(max_length=16)] | None = Field(None, description="comes back")
    # accepted; they do not touch the answer
    store: StrictBool | None = Field(None, description="nothing is stored, whatever it says")
    max_tool_calls: StrictInt | None = Field(None, description="of built-in tools, of which there are none")
    reasoning: Reasoning | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # accepted when neutral
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    truncation: Unsupported = None
    prompt: Unsupported = None


# Fields that are refused, and what to do instead; the value that says what happens anyway passes.
REFUSED: dict[str, tuple[Any, str]] = {
    "previous_response_id": (None, "this server keeps no responses: send the earlier items in input"),
    "conversation": (None, "this server keeps no conversations: send the earlier items in input"),
    "background": (False, "answers are not kept for later: leave it out, or stream"),
    "truncation": ("disabled", "input is never cut: leave it out, and send less where it does not fit"),
    "prompt": (None, "this server keeps no prompts: use instructions and input"),
    "max_tokens": (None, "use max_output_tokens"),
    "response_format": (None, "use text.format"),
    "n": (1, "a response has one answer: leave it out"),
    "prompt_logprobs": (None, "a response has no place for it: use /v1/chat/completions"),
    "return_token_origins": (False, "a response has no place for it: use /v1/chat/completions"),
    "return_token_ids": (False, "a response has no place for it: use /v1/chat/completions"),
}
# What a field of the chat call is called here.
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}


def renamed(error: CallError) -> CallError:
    """An error of the chat call, told of this body's field."""
    if (name := FIELDS.get(error.param or "")) is not None:
        error.message = re.sub(rf"(?<![\w.]){error.param}(?=[=: ])", name, error.message)
        error.param = name
    return error


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same call to `/v1/chat/completions`."""
    for name, (neutral, instead) in REFUSED.items():
        if getattr(body, name) not in (None, neutral):
            raise bad(f"{name} is not supported here: {instead}", name, "unsupported_parameter")
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise bad(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    shared = body.model_fields_set & set(GenerationBody.model_fields) - set(REFUSED)
    fields = {name: getattr(body, name) for name in shared}
    choice = body.tool_choice
    return ChatBody(
        messages=messages(body),
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body.text.format if body.text else None),
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_named(choice.name) if isinstance(choice, ChosenTool) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        **fields,
    )


def messages(body: ResponsesBody) -> list[Message]:
    """The conversation. Calls stand in the assistant's message that they follow, or in one of their own."""
    made = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*made, Message(role="user", content=body.input)]
    if not body.input:
        raise bad("input is empty: give at least one item", "input")
    for item in body.input:
        if item.type in ("message", None):
            _need(item, "role", "content")
            made.append(Message(role=item.role or "user", content=_content(item.content)))
        elif item.type == "function_call":
            _need(item, "call_id", "name", "arguments")
            function = FunctionCall(name=item.name or "", arguments=item.arguments)
            if not made or made[-1].role != "assistant":
                made.append(Message(role="assistant"))
            made[-1].tool_calls = calls = made[-1].tool_calls or []  # one list for all calls that follow
            calls.append(ToolCall(id=item.call_id, function=function))
        else:
            _need(item, "call_id", "output")
            made.append(Message(role="tool", content=_content(item.output), tool_call_id=item.call_id))
    return made


def _need(item: InputItem, *names: str) -> None:
    missing = next((name for name in names if getattr(item, name) is None), None)
    if missing is not None:
        raise bad(f"input: an item of type {item.type or 'message'} needs {missing}", "input")


def _content(content: str | list[ContentPart] | None) -> str | list[ContentPart] | None:
    """Text is text, whoever said it; parts of other types are refused where messages are read."""
    if not isinstance(content, list):
        return content
    known = ("input_text", "output_text")
    return [ContentPart(type="text", text=part.text) if part.type in known else part for part in content]


def _format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type == "json_schema" and given.schema_ is None:
        raise bad("text.format of type json_schema needs schema", "text.format")
    schema = JsonSchemaFormat(**given.model_dump(by_alias=True, exclude={"type"}))
    wanted = schema if given.type == "json_schema" else None
    return ResponseFormat(type=given.type, json_schema=wanted, pattern=None, grammar=None)


def _tool(tool: ResponsesTool) -> Tool:
    return Tool(type="function", function=FunctionDefinition(**tool.model_dump(exclude={"type"})))


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=name))


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def repeated(body: ResponsesBody, limits: Limits) -> dict[str, Any]:
    """What a response repeats of its request: as it was understood, where it says nothing."""
    form = body.text.format if body.text else None
    tools = [{"description": None, "parameters": None, **tool.model_dump()} for tool in body.tools or ()]
    choice = body.tool_choice or "auto"
    text = {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}}
    _check_depth("tools", tools)
    _check_depth("text", text)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "background": False,
        "store": False,  # whatever was asked: nothing is
        "service_tier": "default",
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "temperature": _or_one(understood(body, "temperature", limits)),
        "top_p": _or_one(understood(body, "top_p", limits)),
        "top_logprobs": body.top_logprobs or 0,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "truncation": "disabled",
        "user": body.user,
    }


def _check_depth(name: str, value: Any) -> None:
    """400 for what cannot be repeated in an event of a stream."""
    try:
        orjson.dumps({"response": {name: value}})
    except orjson.JSONEncodeError:
        raise bad(f"{name}: this is nested too deeply", name) from None
