"""Scores of a prompt that several choices repeat: all of them have them, and they are written down once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from tests.server.inprocess import api, connected
from tests.server.serving import Server, events
from tests.server.test_bridge import opened
from verifypd.request import SamplingParams
from verifypd.server.ask import Limits, Prepared, chat, completion
from verifypd.server.calls import Ask, CallError
from verifypd.server.chat_render import ChatRenderer
from verifypd.server.completion_render import CompletionRenderer
from verifypd.server.messages import Output, Outputs
from verifypd.server.render import TURN, Renderer
from verifypd.server.schema import ChatBody, CompletionBody
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

PROMPT = list(range(70, 110))
ROWS = [[(token, -1.0, 2), (token + 1, -0.5, 1)] for token in PROMPT[1:]]
KINDS = [(CompletionRenderer, None), (CompletionRenderer, ["text"]), (ChatRenderer, None)]


async def made(tokenizer: Tokenizer, kind: type[Renderer], echo: list[str] | None, n: int) -> tuple[Any, Any, Renderer]:
    bridge, heard = connected(tokenizer)
    ask = Ask([PROMPT], SamplingParams(max_tokens=2, n=n, logprobs=1, prompt_logprobs=1), [0])
    call = await opened(bridge, heard, ask)
    return bridge, call, kind(call, Prepared(ask, True, False, False, 1, echo=echo), "m", tokenizer, 0)


def news(call: Any, choice: int) -> Outputs:
    rows = [[(72, -1.0, 1)], [(73, -1.0, 1)]]
    return Outputs(1, [Output(call.number, choice, [72, 73], "length", None, [], rows, ROWS if choice == 0 else None)])


@pytest.mark.parametrize(("kind", "echo"), KINDS)
def test_a_choice_that_is_ahead_of_the_scores_waits_for_them(
    tokenizer: Tokenizer, kind: type[Renderer], echo: list[str] | None
) -> None:
    async def run() -> None:
        bridge, call, renderer = await made(tokenizer, kind, echo, 3)
        bridge.take(news(call, 2))
        assert renderer.news() == b""
        bridge.take(news(call, 0))
        bridge.take(news(call, 1))
        told = [event["choices"][0] for event in events((renderer.news() + renderer.closing()).decode())]
        assert sorted(choice["index"] for choice in told) == [0, 1, 2]
        if echo:
            assert {len(choice["logprobs"]["tokens"]) for choice in told} == {len(PROMPT) + 2}
            assert {len(choice["logprobs"]["text_offset"]) for choice in told} == {len(PROMPT) + 2}
        else:
            assert {len(choice["prompt_logprobs"]) for choice in told} == {len(PROMPT)}

    asyncio.run(run())


@pytest.mark.parametrize(("kind", "echo"), KINDS)
def test_a_prompt_is_spelt_for_one_choice(
    tokenizer: Tokenizer, spelt: list[int], kind: type[Renderer], echo: list[str] | None
) -> None:
    """128 choices of a prompt of 700 tokens kept everybody waiting for four seconds."""

    async def run(n: int) -> Any:
        spelt.clear()
        bridge, call, renderer = await made(tokenizer, kind, echo, n)
        for choice in range(n):
            bridge.take(news(call, choice))
        return orjson.loads(await renderer.whole())["choices"]

    [one] = asyncio.run(run(1))
    cost, many = len(spelt), asyncio.run(run(8))
    assert len(spelt) < cost + 8 * 20 < 8 * cost
    assert [{**choice, "index": 0} for choice in many] == [one] * 8


def test_others_have_their_turns_while_a_long_answer_is_written(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        bridge, call, renderer = await made(tokenizer, CompletionRenderer, None, 6)
        for choice in range(6):
            bridge.take(news(call, choice))
        writing, turns = asyncio.ensure_future(renderer.whole()), 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 6

    asyncio.run(run())


def test_scores_that_come_while_others_are_written_are_written_in_turns_too(tokenizer: Tokenizer) -> None:
    prompt = [70 + i % 40 for i in range(TURN * 3)]
    rows = [[(token, -1.0, 1)] for token in prompt[1:]]

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        ask = Ask([prompt, prompt], SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1), [0, 0])
        call = await opened(bridge, heard, ask)
        renderer = CompletionRenderer(call, Prepared(ask, True, False, False, 1, echo=None), "m", tokenizer, 0)
        bridge.take(Outputs(1, [Output(call.number, 0, [72], None, None, [], [[(72, -1.0, 1)]], rows)]))
        writing = asyncio.ensure_future(renderer.write_scores())
        await asyncio.sleep(0)
        bridge.take(Outputs(1, [Output(call.number, 1, [72], None, None, [], [[(72, -1.0, 1)]], rows)]))
        assert renderer.unwritten == call.choices
        await writing
        assert not renderer.unwritten

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}])
def test_every_choice_of_a_stream_has_the_scores(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": [*range(10, 310)], "max_tokens": 3, "n": 12, "seed": 1, **fields}
    whole = server.post("/v1/completions", body)[1]["choices"]
    parts = events(server.post("/v1/completions", {**body, "stream": True})[1])
    for choice in whole:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        if "echo" in fields:
            told = [token for part in own for token in part["logprobs"]["tokens"]]
            assert told == choice["logprobs"]["tokens"] and len(told) >= 301
        else:
            assert own[0]["prompt_logprobs"] == choice["prompt_logprobs"] and len(own[0]["prompt_logprobs"]) == 300


LIMITS = Limits(max_model_len=10_000, vocab=384, max_output_tokens=None, max_choices=128, max_scores=60_000)


def asked(**fields: Any) -> Prepared:
    return completion(CompletionBody(**fields), LIMITS, None, 0)


@pytest.mark.parametrize(
    ("fields", "most", "param"),
    [
        ({"prompt": [7] * 1000, "prompt_logprobs": 19, "n": 3}, 1000, "prompt_logprobs"),
        ({"prompt": [[7] * 500] * 6, "prompt_logprobs": 19}, 500, "prompt_logprobs"),
        ({"prompt": [7] * 600, "echo": True, "logprobs": 9, "n": 10, "max_tokens": 0}, 599, "logprobs"),
        ({"prompt": [7], "logprobs": 9, "n": 3, "max_tokens": 2000}, 2000, "logprobs"),
        ({"prompt": [[7], [8]], "logprobs": 0, "n": 10, "max_tokens": 3000}, 3000, "logprobs"),
    ],
)
def test_more_logprobs_than_one_answer_may_have(fields: dict[str, Any], most: int, param: str) -> None:
    """3,000 tokens, 128 choices and 20 alternatives made an answer of half a gigabyte."""

    def sized(size: int) -> dict[str, Any]:
        if fields.get("max_tokens"):
            return {**fields, "max_tokens": size}
        many = isinstance(fields["prompt"][0], list)
        return {**fields, "prompt": [[7] * size] * len(fields["prompt"]) if many else [7] * size}

    assert asked(**sized(most)).ask.prompts
    with pytest.raises(CallError, match="the limit is 60000") as refused:
        asked(**sized(most + 1))
    assert refused.value.status == 400 and refused.value.param == param


@pytest.mark.parametrize(("n", "most"), [(1, None), (2, 1500), (50, 60)])
def test_an_output_of_any_length_is_as_long_as_its_logprobs_have_room(
    tokenizer: Tokenizer, n: int, most: int | None
) -> None:
    body = ChatBody(messages=[{"role": "user", "content": "hi"}], n=n, logprobs=True, top_logprobs=19)
    short = replace(LIMITS, max_model_len=3000)
    ask = chat(body, short, tokenizer, None, 0).ask
    assert ask.params.max_tokens == ask.fields["max_tokens"] == most
    plain = chat(body.model_copy(update={"logprobs": False, "top_logprobs": None}), short, tokenizer, None, 0).ask
    assert plain.params.max_tokens is None
    with pytest.raises(CallError, match="min_tokens"):
        chat(body.model_copy(update={"n": 50, "min_tokens": 100}), short, tokenizer, None, 0)


def test_the_limit_is_a_setting(tokenizer: Tokenizer) -> None:
    scored = {"prompt": [70] * 10, "prompt_logprobs": 1, "n": 2}
    response = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 3, "max_output_tokens": 10}
    with api(tokenizer, max_scores=39) as client:
        for path, body, param in (
            ("/v1/completions", scored, "prompt_logprobs"),
            ("/v1/responses", response, "top_logprobs"),
        ):
            answer = client.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param and "the limit is 39" in error["message"]


@pytest.mark.parametrize("echo", [None, ["text"]])
def test_others_have_their_turns_while_the_scores_of_one_prompt_are_written(
    tokenizer: Tokenizer, echo: list[str] | None
) -> None:
    """45,000 tokens with 20 alternatives kept everybody waiting for seconds."""
    prompt = [70 + i % 40 for i in range(TURN * 6)]
    rows = [[(token, -1.0, 1)] for token in prompt[1:]]

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        ask = Ask([prompt], SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1), [0])
        call = await opened(bridge, heard, ask)
        renderer = CompletionRenderer(call, Prepared(ask, True, False, False, 1, echo=echo), "m", tokenizer, 0)
        assert not renderer.unwritten
        bridge.take(Outputs(1, [Output(call.number, 0, [72], None, None, [], [[(72, -1.0, 1)]], rows)]))
        assert renderer.unwritten == call.choices
        writing, turns = asyncio.ensure_future(renderer.write_scores()), 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 6 and not renderer.unwritten
        [told] = [event["choices"][0] for event in events(renderer.news().decode())]
        assert len(told["logprobs"]["tokens"] if echo else told["prompt_logprobs"]) == len(prompt) + bool(echo)

    asyncio.run(run())
