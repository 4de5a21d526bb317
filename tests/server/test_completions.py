"""Prompts, sampling fields and streams of completions: what comes over HTTP is what the engine says offline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.samples import IDS, PROMPT, own, said
from tests.server.serving import events
from verifypd import SamplingParams

pytestmark = pytest.mark.xdist_group("server")

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
    {"seed": 7, "draft_temperature": 2.5},
    {"seed": 7, "acceptance": "coupled"},
    {"temperature": 0.0, "skip_special_tokens": False},
    {"seed": 8, "priority": -5},
    {"seed": 8, "slo_tpot": 5.0},
]


@pytest.mark.parametrize("fields", SAMPLING, ids=lambda f: "-".join(f))
def test_sampling_fields_do_what_they_do_offline(server, offline, fields):
    body = server.complete(IDS, max_tokens=20, **fields)
    expected = said(offline, IDS, max_tokens=20, **own(fields))
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
