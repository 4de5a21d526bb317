"""Prompts read in a process of their own: the same texts, and others go on meanwhile, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import finish, make, prompts, switch_every, texts
from tests.engine.pairs import preempt_every
from tests.engine.test_apart import START, walk
from tests.engine.test_grammar import Steps
from verifypd import LLM, SamplingParams
from verifypd.errors import ConfigError
from verifypd.lanes.hand_over import PrefillProcess
from verifypd.sampling.grammar import GrammarState

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
pytestmark = pytest.mark.xdist_group("hand-over")


def reader_of(llm: LLM) -> PrefillProcess:
    assert llm.engine.prefill is not None
    return llm.engine.prefill


def send(llm: LLM, number: int) -> None:
    peer = reader_of(llm).keeper.peer
    assert peer is not None
    os.kill(peer.process.pid, number)


def await_process(reader: PrefillProcess) -> None:
    deadline = time.monotonic() + START
    while not reader.keeper.ready:
        reader.look()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def apart(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with make(pair, "pd", placement="prefill=process", max_model_len=256) as llm:
        yield llm


def test_handed_over_prompts_give_the_texts_of_one_process(apart: LLM, plain: Any) -> None:
    """Prompts of several chunks, read beside requests that decode; every key and value came from the other process."""
    assert texts(apart, 10) == plain
    engine, reader = apart.engine, reader_of(apart)
    assert reader.handed_over == engine.stats.prompt_tokens > 100 and engine.stats.accepted
    engine.check()


def test_what_the_process_cannot_take_is_read_here(pair: tuple[Path, Path], apart: LLM, plain: Any) -> None:
    """The rest of a prompt whose beginning is shared, requests that were preempted, logprobs of a prompt."""
    reader = reader_of(apart)
    assert texts(apart, 10) == plain  # prompts whose beginnings are kept
    before, handed_over = apart.engine.stats.prompt_tokens, reader.handed_over
    assert texts(apart, 10) == plain
    assert apart.engine.stats.prompt_tokens - before > reader.handed_over - handed_over
    switch_every(apart, 7)
    preempt_every(apart, 9)
    apart.engine.inflight.delay = 1
    try:
        assert texts(apart, 10) == plain and apart.engine.stats.preemptions
    finally:
        del apart.engine.step
        apart.engine.inflight.delay = 0
        apart.engine.switch("pd")
    long = [[7, *prompts(6)[5]]]
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    with make(pair, "pd") as fused:
        [here], [there] = fused.generate(long, params), apart.generate(long, params)
    assert there.prompt_logprobs == here.prompt_logprobs and there.outputs[0].token_ids == here.outputs[0].token_ids


@pytest.mark.parametrize("end", ["paused", "killed", "silent"])
def test_a_prompt_that_waits_for_its_process_holds_up_nobody(apart: LLM, pair: tuple[Path, Path], end: str) -> None:
    """While the process is stopped others decode. Then it goes on, or the prompt is read here; nothing is lost."""
    mark = {"paused": 11, "killed": 12, "silent": 13}[end]  # a prefix that no cache has
    running, late = [mark, 5, 6, 7], [mark, 9, *prompts(6)[5]]
    reader = reader_of(apart)
    await_process(reader)
    restarts, handed = reader.keeper.restarts, reader.handed_over
    [first] = apart._submit([running], [SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)])
    walk(apart, lambda: first.texts[0].request.output_len > 3)
    assert reader.handed_over > handed
    send(apart, signal.SIGSTOP)
    [second] = apart._submit([late], [GREEDY])
    request, others = second.texts[0].request, first.texts[0].request
    walk(apart, lambda: bool(apart.engine.inflight.away))
    before, began = others.output_len, time.monotonic()
    walk(apart, lambda: others.output_len > before + 10)
    assert request.output_len == 0, "its prompt is out"
    if end == "paused":
        walk(apart, lambda: time.monotonic() > began + 2.0, pause=0.1)
        send(apart, signal.SIGCONT)
    elif end == "killed":
        send(apart, signal.SIGKILL)
    else:
        reader.silent = 0.3
    walk(apart, lambda: request.output_len > 0, pause=0.01)
    reader.silent = START
    finish(apart)
    assert reader.keeper.restarts - restarts == (end != "paused")
    with make(pair, "plain", "none") as alone:
        assert request.output_ids == alone.generate([late], GREEDY)[0].outputs[0].token_ids
    apart.engine.check()


def test_nothing_is_asked_of_the_format_of_a_request_that_has_left(apart: LLM) -> None:
    """Its prompt is still out: the pass ends without it, and a format that is closed is not followed any more."""
    await_process(reader_of(apart))
    [job] = apart._submit([[14, 9, *prompts(6)[5][:8]]], [GREEDY])
    request = job.texts[0].request
    grammar = Steps()
    request.grammar = GrammarState(grammar, request.prompt_len)
    send(apart, signal.SIGSTOP)
    try:
        walk(apart, lambda: bool(apart.engine.inflight.away))
        apart.engine.finish(request)
    finally:
        send(apart, signal.SIGCONT)
    finish(apart)
    assert not hasattr(grammar, "drafts"), "nothing was asked"
    apart.engine.check()


def test_a_head_needs_the_states_of_prompts(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="reads the verifier's states of prompts"):
        make(pair, "pd", "head", placement="prefill=process")
