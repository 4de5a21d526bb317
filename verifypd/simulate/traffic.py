"""Traffic for the simulator, made up or given: when requests arrive, how long they are, which drafts would stand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as the world sees it. `stands[i]` says whether a draft of output token i would be accepted."""

    time: float  # s
    prompt: int  # tokens
    output: int  # tokens until it ends by itself
    stands: tuple[bool, ...]
    alpha: float = 0.0  # mean chance of a draft token of this request
    priority: int = 0
    slo_tpot: float | None = None  # ms; None: the server's
    slo_ttft: float | None = None  # ms; None: the server's
    deadline_ms: float | None = None  # after its arrival, when it is stopped
    max_tokens: int | None = None  # output tokens it asks for at most; None: what the settings say
    cached: int = 0  # prompt tokens that are read already when it gets a slot


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in the manner of chat traffic: log-normal, with a share of long documents among the prompts."""

    prompt_median: float = 120.0
    prompt_sigma: float = 0.9
    output_median: float = 120.0
    output_sigma: float = 0.7
    long_share: float = 0.12
    long_prompt: tuple[int, int] = (1500, 4000)
    longest_prompt: int = 1400  # of the ordinary ones
    longest_output: int = 512

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        output = rng.lognormvariate(math.log(self.output_median), self.output_sigma)
        prompt = rng.lognormvariate(math.log(self.prompt_median), self.prompt_sigma)
        if rng.random() < self.long_share:
            prompt = rng.uniform(*self.long_prompt)
        else:
            prompt = min(prompt, self.longest_prompt)
        return max(4, round(prompt)), max(2, min(self.longest_output, round(output)))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """α of each request drawn around a mean, and wandering while it writes: text is easier here and harder there."""

    mean: float
    spread: float = 0.1  # standard deviation between requests
    swing: float = 0.12  # amplitude along one request's output
    period: float = 120.0  # output tokens

    def draw(self, rng: random.Random, output: int) -> tuple[float, tuple[bool, ...]]:
        """The request's own mean, and whether a draft of each output token would stand."""
        base = min(0.97, max(0.03, rng.gauss(self.mean, self.spread)))
        phase = rng.random()
        stands = []
        for i in range(output):
            alpha = base + self.swing * math.sin(2 * math.pi * (i / self.period + phase))
            stands.append(rng.random() < min(0.99, max(0.01, alpha)))
        return base, tuple(stands)


def poisson(
    rate: float, count: int, acceptance: Acceptance, *, lengths: Lengths | None = None, seed: int = 0
) -> list[Arrival]:
    """`count` requests at `rate` a second; rate = inf: all at once. One seed gives the same requests at every rate."""
    lengths = lengths or Lengths()
    arrivals, time = [], 0.0
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        time += rng.expovariate(1.0) / rate
        prompt, output = lengths.draw(rng)
        alpha, stands = acceptance.draw(rng, output)
        arrivals.append(Arrival(time, prompt, output, stands, alpha))
    return arrivals


def replay(requests: Iterable[tuple[float, int, int]], alpha: float, *, seed: int = 0) -> list[Arrival]:
    """The arrivals of a workload as a real engine gets them: (time s, prompt tokens, output tokens) of each request.

    Each draft token stands with chance `alpha`, whatever came before. A request ends by its length, which the host
    knows beforehand.
    """
    arrivals = []
    for index, (time, prompt, output) in enumerate(requests):
        rng = random.Random(f"{seed}/{index}")
        stands = tuple(rng.random() < alpha for _ in range(output))
        arrivals.append(Arrival(time, prompt, output, stands, alpha, max_tokens=output))
    return arrivals
