"""Every field the server promises, through the official client where it has the field, against the real process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.serving import TINY, Server, events
from verifypd import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("server")

PROMPT = "the cat sat on the mat"
IDS = [5, 9, 200, 31, 7, 9, 200, 31]
FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(server: Server):
    with openai.OpenAI(base_url=server.base, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def offline(folders: tuple[Path, Path]):
    """The engine in this process, with the settings of the server."""
    names = ("dtype", "kv-memory", "batch-size", "max-draft", "max-model-len", "block-size")
    with LLM(str(folders[0]), draft=str(folders[1]), **{n.replace("-", "_"): TINY[n] for n in names}) as llm:
        yield llm


def said(offline: LLM, prompt: Any, **params: Any):
    return offline.generate(prompt, SamplingParams(**params))[0].outputs[0]


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_text_prompt_is_the_offline_text(client, offline):
    got = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    assert got.choices[0].text == said(offline, PROMPT, max_tokens=20, temperature=0).text
    assert got.choices[0].finish_reason == "length"
    assert got.object == "text_completion" and got.model == "tiny"
    assert got.usage.completion_tokens == 20 and got.usage.prompt_tokens == len(offline.get_tokenizer().encode(PROMPT))
    assert got.usage.total_tokens == got.usage.prompt_tokens + 20


@pytest.mark.parametrize("prompt", [IDS, [IDS], [IDS, [9, 9]], ["ab", "cd", "ef"]])
def test_prompts_of_every_kind(client, offline, prompt):
    many = [prompt] if isinstance(prompt[0], int) else prompt
    got = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
    assert [choice.index for choice in got.choices] == list(range(len(many)))
    for choice, each in zip(got.choices, many, strict=True):
        assert choice.text == said(offline, each, max_tokens=9, temperature=0).text


def test_default_length(client):
    assert (
        client.completions.create(model="tiny", prompt=IDS, extra_body={"ignore_eos": True}).usage.completion_tokens
        == 16
    )


def test_choices_keep_their_prompts(client, offline):
    got = client.completions.create(model="tiny", prompt=[IDS, [8, 8]], n=3, seed=5, max_tokens=6)
    for place, prompt in enumerate([IDS, [8, 8]]):
        expected = offline.generate([prompt], SamplingParams(n=3, seed=5, max_tokens=6))[0]
        texts = [choice.text for choice in got.choices[3 * place : 3 * place + 3]]
        assert texts == [output.text for output in expected.outputs]


# -- sampling ----------------------------------------------------------------------------------------------------------

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 3, "temperature": 0.7},
    {"seed": 3, "top_p": 0.5},
    {"seed": 4, "top_k": 5},
    {"seed": 4, "min_p": 0.2},
    {"seed": 5, "presence_penalty": 1.5},
    {"seed": 5, "frequency_penalty": 1.5},
    {"seed": 5, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {"77": 100}},
    {"seed": 6, "allowed_token_ids": [70, 71, 72]},
    {"seed": 6, "bad_words": ["a", "e"]},
    {"temperature": 0.0, "min_tokens": 18},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "stop_token_ids": [70, 80, 90, 100, 110]},
    {"seed": 7, "speculation": False},
    {"seed": 7, "max_draft": 1},
    {"seed": 7, "acceptance": "coupled"},
    {"temperature": 0.0, "skip_special_tokens": False},
    {"seed": 8, "priority": -5},
    {"seed": 8, "slo_tpot": 5.0},
]


@pytest.mark.parametrize("fields", SAMPLING, ids=lambda f: "-".join(f))
def test_sampling_fields_do_what_they_do_offline(server, offline, fields):
    body = server.complete(IDS, max_tokens=20, **fields)
    own = (
        {**fields, "logit_bias": {int(k): v for k, v in fields["logit_bias"].items()}}
        if "logit_bias" in fields
        else fields
    )
    expected = said(offline, IDS, max_tokens=20, **own)
    assert body["choices"][0]["text"] == expected.text
    assert body["choices"][0]["finish_reason"] == expected.finish_reason
    assert body["choices"][0]["stop_reason"] == expected.stop_reason
    if fields.get("speculation") is False:
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(server, offline, stream, include):
    whole = said(offline, IDS, max_tokens=40, temperature=0).text
    stop = whole[7:9]
    fields = {"max_tokens": 40, "temperature": 0, "stop": ["never", stop], "include_stop_str_in_output": include}
    expected = said(offline, IDS, **fields)
    if stream:
        _, text, _ = server.post("/v1/completions", {"prompt": IDS, "stream": True, **fields})
        parts = [event["choices"][0] for event in events(text)]
        got = {
            "text": "".join(part["text"] for part in parts),
            **{k: parts[-1][k] for k in ("finish_reason", "stop_reason")},
        }
    else:
        got = server.complete(IDS, **fields)["choices"][0]
    assert (got["text"], got["finish_reason"], got["stop_reason"]) == (expected.text, "stop", stop)
    assert stop not in got["text"] or include


# -- streams -----------------------------------------------------------------------------------------------------------


def test_stream_is_the_whole_text_in_pieces(client, offline):
    parts = list(client.completions.create(model="tiny", prompt=IDS, max_tokens=30, temperature=0, stream=True))
    assert len(parts) > 3
    expected = said(offline, IDS, max_tokens=30, temperature=0)
    assert "".join(part.choices[0].text for part in parts) == expected.text
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["length"]


def test_stream_usage(client):
    options = {"include_usage": True}
    parts = list(
        client.completions.create(
            model="tiny", prompt=IDS, max_tokens=12, temperature=0, stream=True, stream_options=options
        )
    )
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 12
    assert all(part.usage is None for part in parts[:-1])


def test_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "stream": True,
        "stream_options": options,
    }
    _, text, _ = server.post("/v1/chat/completions", {**body, "ignore_eos": True})
    counts = [event["usage"]["completion_tokens"] for event in events(text)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 12


def test_stream_of_several_choices(client, offline):
    parts = client.completions.create(model="tiny", prompt=[IDS, [8, 8]], n=2, seed=5, max_tokens=8, stream=True)
    texts = [""] * 4
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    expected = [offline.generate([p], SamplingParams(n=2, seed=5, max_tokens=8))[0].outputs for p in (IDS, [8, 8])]
    assert texts == [output.text for outputs in expected for output in outputs]


# -- logprobs ----------------------------------------------------------------------------------------------------------


def test_completion_logprobs(client, offline):
    got = client.completions.create(model="tiny", prompt=IDS, max_tokens=5, temperature=0, logprobs=3).choices[0]
    expected = said(offline, IDS, max_tokens=5, temperature=0, logprobs=3)
    chosen = [row[token].logprob for token, row in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert got.logprobs.token_logprobs == pytest.approx(chosen)
    assert all(
        max(top.values()) == pytest.approx(own) for top, own in zip(got.logprobs.top_logprobs, chosen, strict=True)
    )
    assert all(len(top) == 3 for top in got.logprobs.top_logprobs)
    assert len(got.logprobs.tokens) == len(got.logprobs.text_offset) == 5


def test_streamed_logprobs_are_the_same(server):
    fields = {"max_tokens": 10, "temperature": 0, "logprobs": 2}
    whole = server.complete(IDS, **fields)["choices"][0]["logprobs"]
    _, text, _ = server.post("/v1/completions", {"prompt": IDS, "stream": True, **fields})
    parts = [event["choices"][0]["logprobs"] for event in events(text)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole[name]


def test_chat_logprobs(client):
    got = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = got.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt(server, offline, max_tokens):
    """What lm-eval asks: token ids in, the logprob of each of them out."""
    body = server.complete([IDS], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1)
    got = body["choices"][0]["logprobs"]
    rows = offline.generate([IDS], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))[0].prompt_logprobs
    expected = [row[token].logprob for token, row in zip(IDS[1:], rows[1:], strict=True)]
    assert got["token_logprobs"][0] is None
    assert got["token_logprobs"][1 : len(IDS)] == pytest.approx(expected)
    assert len(got["tokens"]) == len(IDS) + max_tokens
    for token, top in zip(got["tokens"][1:], got["top_logprobs"][1:], strict=True):
        assert token in top
    assert body["usage"]["completion_tokens"] == max_tokens


def test_echo_without_logprobs(server, offline):
    body = server.complete(PROMPT, echo=True, max_tokens=4, temperature=0)
    assert body["choices"][0]["text"] == PROMPT + said(offline, PROMPT, max_tokens=4, temperature=0).text


def test_prompt_logprobs_as_vllm_has_them(server):
    rows = server.complete(IDS, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(IDS)
    assert all(str(token) in row for token, row in zip(IDS[1:], rows[1:], strict=True))


def test_token_ids_come_back(server):
    fields = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    whole = server.complete(IDS, **fields)["choices"][0]
    assert whole["prompt_token_ids"] == IDS and len(whole["token_ids"]) == 12
    _, text, _ = server.post("/v1/completions", {"prompt": IDS, "stream": True, **fields})
    parts = [event["choices"][0] for event in events(text)]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, **fields}
    answer = server.post("/v1/chat/completions", chat)[1]["choices"][0]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) and len(answer["token_ids"]) == 12


# -- chat --------------------------------------------------------------------------------------------------------------


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


def test_the_last_message_can_be_continued(server, offline):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well then"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    status, answer, _ = server.post("/v1/chat/completions", {**body, "max_tokens": 5, "temperature": 0})
    text = offline.get_tokenizer().apply_chat_template(messages, add_generation_prompt=False).removesuffix("</s>")
    ids = offline.get_tokenizer().encode(text, add_special_tokens=False)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == said(offline, ids, max_tokens=5, temperature=0).text


def test_to_the_end_of_the_context(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
    _, answer, _ = server.post("/v1/chat/completions", body)
    assert answer["usage"]["total_tokens"] == 400 and answer["choices"][0]["finish_reason"] == "length"


# -- constrained output ------------------------------------------------------------------------------------------------

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
    for seed in range(4):
        text = server.complete(IDS, response_format={"type": "json_object"}, max_tokens=150, seed=seed, temperature=0.5)
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
    import re

    for sampling in ({"temperature": 0}, {"seed": 3}, {}):
        choice = server.complete(IDS, max_tokens=40, **fields, **sampling)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] in allowed if allowed else re.fullmatch("[ab]{3}-[0-9]", choice["text"])


def test_speculation_does_not_change_constrained_text(server):
    form = {"response_format": {"type": "regex", "pattern": "([a-z]{1,4} ){20}"}, "max_tokens": 100}
    for sampling in ({"temperature": 0}, {"seed": 3}, {"seed": 9, "temperature": 0.6}):
        texts = [server.complete(IDS, **form, **sampling, speculation=on)["choices"][0]["text"] for on in (True, False)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
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


# -- speculation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_speculation_is_told(server, stream):
    body = {"prompt": IDS, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    _, answer, _ = server.post("/v1/completions", body)
    final = events(answer)[-1] if stream else answer
    spec = final["metrics"]["speculative_decoding"]
    histogram = spec["acceptance_histogram"]
    assert spec["num_spec_tokens"] == 3 and len(histogram) == 4
    assert sum(histogram) == spec["num_spec_steps"] > 0
    assert sum(j * count for j, count in enumerate(histogram)) == spec["num_accepted_draft_tokens"] > 0
    assert spec["draft_acceptance_rate"] == pytest.approx(spec["num_accepted_draft_tokens"] / spec["num_draft_tokens"])
    mean = 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    assert spec["mean_acceptance_length"] == pytest.approx(mean)


# -- other endpoints ---------------------------------------------------------------------------------------------------


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_tokens(server, offline):
    tokenizer = offline.get_tokenizer()
    _, body, _ = server.post("/tokenize", {"model": "tiny", "prompt": PROMPT, "return_token_strs": True})
    assert body["tokens"] == tokenizer.encode(PROMPT) and body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 400 and len(body["token_strs"]) == body["count"]
    assert server.post("/detokenize", {"tokens": body["tokens"]})[1] == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "hi"}]
    assert server.post("/tokenize", {"messages": messages})[1]["tokens"] == offline.render(messages)
    info = server.get("/tokenizer_info")[1]
    assert info["eos_token"] == "</s>" and "messages" in info["chat_template"]


def test_state(server):
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    assert server.get("/version")[1]["version"]
    status, page, _ = server.get("/")
    assert status == 200 and "/docs" in page and "/metrics" in page
    assert "curl" in server.curl and str(server.port) in server.curl


def test_metrics_count(server):
    before = server.idle()
    server.complete(IDS, max_tokens=30, temperature=0, ignore_eos=True)
    after = server.idle()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("vllm:generation_tokens_total") == 30 and grown("vllm:prompt_tokens_total") == len(IDS)
    drafts, tokens = grown("vllm:spec_decode_num_drafts_total"), grown("vllm:spec_decode_num_draft_tokens_total")
    assert 0 < drafts <= tokens
    positions = [n for n in after if n.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    assert sum(map(grown, positions)) == grown("vllm:spec_decode_num_accepted_tokens_total")
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert grown(name + "_count") == 1 and grown(name + "_sum") > 0
    assert grown("vllm:request_time_per_output_token_seconds_count") == 1
    for name in (
        'verifypd:lane_depth{lane="verify"}',
        'verifypd:lane_wait_seconds{lane="decode",quantile="0.95"}',
        'verifypd:lane_seconds_total{lane="verify"}',
        "verifypd:draft_length_count",
        "verifypd:architecture_switches_total",
        'verifypd:kv_blocks{pool="draft",state="free"}',
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "verifypd:requests_within_slo_total",
        "verifypd:step_seconds_count",
    ):
        assert name in after, name


def test_prefix_cache_is_told(server):
    prompt = [11 + i % 50 for i in range(64)]
    server.complete(prompt, max_tokens=1)
    assert server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


# -- what is refused, and how ------------------------------------------------------------------------------------------

NEUTRAL: list[dict[str, Any]] = [
    {"user": "ann", "metadata": {"a": "b"}},
    {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
    {"suffix": None, "logit_bias": {}, "stop": None, "stream_options": None, "response_format": {"type": "text"}},
    {"spaces_between_special_tokens": True, "detokenize": True, "return_tokens_as_token_ids": False},
    {"n": None, "temperature": None, "top_p": None, "max_tokens": None, "seed": None},
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
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields, **more}
    assert server.post("/v1/chat/completions", body)[0] == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "end"}, "suffix"),
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
    ({"stop_token_ids": [4000]}, "stop_token_ids"),
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
    ({"guided_regex": "a", "guided_choice": ["b"]}, "response_format"),
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


DEEP_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
LONG_GRAMMAR = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2800)) + 'r2800: "x"\n'
CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
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
]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED)
def test_chat_names_what_it_refuses(server, fields, param):
    status, body, _ = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert status == 400 and body["error"]["param"] == param, body


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
    assert server.get("/v1/nothing")[0] == 404 and "error" in server.get("/v1/nothing")[1]
    status, body, headers = server.get("/v1/completions")
    assert status == 405 and body["error"]["code"] == "method_not_allowed" and "POST" in headers["allow"]


def test_request_ids(server):
    _, _, headers = server.post("/v1/completions", {"prompt": IDS}, **{"X-Request-Id": "my-own-7"})
    assert headers["x-request-id"] == "my-own-7"
    _, _, headers = server.post("/v1/completions", {"prompt": IDS}, **{"X-Request-Id": "bad id"})
    assert headers["x-request-id"] != "bad id" and len(headers["x-request-id"]) == 32
    text = server.log.read_text()
    assert "my-own-7" in text


def test_no_prompt_in_the_log(server):
    server.complete("a very secret thing", max_tokens=2)
    assert "secret thing" not in server.log.read_text()


def test_logprobs_are_finite_json(server):
    body = server.complete(IDS, logprobs=20, max_tokens=6, allowed_token_ids=[5, 6], temperature=0)
    values = [v for top in body["choices"][0]["logprobs"]["top_logprobs"] for v in top.values()]
    assert values and all(math.isfinite(value) for value in values)
