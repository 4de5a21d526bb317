"""A model that only spells, and what runs a command over it in this process."""

from __future__ import annotations

import io
import sys

from verifypd import cli
from verifypd.config import EngineConfig
from verifypd.errors import RequestError
from verifypd.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams


class Speller:
    """Stands in for LLM: continues a prompt with the letters of `text`, one a step."""

    def __init__(self, text: str = "abc déf", on_step=None) -> None:
        self.text = text
        self.on_step = on_step or (lambda step: None)
        self.settings: dict = {}
        self.params: SamplingParams | None = None
        self.seen: list = []
        self.closed = 0
        self.aborted = 0

    def __call__(self, settings: dict) -> Speller:
        EngineConfig.from_kwargs(**settings)
        self.settings = settings
        return self

    def __enter__(self) -> Speller:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def output(self, prompt: str, length: int, params: SamplingParams) -> RequestOutput:
        done = length == len(self.text)
        choices = [
            CompletionOutput(i, self.text[:length], list(range(length)), "length" if done else None)
            for i in range(params.n)
        ]
        metrics = RequestMetrics(drafted=8, accepted=6, emitted=9, passes=3, span_emitted=9, spans=3)
        return RequestOutput("r", prompt, [1], choices, done, metrics=metrics)

    def generate(self, prompts, params):
        self.seen, self.params = list(prompts), params
        return [self.output(prompt, len(self.text), params) for prompt in prompts]

    def stream(self, prompt, params):
        self.seen = [prompt]
        return self.steps(prompt, params)

    def steps(self, prompt, params):
        self.params = params
        try:
            for length in range(1, len(self.text) + 1):
                self.on_step(length)
                yield self.output(prompt, length, params)
        except GeneratorExit:
            self.aborted += 1
            raise

    def stream_chat(self, messages, params, *, special_tokens_in_content):
        self.special = special_tokens_in_content
        self.seen = [dict(m) for m in messages]
        if "too long" in messages[-1]["content"]:
            raise RequestError("the prompt has 9000 tokens, the model takes 8192")
        return self.steps(messages[-1]["content"], params)


def feed(monkeypatch, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def run(*args: str) -> int:
    return cli.main(list(args))
