"""Arms that share one loaded pair of models and differ in policy: architecture, controller, batches.

One engine is loaded at a time, and is idle when its policy changes. So a 34B verifier fits beside no second one, and
arms differ in nothing but what is compared.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.bench.inprocess import InProcess
from verifypd.bench.pairs import Pair
from verifypd.bench.provenance import relative

if TYPE_CHECKING:
    from verifypd.control.architectures import Architecture
    from verifypd.engine.async_llm import AsyncLLM
    from verifypd.engine.llm import LLM

QUEUE = 1.2  # batches of requests that hold a slot, where not all are admitted


@dataclass(frozen=True, slots=True)
class Policy:
    """How an arm is scheduled, whatever the batch."""

    arch: str
    controller: str = "fixed"
    verify: float | None = None  # verify batch as a share of the batch; None: the engine's default
    admit_all: bool = False  # every request of the workload holds a slot
    batch: int | None = None  # of its own, and not the scenario's
    queue: float = QUEUE  # batches of requests that hold a slot
    verify_requests: int | None = None  # verify batch in requests, whatever the batch

    def settings(self, batch: int, max_draft: int) -> dict[str, Any]:
        """Of the engine."""
        batch = self.batch or batch
        made: dict[str, Any] = {
            "arch": self.arch, "controller": self.controller, "batch_size": batch, "max_draft": max_draft,
            "queue_factor": self.queue,
        }  # fmt: skip
        if self.verify_requests is not None:
            return made | {"verify_batch": min(self.verify_requests, batch)}
        return made if self.verify is None else made | {"verify_batch": max(1, math.floor(self.verify * batch))}


POLICIES = {
    "baseline": Policy("baseline"),
    "plain": Policy("plain"),
    "pd": Policy("pd"),
    "pdv": Policy("pdv"),
    "pdv whole": Policy("pdv", verify=1.0),  # a verify batch is the batch: too few requests to pipeline
    "pdv pipelined": Policy("pdv", verify=0.5, admit_all=True),
    **{f"pdv verify {count}": Policy("pdv", verify_requests=count) for count in (1, 2, 4, 8)},
    "auto": Policy("auto", controller="throughput"),
    "unified": Policy("unified"),
    "table": Policy("table"),
    "threshold": Policy("pd", controller="threshold"),
    **{f"pdv batch {size}": Policy("pdv", batch=size) for size in (8, 16, 32, 64)},
    **{f"pdv queue {depth:g}": Policy("pdv", verify=0.5, queue=depth) for depth in (1.0, QUEUE, 1.5, 2.0)},
}


class Engines:
    """The engine of the pair that runs now."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        folder: Path,
        shared: dict[str, Any],
        slots: int,
        max_draft: int,
        longest: int = 0,
        kept: bool = False,
    ) -> None:
        """shared: settings of every engine. slots: requests of its batch at most. longest: prompt and output, tokens.

        kept: the engine stays loaded when an arm has ended, for the next campaign; whoever made this closes it.
        """
        self.pairs = {each.name: each for each in pairs}
        self.folder, self.shared, self.slots, self.max_draft = folder, shared, slots, max_draft
        self.longest, self.kept = longest, kept
        self.arms: list[Tuned] = []
        self._name: str | None = None
        self._llm: AsyncLLM | None = None

    async def get(self, name: str) -> AsyncLLM:
        """The pair's engine; another one goes first."""
        from verifypd.engine.async_llm import AsyncLLM

        if self._llm is None or self._name != name:
            await self.close()
            settings = {
                **self.pairs[name].settings(self.folder, self.longest), "arch": "auto", "controller": "throughput",
                "batch_size": self.slots, "queue_factor": 1.0, "max_draft": self.max_draft,
                "prefix_cache": False,  # arms get the same prompts: the second would find them read
                **self.shared,
            }  # fmt: skip
            self._llm = await asyncio.to_thread(lambda: AsyncLLM(**settings))
            self._name = name
        return self._llm

    async def close(self) -> None:
        """Free the models, for the next pair may need all of the memory; a second call does nothing."""
        llm, self._llm, self._name = self._llm, None, None
        for arm in self.arms:
            arm.let_go()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
            del llm
            free_memory()


def free_memory() -> None:
    """Give back what nobody holds any more; a CUDA device's too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Tuned(InProcess):
    """An arm over such an engine."""

    def __init__(self, name: str, policy: Policy, engines: Engines) -> None:
        super().__init__(name, {}, None)
        self.policy = policy
        self.engines = engines
        engines.arms.append(self)
        self._learnt: dict[tuple[str, int], Callable[[str], Architecture]] = {}  # by pair and batch

    @property
    def spec(self) -> dict[str, Any]:
        """Its policy, and what the engine is loaded with beside the pair."""
        shared = {name: relative(value) if isinstance(value, str) else value
                  for name, value in self.engines.shared.items() if name != "hf_token"}  # fmt: skip
        return {"policy": asdict(self.policy), "max_draft": self.engines.max_draft, "shared": shared}

    async def start(self) -> dict[str, Any]:
        """Engines are loaded when their scenario comes."""
        return {}

    async def prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Have the pair's engine, under this arm's policy. settings: "pair", "batch" and "requests"."""
        from verifypd.engine.retune import fresh, retune, tuned

        name, batch, requests = settings["pair"], settings["batch"], settings["requests"]
        self._llm = await self.engines.get(name)
        wanted = self.policy.settings(batch, self.engines.max_draft)
        key = (name, batch)

        def work(llm: LLM) -> None:
            engine = llm.engine
            engine.drain()
            config = tuned(engine.residents.config, wanted)
            self._learnt.setdefault(key, fresh(engine, config))
            retune(engine, config, self._learnt[key], requests if self.policy.admit_all else None)
            self._inner = llm

        await self._llm.between_steps(work)
        if self.engines.pairs[name].dummy:
            self.vocab = await self._llm.between_steps(lambda llm: llm.engine.sampling.vocab)
        return {"settings": wanted}

    def let_go(self) -> None:
        """Hold no engine."""
        self._llm = self._inner = None

    async def close(self) -> None:
        """Whoever comes last finds nothing to free."""
        self.let_go()
        if not self.engines.kept:
            await self.engines.close()
