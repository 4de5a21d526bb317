"""Conversations: messages of every shape, streams, tools."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.server.samples import FUNCTION, own, said
from tests.server.serving import events
from verifypd import SamplingParams

pytestmark = pytest.mark.xdist_group("server")


def test_chat(client, offline):
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    got = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=10, temperature=0)
    expected = offline.chat(messages, SamplingParams(max_tokens=10, temperature=0))[0].outputs[0].text
    assert got.choices[0].message.content == expected and got.choices[0].message.role == "assistant"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_content_as_parts_and_both_limits(server, limit):
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]
    texts = []
    for content in (parts, "a b c"):
        body = {"messages": [{"role": "user", "content": content}], limit: 7, "temperature": 0, "ignore_eos": True}
        status, answer, _ = server.post("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 7
        texts.append(answer["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


def test_chat_stream(client, offline):
    messages: Any = [{"role": "user", "content": "hi"}]
    parts = list(
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0, stream=True)
    )
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == offline.chat(messages, SamplingParams(max_tokens=10, temperature=0))[0].outputs[0].text
    assert parts[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 3, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
        {"seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"seed": 6, "allowed_token_ids": [70, 71, 72, 73, 74], "bad_words": ["a"], "logit_bias": {"71": 2, "73": -2}},
        {"temperature": 0.0, "min_tokens": 18, "stop_token_ids": list(range(70, 200)), "skip_special_tokens": False},
        {"seed": 7, "stop": ["e", "a", "o"], "include_stop_str_in_output": True, "speculation": False},
        {"seed": 8, "ignore_eos": True, "max_draft": 1, "acceptance": "coupled", "priority": -5, "slo_tpot": 5.0},
    ],
    ids=lambda f: "-".join(f),
)
def test_sampling_fields_do_what_they_do_offline(server, offline, fields):
    messages = [{"role": "user", "content": "hi"}]
    status, body, _ = server.post("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 20, **fields})
    expected = offline.chat(messages, SamplingParams(max_tokens=20, **own(fields)))[0].outputs[0]
    assert status == 200 and body["choices"][0]["message"]["content"] == expected.text
    assert body["choices"][0]["finish_reason"] == expected.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_a_conversation(server, offline, stream):
    messages = [{"role": "user", "content": "hi"}]
    expected = offline.chat(messages, SamplingParams(n=3, seed=5, max_tokens=9))[0].outputs
    body = {"messages": messages, "n": 3, "seed": 5, "max_tokens": 9, "stream": stream}
    answer = server.post("/v1/chat/completions", body)[1]
    texts = [""] * 3
    for choice in [part["choices"][0] for part in events(answer)] if stream else answer["choices"]:
        texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
    assert texts == [output.text for output in expected]


@pytest.mark.parametrize("words", ["well then", "s", "and ", "", "</s"])
def test_the_last_message_can_be_continued(server, offline, words):
    """Just where it ends, whatever the template writes after it, and with the spaces it ends with."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": words}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    status, answer, _ = server.post("/v1/chat/completions", {**body, "max_tokens": 5, "temperature": 0})
    text = offline.get_tokenizer().apply_chat_template(messages, add_generation_prompt=False).removesuffix("</s>")
    ids = offline.get_tokenizer().encode(text, add_special_tokens=False)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == said(offline, ids, max_tokens=5, temperature=0).text


def tokens(server, **message: Any) -> list[int]:
    """A conversation with an assistant's message in it, as the model reads it."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **message}, {"role": "user", "content": "so?"}]
    status, body, _ = server.post("/tokenize", {"messages": messages})
    assert status == 200, body
    return body["tokens"]


def test_what_an_assistant_said_before(server):
    """Reasoning goes to the template, a refusal is what was said, and values that say nothing change nothing."""
    plain = tokens(server, content="no")
    assert tokens(server, content="no", reasoning_content="well", refusal=None, annotations=[]) != plain
    assert tokens(server, content="<think>well</think>no") == tokens(server, content="no", reasoning_content="well")
    assert tokens(server, content="no", refusal="", reasoning_content="", annotations=None, audio=None) == plain
    assert tokens(server, content=None, refusal="no") == plain == tokens(server, refusal="no")


class Report(BaseModel):
    wet: bool


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of what it adds
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_what_the_client_has_parsed_can_be_sent_back(client, stream, calls):
    """As it stands in its helpers' answers, with the fields they add."""
    messages: Any = [{"role": "user", "content": "is it wet?"}]
    fields: Any = {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}]} if calls else {}
    fields |= {"tool_choice": "required"} if calls else {"response_format": Report}
    fields |= {"model": "tiny", "messages": messages, "seed": 2, "extra_body": {"bad_words": ["\n", "\t", "\r", " "]}}
    if stream:
        with client.chat.completions.stream(**fields) as made:
            said = made.get_final_completion().choices[0].message
    else:
        said = client.chat.completions.parse(**fields).choices[0].message
    parsed = said.tool_calls[0].function.parsed_arguments if calls else said.parsed
    assert parsed is not None
    results = [{"role": "tool", "tool_call_id": each.id, "content": "rain"} for each in said.tool_calls or ()]
    after = client.chat.completions.create(model="tiny", messages=[*messages, said, *results], max_tokens=3)
    assert after.usage.completion_tokens


def test_to_the_end_of_the_context(server):
    body = {"messages": [{"role": "user", "content": "h" * 320}], "temperature": 0, "ignore_eos": True}
    _, answer, _ = server.post("/v1/chat/completions", body)
    assert (
        answer["usage"]["completion_tokens"] > 20
        and answer["usage"]["total_tokens"] == 400
        and answer["choices"][0]["finish_reason"] == "length"
    )
