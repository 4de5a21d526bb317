"""No stream is lost with the engine: whatever it asked for, it goes on after the restart, to the very same text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.server.clients import Stream, together
from tests.server.frail import PROMPTS, body
from tests.server.inprocess import INFO, connected
from tests.server.serving import Server
from verifypd.request import SamplingParams
from verifypd.server.calls import Ask, Call, added
from verifypd.server.messages import Answer, Begun, Down, Output, Outputs, Submit, Up
from verifypd.tokenizer import Tokenizer


def form(letters: int) -> dict[str, Any]:
    """A response format: an object with a name of so many letters, or a third more."""
    name = {"type": "string", "minLength": letters, "maxLength": letters * 4 // 3}
    schema = {
        "type": "object",
        "properties": {"name": name, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


RESTARTS = "verifypd:engine_restarts_total"
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 7}

# What is asked of each of the eight, beside a prompt of its own.
ASKED: list[dict[str, Any]] = [
    {},
    {"ignore_eos": False, "max_tokens": 300},  # with a schema
    {**SAMPLED, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {**SAMPLED, "n": 2},
    {"logprobs": 3, "return_token_origins": True},
    {},  # with stop strings, which are chosen from what it says
    {**SAMPLED, "logit_bias": {"40": -3.0, "41": 2.0}, "return_token_ids": True},
    {"prompt_logprobs": 1},
]


class Eight:
    """The eight requests, and what each answers when nothing breaks."""

    def __init__(self, server: Server, tokens: int = 150, letters: int = 60) -> None:
        """`tokens`: of each, but for the one that ends when its JSON does, with a name of so many `letters`."""
        self.letters = letters
        self.bodies = [body(i, **{"max_tokens": tokens, **more}) for i, more in enumerate(ASKED)]
        self.bodies[1]["response_format"] = form(letters)
        self.bodies[6]["min_tokens"] = tokens * 2 // 3
        said = server.complete(**self.bodies[5])["choices"][0]["text"]
        late = next(at for at in range(len(said) // 2, len(said)) if said.find(said[at : at + 3]) == at)
        self.bodies[5]["stop"] = [said[late : late + 3], "never said"]
        self.whole = together([partial(server.complete, **body) for body in self.bodies])

    def start(self, server: Server) -> list[Stream]:
        usage = {"stream_options": {"include_usage": True}}
        streams = [Stream(server, {**body, **usage}).start() for body in self.bodies]
        return [stream.begun() for stream in streams]

    def check(self, streams: list[Stream]) -> None:
        for place, (stream, whole) in enumerate(zip(streams, self.whole, strict=True)):
            stream.join()
            assert stream.error is None and stream.done, f"stream {place}: {stream.error}"
            for expected in whole["choices"]:
                got = [c for part in stream.parts for c in part["choices"] if c["index"] == expected["index"]]
                assert "".join(c["text"] for c in got) == expected["text"], f"stream {place}"
                assert got[-1]["finish_reason"] == expected["finish_reason"]
                assert got[-1]["stop_reason"] == expected["stop_reason"]
                self._check_extras(got, expected)
            counted = stream.parts[-1]["usage"]["completion_tokens"]
            assert counted == whole["usage"]["completion_tokens"], f"stream {place}"
        said = json.loads(streams[1].text)
        assert said.keys() == {"name", "age"}, "the schema holds across engines"
        assert self.letters <= len(said["name"]) <= self.letters * 4 // 3

    def _check_extras(self, got: list[dict[str, Any]], expected: dict[str, Any]) -> None:
        """Every token's logprobs, id and origin is told once, in order."""
        scores = expected.get("logprobs")
        if scores is not None:
            for field in ("tokens", "text_offset"):
                assert [x for c in got for x in c["logprobs"][field]] == scores[field]
            values = [x for c in got for x in c["logprobs"]["token_logprobs"]]
            assert values == pytest.approx(scores["token_logprobs"], abs=1e-3)
            origins = [o["text_offset"] for c in got for o in c["token_origins"]]
            assert origins == [o["text_offset"] for o in expected["token_origins"]]
        if "token_ids" in expected:
            assert [x for c in got for x in c["token_ids"]] == expected["token_ids"]
        if "prompt_logprobs" in expected:
            assert [c["prompt_logprobs"] for c in got if "prompt_logprobs" in c] == [expected["prompt_logprobs"]]


@pytest.fixture(scope="module")
def eight(frail: Server) -> Eight:
    return Eight(frail)


@pytest.mark.slow
def test_eight_streams_outlive_the_engine(frail: Server, eight: Eight) -> None:
    """SIGKILL in mid-stream, twice: all eight end with exactly the text of an undisturbed run."""
    before = frail.metrics()[RESTARTS]
    streams = eight.start(frail)
    for death in (1, 2):
        assert not any(stream.done for stream in streams), "the engine must die under all of them"
        os.kill(frail.children()["engine"], signal.SIGKILL)
        until = time.monotonic() + 60
        while frail.metrics()[RESTARTS] < before + death:
            assert time.monotonic() < until, "no engine came back"
            time.sleep(0.01)
        lengths = [len(stream.parts) for stream in streams]
        while any(len(stream.parts) == length for stream, length in zip(streams, lengths, strict=True)):
            assert time.monotonic() < until, "a stream does not go on"
            time.sleep(0.005)
    eight.check(streams)
    now = frail.idle()
    assert now[RESTARTS] == before + 2 and now["verifypd:calls_taken_up_total"] >= 8


# -- the bridge alone -------------------------------------------------------------------------------------------------


async def opened(bridge: Any, heard: list[Any], ask: Ask) -> Call:
    opening = asyncio.ensure_future(bridge.open("r", ask, time.monotonic()))
    await asyncio.sleep(0)
    bridge.take(Answer(1, heard[-1].call))
    return await opening


def output(call: Call, choice: int, tokens: list[int], finish: str | None = None, spec: Any = ()) -> Output:
    return Output(call.number, choice, tokens, finish, None, list(spec))


def test_a_call_says_where_each_open_choice_stands(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        bridge, heard = connected(tokenizer)
        ask = Ask([[5, 6], [7, 8]], SamplingParams(max_tokens=20, n=2), [0, 1])
        call = await opened(bridge, heard, ask)
        assert heard[-1].begun is None
        assert [begun.choice for begun in heard[-1].open] == [0, 1, 2, 3]
        first, ended = [2, 6, 4, 8, 3, 2, 2], [1, 1, 1, 2, 0, 1]
        bridge.take(Outputs(1, [output(call, 0, [70, 71], None, first), output(call, 2, [72], "stop", ended)]))
        bridge.take(Down(1, "killed"))
        bridge.take(Outputs(1, [output(call, 1, [99])]))  # of the dead: too late
        bridge.take(Up(2, "there", INFO))
        assert isinstance(heard[-1], Submit)
        assert heard[-1].open == [Begun(0, [70, 71]), Begun(1, []), Begun(3, [])]
        bridge.take(Outputs(2, [output(call, 0, [73], "length", [1, 3, 1, 2, 9, 1, 0, 1])]))
        assert call.choices[0].request.output_ids == [70, 71, 73] and call.left == 2
        assert call.choices[0].spec == [3, 9, 5, 10, 3, 3, 2, 1], "of both engines; the prompt was cached in the first"

    asyncio.run(run())


def test_speculation_of_an_engine_that_gave_nothing_is_not_added() -> None:
    assert added([], [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


def test_a_call_under_which_too_many_engines_die_ends_and_others_go_on(tokenizer: Tokenizer) -> None:
    """It may be what kills them. `retries` is 2: the third death is too many."""

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        ask = Ask([[5, 6]], SamplingParams(max_tokens=20), [0])
        old = await opened(bridge, heard, ask)
        for epoch in (1, 2, 3):
            assert not old.done
            if epoch == 3:
                young = asyncio.ensure_future(bridge.open("young", ask, time.monotonic()))
                await asyncio.sleep(0)
                bridge.take(Answer(3, heard[-1].call))
            bridge.take(Outputs(epoch, [output(old, 0, [70])]))
            bridge.take(Down(epoch, "killed"))
            bridge.take(Up(epoch + 1, "there", INFO))
        assert old.error is not None and old.error.code == "engine_lost" and old.choices[0].tokens == 3
        assert (await young).error is None and heard[-1].call == young.result().number

    asyncio.run(run())


def test_deaths_of_long_ago_are_not_held_against_a_call(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine dies under it every hour, five times; then three die within a minute, which is too often."""
    now = [1000.0]
    monkeypatch.setattr("verifypd.server.bridge.time.monotonic", lambda: now[0])

    async def run() -> None:
        bridge, heard = connected(tokenizer)
        call = await opened(bridge, heard, Ask([[5, 6]], SamplingParams(max_tokens=20), [0]))
        for epoch in range(1, 9):
            assert not call.done
            now[0] += 3600 if epoch < 6 else 10
            bridge.take(Outputs(epoch, [output(call, 0, [70])]))
            bridge.take(Down(epoch, "killed"))
            bridge.take(Up(epoch + 1, "there", INFO))
            assert bool(call.error) == (epoch == 7), "the fifth, and two that came soon after it"
            if call.error is not None:
                break
        assert call.error is not None and call.error.code == "engine_lost" and call.tries == 7

    asyncio.run(run())


def test_a_call_that_was_never_let_in_is_asked_anew(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        bridge, heard = connected(tokenizer)
        opening = asyncio.ensure_future(bridge.open("r", Ask([PROMPTS[0]], SamplingParams(), [0]), time.monotonic()))
        await asyncio.sleep(0)
        bridge.take(Down(1, "killed"))
        bridge.take(Up(2, "there", INFO))
        assert heard[-1].begun is None, "admission has yet to look at it"
        opening.cancel()

    asyncio.run(run())
