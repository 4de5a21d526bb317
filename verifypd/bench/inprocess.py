"""An arm that is an engine in this process: an architecture, and any settings. Knows the async API; no internals."""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from verifypd.bench.arms import pairs_of
from verifypd.bench.dummy import parsed
from verifypd.bench.play import Answer, Drafts
from verifypd.bench.provenance import relative
from verifypd.bench.workload import Arrival
from verifypd.config import ARCHITECTURES, EngineConfig
from verifypd.errors import ConfigError
from verifypd.metrics.gpu import GpuSampler
from verifypd.request import RequestMetrics, SamplingParams

if TYPE_CHECKING:
    import torch

    from verifypd.engine.async_llm import AsyncLLM
    from verifypd.engine.llm import LLM

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
        self._inner: LLM | None = None  # whose books are read
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
        self._inner = await self._llm.between_steps(lambda llm: llm)
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
        self._drafts = self._drafts.plus(metrics.spans, metrics.drafted_per_position, metrics.accepted_per_position)

    async def drafts(self) -> Drafts | None:
        """Of the requests that ended."""
        return self._drafts

    def reading(self) -> dict[str, float]:
        """Seconds of each kind of batch and of all steps, plans, who is in which lane, and memory in use."""
        return {} if self._inner is None else engine_reading(self._inner)

    async def close(self) -> None:
        """Free the models."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
        self._llm = self._inner = None


def engine_reading(llm: LLM) -> dict[str, float]:
    """What an engine's books say now. Memory: weights, and the KV blocks that somebody holds."""
    engine, budget = llm.engine, llm.budget
    stats, memory = engine.stats, engine.memory
    lanes = stats.lanes
    plain = engine.architecture.name == "plain"
    weights = [size for name, size in budget.parts if "weights" in name and not (plain and "draft" in name)]
    blocks = memory.verifier.blocks.used * budget.verifier_block_bytes
    blocks += memory.draft.blocks.used * budget.draft_block_bytes if memory.draft is not None else 0
    found = {
        "prefill_s": lanes["prefill"].seconds,
        "draft_s": lanes["decode"].seconds,
        "verify_s": lanes["verify"].seconds,
        "chunks_s": stats.chunk_seconds,
        "step_s": stats.step_seconds,
        "cpu_s": time.process_time(),
        "plans_n": stats.plans,
        "plans_left_n": stats.plans_left,
        "draft_loops_n": lanes["decode"].batches,
        "passes_n": lanes["verify"].batches,
        "verdicts_n": stats.verdicts,
        "continued_n": stats.continued,
        "drafted_n": stats.drafted,
        "waiting": len(engine.waiting),
        **{f"{name}_lane": lane.depth for name, lane in lanes.items()},
        "memory": sum(weights) + blocks,
        "kv_memory": blocks,
    }
    return {name: float(value) for name, value in found.items()} | _gpu(engine.slots.lengths.device)


@functools.cache
def _sampler(index: int) -> GpuSampler:
    return GpuSampler(index)


def _gpu(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    found = _sampler(device.index or 0).read(time.monotonic)
    return {name: found[name] for name in ("gpu_utilization", "sm_activity") if name in found}


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
