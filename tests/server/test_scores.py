"""Logprobs, prompt scoring and token ids, in both APIs."""

from __future__ import annotations

import pytest

from tests.server.inprocess import answering, api
from tests.server.samples import IDS, PROMPT, said
from tests.server.serving import events
from verifypd import SamplingParams

pytestmark = pytest.mark.xdist_group("server")


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


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_into_the_text_where_tokens_are_parts_of_characters(server, tokenizer, echo):
    prompt = tokenizer.encode("ä<s>世", add_special_tokens=False)
    form = {"guided_regex": "(é|世|🙂|a){12}", "max_tokens": 60, "seed": 5, "logprobs": 0}
    choice = server.complete([prompt], echo=echo, **form)["choices"][0]
    text, scores = choice["text"], choice["logprobs"]
    parts = [token for token in scores["tokens"] if token.startswith("bytes:")]
    assert len(parts) > 4 and choice["finish_reason"] == "stop"
    end = 0
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        if token == "</s>":  # it ended the text, and is none of it
            assert offset == len(text)
        elif token.startswith("bytes:"):
            assert bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) in text[offset].encode()
            end = offset + 1
        else:
            assert offset == end and text.startswith(token, offset)
            end = offset + len(token)
    assert end == len(text)


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


def test_streamed_chat_logprobs_are_the_same(server):
    fields = {"max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    whole = server.post("/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    parts = [event["choices"][0] for event in events(server.post("/v1/chat/completions", {**body, "stream": True})[1])]
    assert [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]] == whole
    assert len(whole) == 10


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_that_is_repeated_without_logprobs_has_them_as_vllm_does(server, stream, max_tokens):
    fields = {"prompt": IDS, "prompt_logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    alone = server.complete(**{**fields, "max_tokens": 2})["choices"][0]
    _, answer, _ = server.post("/v1/completions", {**fields, "echo": True, "stream": stream})
    [choice] = (events(answer)[0] if stream else answer)["choices"]
    assert choice["prompt_logprobs"] == alone["prompt_logprobs"] and choice["logprobs"] is None


def test_a_prompt_is_not_scored_twice(server):
    status, body, _ = server.post("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 1, "prompt_logprobs": 2})
    assert (status, body["error"]["param"]) == (400, "prompt_logprobs")


def test_a_chat_whose_first_words_are_held_back_still_scores_its_prompt(server):
    form = {"guided_regex": "(ab){4}c", "stop": "ababababx"}
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, **form}
    whole = server.post("/v1/chat/completions", body)[1]["choices"][0]
    parts = events(server.post("/v1/chat/completions", {**body, "stream": True})[1])
    told = [choice["prompt_logprobs"] for part in parts for choice in part["choices"] if "prompt_logprobs" in choice]
    assert whole["message"]["content"] == "ababababc" and told == [whole["prompt_logprobs"]]


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


@pytest.mark.parametrize("stream", [False, True])
def test_where_no_token_is_asked_for_none_is_shown(server, stream):
    """The engine draws one to score a prompt; usage says 0, and so does everything else."""
    fields = {"return_token_ids": True, "return_token_origins": True, "stop_token_ids": list(range(384))}
    body = {"prompt": IDS, "max_tokens": 0, "echo": True, "stream": stream, **fields}
    _, answer, _ = server.post("/v1/completions", body)
    [choice] = (events(answer)[0] if stream else answer)["choices"]
    assert choice["token_ids"] == [] and choice["token_origins"] == [] and choice["prompt_token_ids"] == IDS
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_a_prompt_that_was_not_scored_in_time_says_so(tokenizer):
    bridge, _ = answering(tokenizer, [], None)
    body = {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 0, "deadline_ms": 300}
    with api(tokenizer, bridge) as made:
        [choice] = made.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "deadline"
