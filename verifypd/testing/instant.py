"""An engine that answers at once: one token a step for every request, from no model at all.

Give it to the server with `--engine-factory verifypd.testing.instant:build` to measure what the server itself costs.
$VERIFYPD_INSTANT_STEP_MS makes each step take that long, so that a client sees every token by itself.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verifypd.config import EngineConfig
from verifypd.errors import ConfigError, RequestError
from verifypd.metrics.pauses import Pauses
from verifypd.metrics.stats import EngineStats
from verifypd.models.hub import resolve
from verifypd.request import Request, State, TokenOrigin
from verifypd.tokenizer import Tokenizer


class InstantEngine:
    """The interface the server uses of an Engine. Tokens are letters of the alphabet, in turn."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.config = config = config.on("cpu")
        self.max_model_len = config.max_model_len or 8192
        self.sampling = SimpleNamespace(vocab=tokenizer.vocab_size)
        self.slots = SimpleNamespace(device=torch.device("cpu"))
        self.eos_ids = tokenizer.eos_ids
        self.drafter = None
        self.forgiving = True
        self.stats = EngineStats()
        self.pauses = Pauses()
        self.memory_taken: dict[str, int] = {}
        self.architecture = SimpleNamespace(name="instant", ran="instant", state=dict)
        self.recent: tuple[Any, ...] = ()
        self.cost = None
        self.memory = SimpleNamespace(verifier=_EmptyPool(), draft=None)
        cache = SimpleNamespace(scales=None, data=torch.empty(0), nbytes=0)
        self.verify = SimpleNamespace(runner=SimpleNamespace(cache=cache))
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.free_slots = deque(range(config.slots))
        self.clock = time.monotonic
        letters = [tokenizer.encode(letter, add_special_tokens=False) for letter in "abcdefghijklmnopqrstuvwxyz"]
        self._pace = float(os.environ.get("VERIFYPD_INSTANT_STEP_MS", "0")) / 1e3  # s
        self._next = 0.0
        self._letters = [ids[0] for ids in letters if len(ids) == 1] or [0]

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running)

    def validate(self, prompt: list[int]) -> None:
        """Refuse an empty prompt and one that is too long."""
        if not prompt or len(prompt) >= self.max_model_len:
            raise RequestError(f"give 1 to {self.max_model_len - 1} tokens", param="prompt")

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: str = "abort", stop_reason: int | str | None = None) -> None:
        """End a request."""
        if request.finished:
            return
        request.state, request.finish_reason, request.stop_reason = State.FINISHED, reason, stop_reason
        if request.slot is not None:
            del self.running[request.slot]
            self.free_slots.append(request.slot)
        else:
            self.waiting.remove(request)
        self.stats.finished += 1

    def switch(self, name: str) -> None:
        """It plans nothing."""
        raise ConfigError(f"this engine has no architecture {name!r}, nor any other")

    def collect(self) -> list[Request]:
        """Nothing is ever waited for."""
        return []

    def step(self) -> list[Request]:
        """A token for everybody."""
        if self._pace:
            now = self.clock()
            self._next = max(self._next + self._pace, now)
            time.sleep(self._next - now)
        while self.waiting and self.free_slots:
            request = self.waiting.pop(0)
            request.slot = self.free_slots.popleft()
            self.running[request.slot] = request
        news = list(self.running.values())
        for request in news:
            request.tokens.append(self._letters[request.output_len % len(self._letters)])
            if request.origins is not None:
                request.origins.append(TokenOrigin("plain"))
            if len(request.tokens) >= request.max_length:
                self.finish(request, "length")
        self.stats.steps += 1
        self.stats.emitted += len(news)
        return news

    def check(self) -> None:
        """Nothing can leak."""

    def shutdown(self) -> None:
        """Drop all work."""
        for request in [*self.waiting, *self.running.values()]:
            self.finish(request)


class _EmptyPool:
    """A KV pool without blocks."""

    def __init__(self) -> None:
        self.blocks = SimpleNamespace(used=0, cached=(), free=())


def build(config: EngineConfig) -> Any:
    """An engine with the tokenizer of the model, and nothing else of it."""
    source = resolve(config.model, load_format=config.load_format)
    assert source.folder is not None, "the instant engine needs a tokenizer"
    tokenizer = Tokenizer.from_folder(Path(source.folder))
    return SimpleNamespace(engine=InstantEngine(config, tokenizer), tokenizer=tokenizer, budget=None)
