"""Engines, options, schedules and faults drawn at random: every request ends as plain decoding has it, nothing leaks.

Two seeds run with the other tests; `make soak` draws new ones for ten minutes and names the seed that fails.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_grammar import Steps
from tests.models.checkpoints import VOCAB
from verifypd import LLM, SamplingParams
from verifypd.config import ARCHITECTURES
from verifypd.engine.llm import _Job
from verifypd.request import Logprob, RequestOutput
from verifypd.sampling.grammar import GrammarState

LONG = 600.0  # s
LIMIT = 96  # tokens of a request
STEPS = 6000  # in which everybody must have ended
EXACT: dict[str, Any] = {"dtype": "float32", "measure_costs": False, "max_model_len": LIMIT}
DRAFTERS = ("ngram", "model", "head", "model,ngram", "head,ngram")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "arch": ARCHITECTURES, "controller": ("fixed", "threshold", "throughput"), "max_draft": (1, 3, 6, 33),
    "batch_size": (1, 2, 4, 8), "queue_factor": (1.0, 1.5, 2.0), "kv_memory": (400_000, 700_000, 32 << 20),
    "block_size": (1, 4, 8), "prefill_chunk": (1, 5, 11, 256), "draft_chunk": (2, 12, 1024),
    "prefix_cache": (True, True, False), "late_tickets": (True, False), "sampler": ("auto", "torch"),
    "placement": ("fused", "prefill=stream"), "acceptance": ("rejection", "coupled"),
    "draft_temperature": (None, 0.1, 10.0), "slo_gap": (0.0, 0.01, 1e5),
}  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "top_p": (0.1, 0.6, 0.95), "top_k": (1, 3, 20), "min_p": (0.05, 0.5), "presence_penalty": (-2.0, 0.7),
    "frequency_penalty": (-1.0, 2.0), "repetition_penalty": (0.5, 1.3), "logit_bias": ({5: 100.0}, {7: 3.0, 1: -100.0}),
    "allowed_token_ids": ([92], list(range(40, 99))), "bad_words": (["e", "the"], ["zzzz"]), "min_tokens": (1, 5),
    "stop_token_ids": ([60], list(range(100, 160))), "ignore_eos": (True,), "logprobs": (0, 3, 20),
    "prompt_logprobs": (0, 2, 20), "n": (2, 3), "include_stop_str_in_output": (True,), "speculation": (False,),
    "max_draft": (0, 1, 40), "draft_temperature": (0.1, 4.0), "priority": (-1, 1), "token_origins": (True,),
}  # fmt: skip
CERTAIN: tuple[dict[str, Any], ...] = ({"top_k": 1}, {"top_p": 1e-7}, {"min_p": 1.0})


@dataclass
class Asked:
    """A request, when it comes and, where it leaves, when."""

    prompt: list[int]
    params: SamplingParams
    follows: bool  # a grammar
    at: int  # step
    leaves: int | None  # steps after it came


def settings(dice: random.Random) -> dict[str, Any]:
    """Of an engine. A small pool holds few requests at once."""
    chosen = {name: dice.choice(values) for name, values in SETTINGS.items()} | EXACT
    if chosen["arch"] in ("pdv", "table"):
        chosen |= {"verify_batch": dice.randint(1, chosen["batch_size"]), "verify_wait_ms": 1.0}
    return chosen


def requests(dice: random.Random, texts: list[list[int]]) -> list[Asked]:
    """Prompts of a few tokens that repeat and share beginnings, or that go on with earlier texts; greedy, with a seed,
    or such that no draw matters."""
    stem = [dice.randrange(3, VOCAB) for _ in range(4)] * 20
    made = []
    for _ in range(dice.randint(1, 10)):
        before = dice.choice(texts) if texts and dice.random() < 0.4 else stem[: dice.randint(1, 70)]
        prompt = (before + dice.choices(stem[:4], k=dice.choice((0, 1, 5))))[: LIMIT - 1]
        chosen = {name: dice.choice(values) for name, values in OPTIONS.items() if dice.random() < 0.25}
        drawn = {"seed": dice.randrange(4), "temperature": dice.choice((0.5, 1.0))}
        chosen |= dice.choice(({"temperature": 0.0}, {"temperature": 0.0}, drawn, drawn, dice.choice(CERTAIN)))
        params = SamplingParams(max_tokens=dice.choice((5, 8, 20, None)), **chosen)
        leaves = dice.randint(0, 20) if dice.random() < 0.15 else None
        made.append(Asked(prompt, params, dice.random() < 0.15, dice.choice((0, 0, dice.randint(0, 25))), leaves))
    return made


def submit(llm: LLM, asked: Asked) -> _Job:
    [job] = llm._submit([asked.prompt], [asked.params])
    for text in job.texts if asked.follows else ():
        text.request.grammar = GrammarState(Steps(), len(asked.prompt))
    return job


def alone(plain: LLM, asked: Asked) -> RequestOutput:
    """What plain decoding gives a request by itself."""
    job = submit(plain, asked)
    while not job.finished:
        plain._step()
    return job.output()


def with_stop(dice: random.Random, plain: LLM, asked: Asked) -> Asked:
    """One in three is to stop at a string that it would write."""
    text = alone(plain, asked).outputs[0].text if dice.random() < 0.3 else ""
    at = dice.randrange(len(text)) if text else 0
    return replace(asked, params=replace(asked.params, stop=text[at : at + dice.randint(1, 4)])) if text else asked


def close(found: list[Any] | None, expected: list[Any] | None) -> bool:
    """Whether these are the same logprobs and, where two tokens are not level, the same ranks."""
    if found is None or expected is None:
        return found is expected
    rows: list[tuple[dict[int, Logprob], dict[int, Logprob]]] = [
        (a or {}, b or {}) for a, b in zip(found, expected, strict=True)
    ]
    pairs = [(a[token], b[token]) for a, b in rows for token in a.keys() & b.keys()]
    near = all(abs(a.logprob - b.logprob) < 1e-3 and abs(a.rank - b.rank) < 2 for a, b in pairs)
    return near and all(len(a) == len(b) and len(a.keys() - b.keys()) < 2 for a, b in rows)


def walk(dice: random.Random, llm: LLM, many: list[Asked]) -> tuple[list[_Job], bool]:
    """Everybody comes, leaves and ends, while requests give way, architectures change and, perhaps, memory runs out.

    Returns the requests, and whether memory did.
    """
    engine: Any = llm.engine
    engine.forgiving, odds, broke = True, dice.choice((0.0, 0.0, 0.05)), False
    jobs: dict[int, _Job] = {}

    def unsound(work: Any) -> Any:
        def tried(*args: Any, **more: Any) -> Any:
            if dice.random() < odds:
                raise MemoryError("injected")
            return work(*args, **more)

        return tried

    places = ((engine.verify, "launch"), (engine.decode, "launch"), (engine.sampling, "assign"))
    for target, name in places:
        setattr(target, name, unsound(getattr(target, name)))
    for step in range(STEPS):
        for place, asked in enumerate(many):
            if asked.at == step:
                jobs[place] = submit(llm, asked)
            elif asked.leaves is not None and asked.at + asked.leaves == step:
                llm._drop([jobs[place]])
        running = [r for r in engine.running.values() if not (r.finished or r.preempting)]
        if running and dice.random() < 0.03:
            engine.residents.preempt(dice.choice(running))
        if dice.random() < 0.03 and engine.drafter is not None:
            llm.switch_architecture(dice.choice(ARCHITECTURES))
        try:
            llm._step()
        except MemoryError:
            broke = True
            for text in [text for job in jobs.values() for text in job.texts if text.update()]:
                engine.finish(text.request, "stop", text.stopped_by)
        engine.check()
        if len(jobs) == len(many) and not engine.busy:
            break
    for target, name in places:
        delattr(target, name)
    assert not engine.busy, "every request must end"
    assert not engine.verify.grammars and not engine.verify.shown and not engine.sampling.alive.any()
    return [jobs[place] for place in range(len(many))], broke


def soak(plain: LLM, pair: tuple[Path, Path], seed: int) -> None:
    """One engine and three crowds."""
    dice = random.Random(seed)
    folders = {"model": str(pair[1]), "head": str(pair[0].parent / "head"), "ngram": "ngram"}
    draft = ",".join(folders[name] for name in dice.choice(DRAFTERS).split(","))
    with LLM(str(pair[0]), draft=draft, **settings(dice)) as llm:
        texts: list[list[int]] = []
        for _ in range(3):
            many = [with_stop(dice, plain, asked) for asked in requests(dice, texts)]
            expected = [alone(plain, asked) for asked in many]
            texts = [[*asked.prompt, *whole.outputs[0].token_ids] for asked, whole in zip(many, expected, strict=True)]
            jobs, broke = walk(dice, llm, many)
            for job, complete in zip(jobs, expected, strict=True):
                told = job.output()
                if told.outputs[0].token_ids:
                    assert close(told.prompt_logprobs, complete.prompt_logprobs)
                for found, whole in zip(told.outputs, complete.outputs, strict=True):
                    size = len(found.token_ids)
                    assert found.token_ids == whole.token_ids[:size]
                    assert close(found.logprobs, whole.logprobs and whole.logprobs[:size])
                    if found.finish_reason == "abort" or (broke and found.finish_reason == "error"):
                        continue
                    assert (found.text, size) == (whole.text, len(whole.token_ids))
                    assert (found.finish_reason, found.stop_reason) == (whole.finish_reason, whole.stop_reason)


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(str(pair[0]), draft=None, arch="plain", prefix_cache=False, kv_memory="32MB", **EXACT) as llm:
        yield llm


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_engines_end_as_plain_decoding_does(plain: LLM, pair: tuple[Path, Path], seed: int) -> None:
    soak(plain, pair, seed)


@pytest.mark.soak
def test_drawn_engines_for_a_while(plain: LLM, pair: tuple[Path, Path]) -> None:
    end = time.monotonic() + float(os.environ.get("VERIFYPD_SOAK_SECONDS", LONG))
    seed = random.SystemRandom().getrandbits(32)
    while time.monotonic() < end:
        try:
            soak(plain, pair, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seed += 1
