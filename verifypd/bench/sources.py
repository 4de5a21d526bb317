"""Where prompts come from: files of conversations or prompts, lengths of random tokens, texts that invite copying.

A source is named on a command line as NAME or NAME:ARGUMENT. Knows texts and lengths; nothing of time or engines.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verifypd.bench.texts import EDITS, TEXTS
from verifypd.bench.workload import Arrival, Message, chat_lengths, mixed_lengths
from verifypd.errors import ConfigError

HERE = Path(__file__).resolve().parent
OWN_CONVERSATIONS = HERE / "data" / "sharegpt.json"
OWN_PROMPTS = HERE.parent / "distil" / "data" / "evaluation.jsonl"  # the held-out set: no draft of ours has seen it
OUTPUT = 128  # tokens, where nothing says how many
LETTERS = 4  # of a token, roughly, where an answer's length sets that of the output
SHORTEST, LONGEST = 4, 1024  # tokens of such an output
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True)
class Source:
    """Prompts to draw from. `about` says what was left out of a file, and why."""

    name: str
    pick: Callable[[random.Random, int], list[Arrival]]
    about: dict[str, Any] = field(default_factory=dict)

    def draw(self, noise: random.Random, count: int) -> list[Arrival]:
        """So many requests, without times."""
        return self.pick(noise, count)

    def limited(self, output: int | None) -> Source:
        """The same with outputs of so many tokens."""
        if output is None:
            return self
        if output < 1:
            raise ConfigError("--output-tokens must be at least 1")
        return replace(
            self, pick=lambda noise, count: [replace(a, output_tokens=output) for a in self.draw(noise, count)]
        )


def source(text: str) -> Source:
    """A source by its name on a command line."""
    name, _, argument = text.partition(":")
    makers: dict[str, Callable[[str], Source]] = {
        "prompts": lambda given: prompt_lines(Path(given) if given else OWN_PROMPTS),
        "sharegpt": lambda given: conversations(Path(given) if given else OWN_CONVERSATIONS),
        "fixed": fixed,
        "chat": lambda _: _lengths("chat", chat_lengths),
        "mixed": lambda _: _lengths("mixed", mixed_lengths),
        "repetition": lambda _: repetition(),
    }
    if name not in makers:
        raise ConfigError(
            f"--source {text!r} is not known; give prompts[:FILE], sharegpt[:FILE], fixed:PROMPTxOUTPUT, chat, mixed or"
            " repetition"
        )
    return makers[name](argument)


# -- lengths -----------------------------------------------------------------------------------------------------------


def fixed(text: str) -> Source:
    """`384x256`: prompts of 384 random tokens, outputs of 256."""
    try:
        prompt, output = (int(part) for part in (text or "384x256").split("x"))
    except ValueError:
        raise ConfigError(f"--source fixed:{text}: give PROMPTxOUTPUT in tokens, for example fixed:384x256") from None
    if prompt < 1 or output < 1:
        raise ConfigError(f"--source fixed:{text}: both lengths must be at least 1")
    return _lengths(f"fixed {prompt}x{output}", lambda _: (prompt, output))


def _lengths(name: str, draw: Callable[[random.Random], tuple[int, int]]) -> Source:
    return Source(name, lambda noise, count: [Arrival(0.0, *draw(noise)) for _ in range(count)])


# -- texts -------------------------------------------------------------------------------------------------------------


def repetition() -> Source:
    """Texts to be copied, where look-up finds much to draft from."""

    def pick(noise: random.Random, count: int) -> list[Arrival]:
        texts = (noise.choice(EDITS).format(noise.choice(TEXTS) + noise.choice(TEXTS)) for _ in range(count))
        return [Arrival(0.0, 0, OUTPUT, prompt=text) for text in texts]

    return Source("repetition", pick)


def prompt_lines(path: Path) -> Source:
    """A file of one JSON object a line: {"prompt"} (or "text") or {"messages"}, and "output_tokens" where wanted."""
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            try:
                found.append(_line(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f'{path}:{number}: give {{"prompt"}} or {{"messages"}} ({error!r})') from None
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    return Source("prompts" if path == OWN_PROMPTS else path.stem, _from(found), {"requests": len(found)})


def _line(data: dict[str, Any]) -> Arrival:
    output = data.get("output_tokens", data.get("max_tokens", OUTPUT))
    prompt = data.get("prompt", data.get("text"))
    if "messages" in data:
        return Arrival.unpacked({"at": 0.0, "messages": data["messages"], "output_tokens": output})
    if not isinstance(prompt, str):
        raise TypeError("prompt is no text")
    return Arrival.unpacked({"at": 0.0, "prompt": prompt, "output_tokens": output})


def conversations(path: Path) -> Source:
    """A file in the format of ShareGPT: [{"id", "conversations": [{"from", "value"}, …]}, …].

    Every turn of a human that is answered becomes a request: the conversation so far, and an output about as long as
    the answer that was given. A record that is broken is left out and counted by what is wrong with it.
    """
    try:
        records = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(records, list):
        raise ConfigError(f"{path}: a list of conversations is needed, as ShareGPT has it")
    found: list[Arrival] = []
    skipped: Counter[str] = Counter()
    for record in records:
        try:
            found += _requests(_turns(record))
        except ValueError as error:
            skipped[str(error)] += 1
    if not found:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in skipped.most_common()) or "it is empty"
        raise ConfigError(f"{path}: no conversation can be used ({reasons})")
    about = {"records": len(records), "requests": len(found), "skipped": dict(skipped)}
    return Source("sharegpt" if path == OWN_CONVERSATIONS else path.stem, _from(found), about)


def _turns(record: Any) -> list[Message]:
    """The turns of a record, human and answer in turn; ValueError says what is wrong with it."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise ValueError("no conversations")
    found: list[Message] = []
    for turn in turns:
        if (
            not isinstance(turn, dict)
            or not isinstance(turn.get("from"), str)
            or not isinstance(turn.get("value"), str)
        ):
            raise ValueError("a turn without from and value")
        role, text = ROLES.get(turn["from"]), turn["value"].strip()
        if not text:
            raise ValueError("an empty turn")
        if not found and role != "user":
            raise ValueError("the first turn is not a human's")
        if role != ("assistant" if len(found) % 2 else "user"):
            raise ValueError("roles out of order")
        found.append({"role": role, "content": text})
    if len(found) < 2:
        raise ValueError("no answer")
    return found


def _requests(turns: Sequence[Message]) -> list[Arrival]:
    return [
        Arrival(0.0, 0, _about(turns[answer]["content"]), messages=tuple(turns[:answer]))
        for answer in range(1, len(turns), 2)
    ]


def _about(text: str) -> int:
    """Tokens of a text, roughly: servers have tokenizers of their own."""
    return min(LONGEST, max(SHORTEST, round(len(text) / LETTERS)))


def _from(population: Sequence[Arrival]) -> Callable[[random.Random, int], list[Arrival]]:
    """Draws without repetition until all have been drawn, and then again."""

    def pick(noise: random.Random, count: int) -> list[Arrival]:
        found: list[Arrival] = []
        while len(found) < count:
            found += noise.sample(population, len(population))
        return found[:count]

    return pick


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
