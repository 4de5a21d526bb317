"""Output that follows a format: schemas, expressions, grammars, forced tool calls; speculation stays on."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

import openai
import pydantic
import pytest

from tests.server.samples import FUNCTION, IDS

pytestmark = pytest.mark.xdist_group("server")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHORT = {"bad_words": ["\n", "\t", "\r", " "]}  # a random model would fill the page with white space


@pytest.mark.parametrize(
    "extra", [{"temperature": 0}, {"seed": 1}, {"temperature": 1.3}], ids=["greedy", "coupled", "rejection"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, extra, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields: Any = {"response_format": form, "max_tokens": 100, "extra_body": SHORT, **extra}
    messages: Any = [{"role": "user", "content": "say"}]
    if stream:
        parts = client.chat.completions.create(model="tiny", messages=messages, stream=True, **fields)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
    else:
        text = client.chat.completions.create(model="tiny", messages=messages, **fields).choices[0].message.content
    value = json.loads(text)
    assert value["a"] in ("yes", "no") and isinstance(value["b"], bool) and len(value) == 2


def test_json_object(server):
    for seed in range(2):
        text = server.complete(IDS, response_format={"type": "json_object"}, max_tokens=100, seed=seed, temperature=0.5)
        choice = text["choices"][0]
        assert choice["text"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_regex": "[ab]{3}-[0-9]"}, None),
        ({"response_format": {"type": "regex", "pattern": "[ab]{3}-[0-9]"}}, None),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, None),
        ({"guided_choice": ["red", "green"]}, ("red", "green")),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ("red", "green")),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, ("xy", "xz")),
        ({"response_format": {"type": "grammar", "grammar": 'start: "x" ("y" | "z")'}}, ("xy", "xz")),
        ({"guided_json": {"const": 12}}, ("12",)),
    ],
)
def test_regex_choice_and_grammar(server, fields, allowed):
    for sampling in ({"temperature": 0}, {"seed": 3}, {}):
        choice = server.complete(IDS, max_tokens=40, **fields, **sampling)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] in allowed if allowed else re.fullmatch("[ab]{3}-[0-9]", choice["text"])


def test_digits_of_a_regex_are_ascii(server):
    form = {"type": "regex", "pattern": r"\d{4}"}
    digits = [server.complete(IDS, max_tokens=20, seed=seed, response_format=form) for seed in range(8)]
    assert all(re.fullmatch("[0-9]{4}", answer["choices"][0]["text"]) for answer in digits)


def test_speculation_does_not_change_constrained_text(server):
    form = {"response_format": {"type": "regex", "pattern": "([a-z]{1,4} ){20}"}, "max_tokens": 100}
    for sampling in ({"temperature": 0}, {"seed": 3}, {"seed": 9, "temperature": 0.6}):
        texts = [server.complete(IDS, **form, **sampling, speculation=on)["choices"][0]["text"] for on in (True, False)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", False), ({"type": "function", "function": {"name": "weather"}}, True)]
)
def test_a_forced_tool_call(client, choice, stream):
    fields: Any = {"tools": [FUNCTION], "tool_choice": choice, "max_tokens": 120, "seed": 2, "extra_body": SHORT}
    messages: Any = [{"role": "user", "content": "is it wet?"}]
    if stream:
        parts = list(client.chat.completions.create(model="tiny", messages=messages, stream=True, **fields))
        [call] = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
        finish, content = parts[-1].choices[0].finish_reason, [p.choices[0].delta.content for p in parts]
        assert not any(content)
    else:
        got = client.chat.completions.create(model="tiny", messages=messages, **fields).choices[0]
        [call], finish = got.message.tool_calls, got.finish_reason
        assert got.message.content is None
    assert finish == "tool_calls"
    assert call.function.name == "weather" and json.loads(call.function.arguments)["town"] in ("Ulm", "Bonn")


CALL = r'<tool_call>\{"name": "weather", "arguments": \{"town": "(Ulm|Bonn)"\}\}</tool_call>'


def spoken(client, stream, **fields: Any) -> tuple[str, list[Any], str]:
    """Words, calls and finish reason of an answer whose tools the model may call or not."""
    messages: Any = [{"role": "user", "content": "is it wet?"}]
    fields = {"model": "tiny", "messages": messages, "tools": [FUNCTION], "max_tokens": 150, "seed": 4, **fields}
    if not stream:
        got = client.chat.completions.create(**fields).choices[0]
        return got.message.content or "", got.message.tool_calls or [], got.finish_reason
    parts = [part.choices[0] for part in client.chat.completions.create(stream=True, **fields)]
    calls = [call for part in parts for call in part.delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(calls)))
    return "".join(part.delta.content or "" for part in parts), calls, parts[-1].finish_reason


@pytest.mark.parametrize(("choice", "stream"), [({}, False), ({"tool_choice": "auto"}, True)])
def test_tools_the_model_calls_by_itself(client, choice, stream):
    """A grammar makes this random model write what a trained one would; the server is told nothing of it."""
    words, calls, finish = spoken(client, stream, extra_body={"guided_regex": f"Well\\. {CALL}\n{CALL}"}, **choice)
    assert words == "Well. " and finish == "tool_calls" and len(calls) == 2
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        assert call.function.name == "weather" and json.loads(call.function.arguments)["town"] in ("Ulm", "Bonn")
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize("stream", [False, True])
def test_one_tool_call_where_no_more_are_wanted(client, stream):
    form = {"guided_regex": f"Well\\. {CALL}\n{CALL} and"}
    words, calls, finish = spoken(client, stream, extra_body=form, parallel_tool_calls=False)
    assert words == "Well. " and finish == "tool_calls" and len(calls) == 1
    words, calls, finish = spoken(client, stream, extra_body={"guided_regex": "No\\."}, parallel_tool_calls=False)
    assert (words, calls, finish) == ("No.", [], "stop")


def test_words_that_are_no_call_stay_words(client):
    for text in ("I <tool_call>cannot</tool_call>", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'):
        form = {"guided_choice": [text]}
        assert spoken(client, True, extra_body=form) == (text, [], "stop")


class M(enum.Enum):
    WET = "wet"
    DRY = "dry"


class sky(pydantic.BaseModel):  # the name of the function; short, for it goes into a short context
    m: M


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "sky"}}])
def test_a_tool_made_from_a_class_with_an_enum(client, choice):
    """OpenAI's client writes the enum as a reference: `#/$defs/M`."""
    tool = openai.pydantic_function_tool(sky)
    assert '"#/$defs/M"' in json.dumps(tool)
    words, calls, _ = spoken(client, False, tools=[tool], tool_choice=choice, max_tokens=None, extra_body=SHORT)
    assert words if choice == "auto" else [sky.model_validate_json(call.function.arguments) for call in calls]


def test_a_strict_function_beside_words_and_where_it_must_be_called(client, server):
    strict = {**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}
    fields = {"tools": [strict], "extra_body": SHORT}
    _, [call], _ = spoken(client, False, tool_choice="required", **fields)
    assert json.loads(call.function.arguments)["town"] in ("Ulm", "Bonn")
    words, _, _ = spoken(client, True, max_tokens=20, **fields)
    assert words, "it may say anything else"
    form = {"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "json_object"}}
    status, body, _ = server.post("/v1/chat/completions", {**form, "tools": [strict]})
    assert status == 400 and body["error"]["param"] == "tool_choice"


def test_a_tool_answer_goes_back(server):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "is it wet?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "yes", "tool_call_id": "c1"},
    ]
    status, answer, _ = server.post(
        "/v1/chat/completions", {"messages": messages, "tools": [FUNCTION], "max_tokens": 4}
    )
    assert status == 200 and answer["choices"][0]["message"]["content"] is not None
