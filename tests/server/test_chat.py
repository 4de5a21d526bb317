"""Conversations: messages of every shape, streams, tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.samples import said
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


def test_to_the_end_of_the_context(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
    _, answer, _ = server.post("/v1/chat/completions", body)
    assert answer["usage"]["total_tokens"] == 400 and answer["choices"][0]["finish_reason"] == "length"
