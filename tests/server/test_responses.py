"""`/v1/responses` with the official client: the same answers as chat, its events in order, formats, tools, refusals."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.inprocess import answering, api
from tests.server.samples import FUNCTION
from tests.server.serving import events
from verifypd.server.calls import bad
from verifypd.server.messages import Down, Output, Outputs
from verifypd.server.responses import ResponsesBody, messages, renamed

pytestmark = pytest.mark.xdist_group("server")

TOOL: Any = {"type": "function", "strict": False, **FUNCTION["function"]}
SHORT = {"bad_words": ["\n", "\t", "\r", " "]}  # a random model would fill the page with white space
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"town": "(Ulm|Bonn)"\}\}</tool_call>'


class Mood(Enum):
    good = "good"
    bad = "bad"


class Report(BaseModel):
    mood: Mood
    wet: bool


class weather(BaseModel):  # the name of the function
    town: Literal["Ulm", "Bonn"]


def chat_text(client, messages: Any, **fields: Any) -> str:
    return client.chat.completions.create(model="tiny", messages=messages, **fields).choices[0].message.content


def test_it_says_what_chat_says(client):
    fields: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    said = chat_text(client, [{"role": "user", "content": "hi"}], max_tokens=20, **fields)
    got = client.responses.create(model="tiny", input="hi", max_output_tokens=20, **fields)
    assert got.output_text == said and got.object == "response" and got.id.startswith("resp_")
    assert got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"
    [item] = got.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (got.model, got.temperature, got.max_output_tokens, got.error) == ("tiny", 0, 20, None)
    assert got.usage.output_tokens == 20 and got.usage.total_tokens == got.usage.input_tokens + 20
    assert got.usage.output_tokens_details.reasoning_tokens == 0
    again = client.responses.create(model="tiny", input="hi" * 40, max_output_tokens=1, **fields)
    again = client.responses.create(model="tiny", input="hi" * 40, max_output_tokens=1, **fields)
    assert again.usage.input_tokens_details.cached_tokens >= 40


def test_an_answer_that_ends_by_itself_is_complete(client):
    got = client.responses.create(model="tiny", input="hi", extra_body={"guided_choice": ["yes"]}, store=True)
    assert (got.status, got.incomplete_details, got.output_text) == ("completed", None, "yes")
    assert got.output[0].status == "completed" and got.store is False, "nothing is stored, and it says so"


def test_instructions_and_items_are_the_messages_of_chat(client):
    fields: Any = {"temperature": 0}
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "is it wet?"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
                for name in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "developer", "content": "now say it"},
    ]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "is it "}, {"type": "input_text", "text": "wet?"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Ulm"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"town": "Ulm"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "message", "role": "developer", "content": "now say it"},
    ]
    said = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, **fields)
    got = client.responses.create(model="tiny", instructions="be brief", input=items, max_output_tokens=12, **fields)
    assert got.output_text == said.choices[0].message.content and got.instructions == "be brief"
    assert got.usage.input_tokens == said.usage.prompt_tokens


def test_a_stream_has_the_events_of_openai_in_order(client):
    fields: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 20}
    fields["extra_body"] = {"seed": 3, "ignore_eos": True}
    whole = client.responses.create(**fields)
    parts = list(client.responses.create(stream=True, **fields))
    kinds = [part.type for part in parts]
    assert [part.sequence_number for part in parts] == list(range(len(parts)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 12
    deltas = [part.delta for part in parts if part.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == parts[-4].text == parts[-1].response.output_text
    assert len({part.item_id for part in parts if hasattr(part, "item_id")}) == 1
    assert parts[0].response.status == "in_progress" and parts[0].response.usage is None
    assert parts[-1].response.usage.output_tokens == whole.usage.output_tokens == 20
    assert parts[-1].response.id == parts[0].response.id


def test_the_clients_own_stream_adds_it_up(client):
    form: Any = {"guided_regex": "(ab ){9}c"}
    with client.responses.stream(model="tiny", input="hi", extra_body=form) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == "ab " * 9 + "c" == snapshots[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed_and_parsed(client, stream):
    fields: Any = {"model": "tiny", "input": "how is it?", "text_format": Report, "extra_body": {"seed": 2, **SHORT}}
    if stream:
        with client.responses.stream(**fields) as made:
            got = made.get_final_response()
    else:
        got = client.responses.parse(**fields)
    assert isinstance(got.output_parsed, Report) and got.status == "completed"
    assert got.text.format.type == "json_schema" and got.text.format.name == "Report"


def test_a_json_object(client):
    form: Any = {"format": {"type": "json_object"}}
    got = client.responses.create(model="tiny", input="hi", text=form, max_output_tokens=30, temperature=0)
    assert got.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call(client, choice, stream):
    tool = openai.pydantic_function_tool(weather)["function"]
    tools: Any = [{"type": "function", **tool}]
    fields: Any = {"model": "tiny", "input": "is it wet?", "tools": tools, "tool_choice": choice}
    fields["extra_body"] = {"seed": 2, **SHORT}
    if stream:
        parts = list(client.responses.create(stream=True, **fields))
        got = parts[-1].response
        assert [part.type for part in parts[2:]] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert parts[2].item.arguments == "" and parts[3].delta == parts[4].arguments == parts[5].item.arguments
        assert parts[2].item.id == parts[3].item_id == parts[4].item_id == parts[5].item.id
    else:
        got = client.responses.create(**fields)
    [call] = got.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["town"] in ("Ulm", "Bonn") and call.call_id.startswith("call_")
    assert got.status == "completed" and got.tools[0].name == "weather"


@pytest.mark.parametrize("stream", [False, True])
def test_words_and_calls_the_model_writes_by_itself_and_the_way_back(client, stream):
    """A grammar makes this random model write what a trained one would. What came goes back as it came."""
    fields: Any = {"model": "tiny", "input": "is it wet?", "tools": [TOOL]}
    fields["extra_body"] = {"guided_regex": f"Well\\. {CALL}\n{CALL}", "seed": 4}
    if stream:
        with client.responses.stream(**fields) as made:
            got = made.get_final_response()
    else:
        got = client.responses.create(**fields)
    assert [item.type for item in got.output] == ["message", "function_call", "function_call"]
    assert got.output_text == "Well. "
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in got.output[1:]
    ]
    question: Any = [{"role": "user", "content": "is it wet?"}, *got.output, *results]
    more: Any = {"extra_body": {"ignore_eos": True}}
    after = client.responses.create(model="tiny", input=question, max_output_tokens=5, **more)
    assert after.usage.output_tokens == 5


def test_logprobs(client):
    fields: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}
    got = client.responses.create(include=["message.output_text.logprobs"], **fields)
    scores = got.output[0].content[0].logprobs
    assert len(scores) == 6 and all(len(score.top_logprobs) == 2 for score in scores)
    parts = list(client.responses.create(include=["message.output_text.logprobs"], stream=True, **fields))
    told = [s.logprob for part in parts if part.type == "response.output_text.delta" for s in part.logprobs]
    assert told == [score.logprob for score in scores][: len(told)] and told
    assert [s.logprob for s in parts[-4].logprobs] == [score.logprob for score in scores]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "conv_1"}, "conversation", "keeps no conversations"),
        ({"background": True}, "background", "leave it out"),
        ({"truncation": "auto"}, "truncation", "never cut"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "max_output_tokens"),
        ({"extra_body": {"response_format": {"type": "text"}}}, "response_format", "text.format"),
        ({"extra_body": {"n": 2}}, "n", "one answer"),
        ({"extra_body": {"nonsense": 2}}, "nonsense", "unknown field"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"role": "user"}]}, "input", "needs content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input", "needs arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "reads text"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input", "type 'reasoning' is not supported"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input", "0.role: Input should be 'system'"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "at most 512 characters"),
        ({"metadata": {"a" * 65: "x"}}, "metadata", "at most 64 characters"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16 items"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "none"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format",
            "text.format of type json_schema needs schema",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 7}}}}, "text.format", "cannot"),
        (
            {"max_output_tokens": 400, "input": "a"},
            "input",
            "This model's maximum context length is 400 tokens. However, you requested ",
        ),
        ({"max_output_tokens": 400}, "input", " in the input, 400 in the completion)"),
        ({"input": "a " * 20_000}, "input", "tokens in your input."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_by_name(client, fields, param, words, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", "stream": stream, **fields})
    assert caught.value.param == param and words in caught.value.message


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels):
        made = {"a": made}
    return made


@pytest.mark.parametrize("levels", [253, 300, 900])
@pytest.mark.parametrize("user", ["", "x" * 20_000], ids=["small", "large"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_too_deep_to_be_repeated_is_refused(server, stream, user, levels):
    """It was a 500, a stream that broke off, or the end of the process that reads large bodies."""
    tools = [{**TOOL, "parameters": nested(levels)}]
    fields = {"max_output_tokens": 1, "tool_choice": "none", "stream": stream, "user": user}
    status, body, _ = server.post("/v1/responses", {"input": "hi", "tools": tools, **fields})
    assert status == 400 and body["error"]["param"] == "tools" and "nested too deeply" in body["error"]["message"], body
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"description": nested(levels)}}}
    status, body, _ = server.post("/v1/responses", {"input": "hi", "text": form, "stream": stream, "user": user})
    assert status == 400 and body["error"]["param"] in ("text", "text.format"), body


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_just_not_too_deep_is_repeated(server, stream):
    tools = [{**TOOL, "parameters": nested(248)}]
    fields = {"max_output_tokens": 1, "tool_choice": "none", "stream": stream}
    status, body, _ = server.post("/v1/responses", {"input": "hi", "tools": tools, **fields})
    assert status == 200 and (events(body)[-1]["response"] if stream else body)["tools"][0]["parameters"] == nested(248)


def test_many_calls_after_one_another_are_read_at_once():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    body = ResponsesBody.model_validate({"input": [call] * 50_000})
    gc.disable()  # as where large bodies are read
    begun = time.thread_time()
    [made] = messages(body)
    gc.enable()
    assert time.thread_time() - begun < 5, "it grew with the square of their number"
    assert made.tool_calls is not None and len(made.tool_calls) == 50_000


@pytest.mark.parametrize("words", ["hi there", "hi there " * 3000])
def test_tokens_are_counted_before_they_are_sent(client, server, words):
    """Long ones are read by another process, and what is too long is refused as in the call itself."""
    fields = {"instructions": "be brief", "input": words}
    if len(words) > 100:
        with pytest.raises(openai.BadRequestError, match="tokens"):
            client.responses.input_tokens.count(model="tiny", **fields)
        return
    found = client.responses.input_tokens.count(model="tiny", **fields)
    made = client.responses.create(model="tiny", max_output_tokens=1, **fields)
    assert found.object == "response.input_tokens" and found.input_tokens == made.usage.input_tokens
    assert server.metrics()['verifypd:http_requests_total{path="/v1/responses/input_tokens",status="200"}'] >= 1


def test_an_endpoint_that_is_not_here_is_no_response_that_was_lost(server):
    status, body, _ = server.post("/v1/responses/compact", {"model": "tiny"})
    assert status in (404, 405) and "keeps no responses" not in body["error"]["message"]


def test_there_is_nothing_to_get_back(client, server):
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            ask("resp_1")
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.responses.create(model="other", input="hi")
    assert server.metrics()['verifypd:http_requests_total{path="/v1/responses/{id}",status="404"}'] >= 3


def test_a_stream_that_fails_says_so_as_a_response(tokenizer):
    bridge, _ = answering(tokenizer, [70, 71], None)

    inner = bridge.flush

    def flush() -> None:
        inner()
        asyncio.get_running_loop().call_later(0.1, bridge.take, Down(1, "it broke", final=True))

    bridge.flush = flush  # type: ignore[method-assign]
    with api(tokenizer, bridge) as made:
        answer = made.post("/v1/responses", json={"input": "hi", "stream": True})
    parts = events(answer.text)
    assert parts[-1]["type"] == "response.failed" and parts[-1]["sequence_number"] == len(parts) - 1
    failed = parts[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "engine_lost"
    assert failed["output"][0]["content"][0]["text"] == tokenizer.decode([70, 71]), "what it had said by then"
    assert parts[-2]["type"] == "response.output_item.done" and parts[-2]["item"]["status"] == "incomplete"


def test_a_format_that_fails_on_the_way_is_named_as_here(tokenizer):
    bridge, heard = answering(tokenizer, [70, 71], None)
    inner = bridge.flush

    def flush() -> None:
        inner()
        bridge.take(Outputs(1, [Output(heard[-1].call, 0, [], "error", None, [], error="it takes too long")]))
        inner()

    bridge.flush = flush  # type: ignore[method-assign]
    with api(tokenizer, bridge) as made:
        answer = made.post("/v1/responses", json={"input": "hi", "text": {"format": {"type": "json_object"}}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "format_too_complex")
    assert answer.json()["error"]["param"] == "text.format"


def test_a_deadline_leaves_it_incomplete(tokenizer):
    bridge, _ = answering(tokenizer, [70, 71], None)
    with api(tokenizer, bridge) as made:
        got = made.post("/v1/responses", json={"input": "hi", "deadline_ms": 500}).json()
    assert got["status"] == "incomplete" and got["incomplete_details"] == {"reason": "deadline"}
    assert got["output"][0]["content"][0]["text"] == tokenizer.decode([70, 71])


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ("max_tokens=9 is more than this server allows (5)", "max_tokens", "max_output_tokens=9 is more than"),
        ("messages: List should have at least 1 item", "messages", "input: List should have"),
        ("min_tokens=9 must not exceed max_tokens=5", "min_tokens", "min_tokens=9 must not exceed max_tokens=5"),
    ],
)
def test_errors_name_this_bodys_fields(message: str, param: str, said: str) -> None:
    error = renamed(bad(message, param))
    assert error.message.startswith(said)
    assert error.param == said.split("=")[0].split(":")[0]
