"""What is sent to an engine and when: arrivals from a file or a seed. Knows lengths and times; nothing of engines."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from verifypd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    at: float  # s after the start
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order they arrive."""

    name: str
    rate: float  # requests/s
    arrivals: tuple[Arrival, ...]

    def most_tokens(self, tpot: float) -> int:
        """Tokens that are there at once at most where each request takes `tpot` s a token and none waits."""
        comes = [(a.at, a.prompt_tokens + a.output_tokens) for a in self.arrivals]
        goes = [(a.at + tpot * a.output_tokens, -a.prompt_tokens - a.output_tokens) for a in self.arrivals]
        return max(itertools.accumulate(tokens for _, tokens in sorted(comes + goes)), default=0)

    def scaled(self, divisor: int, keep: int) -> Workload:
        """The first `keep` requests, every length divided: for tests with a tiny model."""
        few = (
            Arrival(a.at, max(1, a.prompt_tokens // divisor), max(2, a.output_tokens // divisor))
            for a in self.arrivals[:keep]
        )
        return Workload(self.name, self.rate, tuple(few))


def read(path: Path) -> Workload:
    """A workload file: {"name", "rate", "requests": [{"at", "prompt_tokens", "output_tokens"}]}."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        arrivals = tuple(Arrival(r["at"], r["prompt_tokens"], r["output_tokens"]) for r in found["requests"])
        return Workload(found["name"], found["rate"], arrivals)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no workload: {error!r}") from error


def mixed(rate: int, seconds: float, seed: int) -> Workload:
    """Mixed traffic: Poisson arrivals, chat-like lengths, 12 % prompts of 1,500 to 4,000 tokens.

    `mixed(8, 20, 0)` is the file mixed-8.json, `mixed(8, 60, 1)` is long-8-seed1.json.
    """
    noise, at = random.Random(f"{seed}-{rate}"), 0.0
    arrivals: list[Arrival] = []
    while True:
        at += noise.expovariate(rate)
        if at > seconds:
            return Workload(f"mixed-{rate}-seed{seed}", rate, tuple(arrivals))
        if noise.random() < 0.12:
            prompt = noise.randint(1500, 4000)
        else:
            prompt = min(1400, max(16, int(math.exp(noise.gauss(math.log(180), 1.0)))))
        output = min(512, max(16, int(math.exp(noise.gauss(math.log(150), 0.7)))))
        arrivals.append(Arrival(round(at, 4), prompt, output))


def prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, no two prompts alike."""
    noise = random.Random(seed)
    return [[noise.randrange(3, vocab) for _ in range(length)] for length in lengths]
