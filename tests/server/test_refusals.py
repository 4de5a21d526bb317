"""What passes without effect, what is refused and how it is named, and what the log holds."""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Any

import openai
import pytest

from tests.server.samples import FUNCTION, IDS
from verifypd.server.logs import Lines

pytestmark = pytest.mark.xdist_group("server")

NEUTRAL: list[dict[str, Any]] = [
    {"user": "ann", "metadata": {"a": "b"}},
    {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
    {"suffix": None, "logit_bias": {}, "stop": None, "stream_options": None, "response_format": {"type": "text"}},
    {"spaces_between_special_tokens": True, "detokenize": True, "return_tokens_as_token_ids": False},
    {"n": None, "temperature": None, "top_p": None, "max_tokens": None, "seed": None},
    {"nonsense": None, "guided_decoding_backend": "xgrammar", "guided_json": None},
]


@pytest.mark.parametrize("fields", NEUTRAL)
def test_neutral_values_pass(server, fields):
    server.complete(IDS, **fields)


def test_neutral_chat_values_pass(server):
    fields = {
        "store": True,
        "service_tier": "auto",
        "modalities": ["text"],
        "tool_choice": "none",
        "prompt_cache_key": "k",
    }
    more = {"parallel_tool_calls": True, "reasoning_effort": None, "safety_identifier": "x", "functions": None}
    message = {"role": "user", "content": "hi", "reasoning": None}
    body = {"messages": [message], "max_tokens": 2, "include_reasoning": True, **fields, **more}
    assert server.post("/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ],
)
def test_hints_for_a_prompt_cache_pass(server, path, fields):
    hints = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
    assert server.post(path, {**fields, **hints})[0] == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "end"}, "suffix"),
    ({"prompt": [[5]] * 129}, "prompt"),
    ({"guided_json": {"type": "nope"}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": ["a" * 40_000]}, "guided_choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"best_of": 4}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"nonsense": 1}, "nonsense"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop_token_ids": [4000]}, "stop_token_ids"),
    ({"bad_words": ["a"] * 257}, "bad_words"),
    ({"bad_words": ["a", "xyz" * 100]}, "bad_words"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [5, 4000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5] * 400}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"acceptance": "maybe"}, "acceptance"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "[0-9"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "response_format"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {}, "response_format": {"type": "regex", "pattern": "("}}, "response_format"),
    ({"repetition_penalty": 1e-4}, "repetition_penalty"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"deadline_ms": -3}, "deadline_ms"),
    ({"deadline_ms": 86_400_001}, "deadline_ms"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_not_honoured_is_named(server, fields, param):
    status, body, _ = server.post("/v1/completions", {"prompt": IDS, **fields})
    assert status == 400, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param and body["error"]["type"] == "invalid_request_error"


HI = [{"role": "user", "content": "hi"}]
DEEP_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
LONG_GRAMMAR = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2800)) + 'r2800: "x"\n'
CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "hi"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]}, "messages"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [DEEP_CALL]}]}, "messages"),
    ({"response_format": {"type": "grammar", "grammar": LONG_GRAMMAR}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "a" * 40_000}}, "response_format"),
    ({"echo": True}, "echo"),
    ({"messages": [CALLING], "continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a", "annotations": [{"type": "url_citation"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "forged\nline"}, "request_id"),
    ({"request_id": ""}, "request_id"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED)
def test_chat_names_what_it_refuses(server, fields, param):
    status, body, _ = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert status == 400 and body["error"]["param"] == param, body


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "nope"}, "tool 'f': parameters are those of an object, not 'nope'"),
        ({"type": ["array", "null"]}, "tool 'f': parameters are those of an object"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "the parameters of a tool cannot be followed: "),
    ],
)
def test_a_tool_that_cannot_be_followed_is_not_called_an_output_format(server, parameters, words):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    status, body, _ = server.post("/v1/chat/completions", asked)
    error = body["error"]
    assert (status, error["param"]) == (400, "tools"), error
    assert error["message"].startswith(words) and "function.invalid" not in error["message"]
    assert "unclosed" in error["message"] or "object" in words


def test_what_is_refused_is_counted(server):
    name = 'verifypd:refused_total{code="context_length_exceeded"}'
    before = server.metrics().get(name, 0)
    assert server.post("/v1/completions", {"prompt": [5] * 400})[0] == 400
    assert server.metrics()[name] == before + 1
    name = 'verifypd:refused_total{code="invalid_value"}'
    for size in (1, 40_000):  # a large body is read elsewhere
        before = server.metrics().get(name, 0)
        assert server.post("/v1/completions", {"prompt": IDS, "max_tokens": "q", "user": "x" * size})[0] == 400
        assert server.metrics()[name] == before + 1


@pytest.mark.parametrize("name", ["tokenizer", "special_in_content", "args", "values", "messages ", ""])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/tokenize", {"messages": HI}),
    ],
)
def test_a_variable_of_the_template_may_be_called_anything(server, path, asked, name):
    status, body, _ = server.post(path, {**asked, "chat_template_kwargs": {name: "x"}})
    assert status == 200, body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "top_p": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": "x", "seed": 99999999999999999999999}',
    ],
)
def test_bodies_that_are_none(server, body):
    status, answer, _ = server.post("/v1/completions", body)
    assert status == 400 and answer["error"]["message"]


def test_unknown_model_and_path(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="no /v1/embeddings here; GET / lists the paths") as caught:
        client.embeddings.create(model="tiny", input="x")
    assert caught.value.code == "not_found"
    status, body, headers = server.get("/v1/completions")
    assert status == 405 and body["error"]["code"] == "method_not_allowed" and "POST" in headers["allow"]
    assert body["error"]["message"] == "GET is not for /v1/completions: use POST"


def test_request_ids(server):
    _, _, headers = server.post("/v1/completions", {"prompt": IDS}, **{"X-Request-Id": "my-own-7"})
    assert headers["x-request-id"] == "my-own-7"
    _, _, headers = server.post("/v1/completions", {"prompt": IDS}, **{"X-Request-Id": "bad id"})
    assert headers["x-request-id"] != "bad id" and len(headers["x-request-id"]) == 32
    _, _, headers = server.post(
        "/v1/completions", {"prompt": IDS, "request_id": "in-the-body"}, **{"X-Request-Id": "7"}
    )
    assert headers["x-request-id"] == "in-the-body"
    assert "request_id=my-own-7 " in server.logged("request_id=in-the-body ")


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", {"prompt": IDS, "max_tokens": 1}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "chatcmpl-"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}, "resp_"),
    ],
)
def test_an_answer_is_found_in_the_log_by_its_id(server, path, body, prefix):
    status, answer, headers = server.post(path, body)
    assert status == 200 and answer["id"] == prefix + headers["x-request-id"]
    server.logged(f"request_id={answer['id'].removeprefix(prefix)} ")


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/completions", {"prompt": IDS, "top_q": 1}, "status=400 ms=* code=unknown_parameter param=top_q"),
        ("/v1/completions", {"prompt": IDS, "y" * 9999: 1}, f"status=400 ms=* code=unknown_parameter param={'y' * 64}"),
        ("/v1/completions", {"prompt": IDS, "suffix": "x"}, "status=400 ms=* code=unsupported_parameter param=suffix"),
        ("/v1/completions", {"prompt": IDS, "model": "x"}, "status=404 ms=* code=model_not_found param=model"),
        ("/v1/completions", b"{", "status=400 ms=* code=invalid_json"),
        ("/v1/embeddings", {}, "status=404 ms=* code=not_found"),
    ],
)
def test_the_log_says_why_a_request_was_refused(server, path, body, why):
    _, _, headers = server.post(path, body)
    line = next(
        line
        for line in server.logged(f"request_id={headers['x-request-id']} ").splitlines()
        if headers["x-request-id"] in line
    )
    assert re.sub(r"ms=\S+", "ms=*", line).endswith(why)


def test_no_client_writes_lines_into_the_log(server):
    assert server.get("/v1/%0A2026-01-01%20info%20api-0:%20forged%1b[2J")[0] == 404
    text = server.logged("forged")
    assert "\n2026-01-01 info" not in text and "\x1b" not in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_client_can_write_a_line_of_the_log(form: str) -> None:
    nasty = "/v1/x\n2026 info api-0: request\r\x1b[2J\x85\u2028\u202e end status=200 \U000e0001"
    record = logging.makeLogRecord({"msg": "request %s", "args": (nasty,)})
    record.fields = {"path": nasty, "request_id": "a b"}
    line = Lines(form, "api-0").format(record)
    assert line.isprintable(), "one line, no control characters"
    if form == "json":
        assert json.loads(line)["path"] == nasty
    else:
        assert line.endswith(' request_id="a b"') and ' path="/v1/x\\n' in line
    try:
        raise ValueError(nasty)
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    first, *rest = Lines(form, "api-0").format(record).split("\n")
    assert first.isprintable() and all(part.isprintable() and part.startswith("    ") for part in rest)
    assert bool(rest) == (form == "text"), "a trace is set off from the lines"


def test_no_prompt_in_the_log(server):
    server.complete("a very secret thing", max_tokens=2)
    assert "secret thing" not in server.log.read_text()


def test_logprobs_are_finite_json(server):
    body = server.complete(IDS, logprobs=20, max_tokens=6, allowed_token_ids=[5, 6], temperature=0)
    values = [v for top in body["choices"][0]["logprobs"]["top_logprobs"] for v in top.values()]
    assert values and all(math.isfinite(value) for value in values)


WORDS = (
    "This model's maximum context length is 400 tokens. However, you requested {} tokens ({} in the {noun}, {} in the"
    " completion). Please reduce the length of the {noun} or completion."
)


@pytest.mark.parametrize(
    ("prompt", "fields", "told"),
    [
        (8, {"max_tokens": 393}, (401, 8, 393)),
        (8, {"max_tokens": 2**31 - 1}, (2**31 + 7, 8, 2**31 - 1)),
        (400, {"max_tokens": 1}, (401, 400, 1)),
        (400, {}, (401, 400, 1)),
        (500, {"max_tokens": 0, "echo": True}, (501, 500, 1)),
    ],
)
def test_more_tokens_than_the_model_has_room_for(server, prompt, fields, told):
    """In OpenAI's words, by which clients such as litellm know that the context overflowed."""
    status, body, _ = server.post("/v1/completions", {"prompt": [5] * prompt, **fields})
    error = body["error"]
    assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
    assert error["message"] == WORDS.format(*told, noun="prompt") and error["param"] == "prompt"


def test_more_tokens_than_there_is_room_for_in_chat(client, server):
    messages = [{"role": "user", "content": "hi"}]
    used = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage.prompt_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=messages, **{name: 401 - used})
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
        assert caught.value.body["message"] == WORDS.format(401, used, 401 - used, noun="messages")


def test_what_is_surely_too_long(server):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for path, body, words in (
        ("/v1/completions", {"prompt": "a " * 9000}, "tokens in your prompt. Please reduce the length of the prompt."),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}]}, "tokens in your messages."),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [call] * 400}]},
            "However, there are 401 messages and tool calls in your messages, of a token at least each.",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 401},
            "However, there are 401 messages and tool calls in your input, of a token at least each.",
        ),
        ("/detokenize", {"tokens": [5] * 400}, "400 tokens: send fewer than 400 at a time"),
    ):
        status, answer, _ = server.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert words in answer["error"]["message"]


def test_what_fits_exactly_and_what_is_not_asked_for_by_number_runs(server):
    for prompt, fields in ((8, {"max_tokens": 392}), (395, {})):
        body = server.complete([5] * prompt, **fields, ignore_eos=True)
        assert body["usage"]["total_tokens"] == 400 and body["choices"][0]["finish_reason"] == "length"
