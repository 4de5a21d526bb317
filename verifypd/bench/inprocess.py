"""An arm that is an engine in this process: an architecture, and any settings. Knows the async API; no internals."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from verifypd.bench.arms import pairs_of
from verifypd.bench.dummy import parsed
from verifypd.bench.play import Answer, Drafts
from verifypd.bench.provenance import relative
from verifypd.bench.workload import Arrival
from verifypd.config import ARCHITECTURES, EngineConfig
from verifypd.errors import ConfigError
from verifypd.request import RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from verifypd.engine.async_llm import AsyncLLM

SECRET = ("hf_token",)


class InProcess:
    """One engine. All engines of a comparison are loaded at the same time; one of them works at a time."""

    def __init__(self, name: str, settings: dict[str, Any], vocab: int | None = None) -> None:
        """vocab: prompts that are so many random tokens are token ids below it; without it, so many words."""
        EngineConfig.from_kwargs(**settings)
        self._name = name
        self.settings = settings
        self.vocab = vocab
        self._llm: AsyncLLM | None = None
        self._drafts = Drafts()

    @property
    def name(self) -> str:
        """As given on the command line."""
        return self._name

    @property
    def spec(self) -> dict[str, Any]:
        """Its settings."""
        shown = {name: value for name, value in self.settings.items() if name not in SECRET}
        shown |= {name: relative(value) for name, value in shown.items() if isinstance(value, str)}
        return {"settings": shown, "vocab": self.vocab}

    async def start(self) -> dict[str, Any]:
        """Load the models."""
        from verifypd.engine.async_llm import AsyncLLM

        settings = {"model": EngineConfig.model, **self.settings}
        self._llm = await asyncio.to_thread(lambda: AsyncLLM(**settings))
        config = self._llm.config
        draft = None if config.draft is None else relative(config.draft)
        return {"arch": config.arch, "draft": draft, "controller": config.controller}

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Answer one request greedily, to its full length."""
        assert self._llm is not None
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
        if arrival.messages is not None:
            stream = self._llm.chat(arrival.messages, params)
        else:
            stream = self._llm.generate(arrival.text_or_ids(seed, self.vocab), params)
        seen = 0
        async with aclosing(stream) as outputs:
            async for output in outputs:
                got = len(output.outputs[0].token_ids)
                if got > seen:
                    answer.came(got - seen)
                seen = got
                if output.finished:
                    self._count(output.metrics)
                    answer.ended(got, len(output.prompt_token_ids))

    def _count(self, metrics: RequestMetrics) -> None:
        places = itertools.zip_longest(self._drafts.accepted, metrics.accepted_per_position, fillvalue=0)
        spans, tokens = self._drafts.spans + metrics.spans, self._drafts.tokens + metrics.drafted
        self._drafts = Drafts(spans, tokens, tuple(one + two for one, two in places))

    async def drafts(self) -> Drafts | None:
        """Of the requests that ended."""
        return self._drafts

    async def close(self) -> None:
        """Free the models."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)


def parse(text: str, shared: dict[str, Any], vocab: int | None = None) -> InProcess:
    """An arm from `ARCHITECTURE` or `ARCHITECTURE:SETTING=VALUE,…` over settings that all arms share.

    `plain` has no draft unless it is given one.
    """
    arch, _, given = text.partition(":")
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"--arm {text!r}: {arch!r} is no architecture; give one of {', '.join(ARCHITECTURES)}, and settings as in"
            " pdv:verify_batch=4,controller=fixed"
        )
    own = parsed(pairs_of(given, text))
    settings = {**shared, **({"draft": None} if arch == "plain" else {}), "arch": arch, **own}
    return InProcess(text, settings, vocab)
