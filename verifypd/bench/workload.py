"""What is sent to an engine and when: one type for every arm, as a file or from a seed. Knows nothing of engines.

Where prompts come from stands in `sources`, when they arrive in `arrivals`.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from verifypd.errors import ConfigError

Message = dict[str, str]  # {"role", "content"}
COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service friend"
    " father power hour game line end member law car city community name president team minute idea kid body"
)
WORDS = COMMON.split()  # most tokenizers have one token for each with its space


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload: its prompt is a text, a conversation, or so many random tokens."""

    at: float  # s after the start; in a closed loop it is sent when a client is free
    prompt_tokens: int  # of random tokens; 0 where the prompt is a text or a conversation
    output_tokens: int
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        given: dict[str, Any] = {"at": self.at}
        if self.messages is not None:
            given["messages"] = list(self.messages)
        elif self.prompt is not None:
            given["prompt"] = self.prompt
        else:
            given["prompt_tokens"] = self.prompt_tokens
        return given | {"output_tokens": self.output_tokens}

    @classmethod
    def unpacked(cls, data: Mapping[str, Any]) -> Self:
        """What `packed` made."""
        messages, prompt, tokens = data.get("messages"), data.get("prompt"), data.get("prompt_tokens", 0)
        if messages is not None:
            messages = tuple({"role": str(each["role"]), "content": str(each["content"])} for each in messages)
        if not messages and not prompt and not tokens:
            raise ValueError("a request needs prompt, messages or prompt_tokens")
        if not _whole(data["output_tokens"], 1) or not _whole(tokens, 0):
            raise ValueError("lengths are whole numbers, and output_tokens at least 1")
        if not isinstance(data["at"], int | float) or not 0 <= data["at"] < math.inf:
            raise ValueError("times are seconds from the start, and not negative")
        if prompt is not None and not isinstance(prompt, str):
            raise ValueError("a prompt is a text")
        return cls(float(data["at"]), tokens, data["output_tokens"], prompt, messages)

    def marked(self, mark: str) -> Self:
        """The same with a mark in front of its text, so that no cache of an earlier run knows it."""
        if self.messages is not None:
            first, *rest = self.messages
            first = {**first, "content": f"[{mark}] {first['content']}"}
            return replace(self, messages=(first, *rest))
        return self if self.prompt is None else replace(self, prompt=f"[{mark}] {self.prompt}")

    def as_text(self) -> Self:
        """A conversation as one text, for a model without a chat template."""
        if self.messages is None:
            return self
        turns = [f"{each['role'].capitalize()}: {each['content']}" for each in self.messages]
        return replace(self, messages=None, prompt="\n\n".join([*turns, "Assistant:"]))

    def text_or_ids(self, seed: int, vocab: int | None) -> str | list[int]:
        """The prompt: its text, or random token ids below `vocab`; without one, so many random words."""
        if self.prompt is not None:
            return self.prompt
        noise = random.Random(seed)
        if vocab is not None:
            return [noise.randrange(3, vocab) for _ in range(self.prompt_tokens)]
        return " ".join(noise.choice(WORDS) for _ in range(self.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order they arrive."""

    name: str
    rate: float  # requests/s; 0 where nobody set one
    arrivals: tuple[Arrival, ...]
    clients: int | None = None  # closed loop: each sends its next request when its last one has ended
    seed: int = 0  # of random tokens

    def scaled(self, divisor: int, keep: int | None = None) -> Workload:
        """The first `keep` requests, every length divided: for small models and slow machines."""
        few = (
            replace(a, prompt_tokens=-(-a.prompt_tokens // divisor), output_tokens=max(2, a.output_tokens // divisor))
            for a in self.arrivals[:keep]
        )
        return replace(self, arrivals=tuple(few))

    def marked(self, mark: str) -> Workload:
        """The same lengths and times with prompts that no cache of an earlier run knows."""
        seed = int.from_bytes(hashlib.sha256(f"{self.seed}-{mark}".encode()).digest()[:6])
        return replace(self, arrivals=tuple(each.marked(mark) for each in self.arrivals), seed=seed)

    def as_text(self) -> Workload:
        """Conversations as texts."""
        return replace(self, arrivals=tuple(each.as_text() for each in self.arrivals))

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        requests = [each.packed() for each in self.arrivals]
        loop = {} if self.clients is None else {"clients": self.clients}
        return {"name": self.name, "rate": self.rate, **loop, "seed": self.seed, "requests": requests}

    @property
    def digest(self) -> str:
        """What tells two workloads apart."""
        return hashlib.sha256(json.dumps(self.packed(), sort_keys=True).encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        """As a file that `read` takes: a line a request."""
        data = self.packed()
        requests = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in data.pop("requests"))
        head = json.dumps(data, ensure_ascii=False)[:-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{head}, "requests": [\n  {requests}\n]}}\n', encoding="utf-8")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read(path: Path) -> Workload:
    """A workload file: {"name", "rate", "clients", "seed", "requests": [{"at", "prompt_tokens", "output_tokens"}]}.

    A request may have "prompt" or "messages" in place of "prompt_tokens". Only "requests" is needed; they are sorted.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        arrivals = sorted((Arrival.unpacked(each) for each in found["requests"]), key=lambda each: each.at)
        clients = found.get("clients")
        if not arrivals or not (clients is None or _whole(clients, 1)):
            raise ValueError("it needs requests, and clients must be a whole number from 1 on")
        name, rate, seed = found.get("name", path.stem), found.get("rate", 0), found.get("seed", 0)
        if not isinstance(name, str) or not isinstance(rate, int | float) or not _whole(seed, 0):
            raise ValueError("name is a text, rate a number and seed a whole number")
        return Workload(name, rate, tuple(arrivals), clients, seed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no workload: {error!r}") from error


def chat_lengths(noise: random.Random) -> tuple[int, int]:
    """Prompt and output tokens, log-normal, as conversations people share have them."""
    prompt = min(1400, max(16, int(math.exp(noise.gauss(math.log(180), 1.0)))))
    return prompt, _output_length(noise)


def mixed_lengths(noise: random.Random) -> tuple[int, int]:
    """The same, but 12 % of the prompts have 1,500 to 4,000 tokens."""
    if noise.random() < 0.12:
        prompt = noise.randint(1500, 4000)
        return prompt, _output_length(noise)
    return chat_lengths(noise)


def _output_length(noise: random.Random) -> int:
    return min(512, max(16, int(math.exp(noise.gauss(math.log(150), 0.7)))))


def mixed(rate: float, seconds: float, seed: int) -> Workload:
    """Mixed traffic: Poisson arrivals, chat-like lengths, 12 % prompts of 1,500 to 4,000 tokens.

    `mixed(8, 20, 0)` is the file mixed-8.json, `mixed(8, 60, 1)` is long-8-seed1.json.
    """
    noise, at = random.Random(f"{seed}-{rate:g}"), 0.0
    arrivals: list[Arrival] = []
    while True:
        at += noise.expovariate(rate)
        if at > seconds:
            return Workload(f"mixed-{rate:g}-seed{seed}", rate, tuple(arrivals), seed=seed)
        prompt, output = mixed_lengths(noise)
        arrivals.append(Arrival(round(at, 4), prompt, output))


def prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, no two prompts alike."""
    noise = random.Random(seed)
    return [[noise.randrange(3, vocab) for _ in range(length)] for length in lengths]
