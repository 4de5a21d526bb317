"""Prompt sets: the evaluation set and the training set that ship with the package, or a file. Knows text only."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from verifypd.errors import ConfigError

KINDS = ("chat", "question", "code", "story")
EVALUATION, TRAINING = "evaluation.jsonl", "training.jsonl.xz"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn."""

    kind: str
    text: str
    source: str = ""


def evaluation_prompts() -> list[Prompt]:
    """The committed evaluation set: never trained on."""
    return _parse((_folder() / EVALUATION).read_text(encoding="utf-8"), EVALUATION)


def training_prompts() -> list[Prompt]:
    """The committed training set, without anything that stands in the evaluation set."""
    text = lzma.decompress((_folder() / TRAINING).read_bytes()).decode()
    held_out = {plain(prompt.text) for prompt in evaluation_prompts()}
    return [prompt for prompt in _parse(text, TRAINING) if plain(prompt.text) not in held_out]


def read_prompts(path: Path) -> list[Prompt]:
    """A file of one JSON object a line, with `text` and perhaps `kind`; or of one prompt a line."""
    try:
        return _parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts of {path} cannot be read ({error}): give a UTF-8 file, one prompt a line") from None


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of the prompts, from all over the set; all of them where there are no more."""
    return [prompts[i * len(prompts) // count] for i in range(count)] if count < len(prompts) else list(prompts)


def plain(text: str) -> str:
    """What two prompts that say the same have in common: words, in lower case."""
    return " ".join("".join(c.lower() if c.isalnum() else " " for c in text).split())


def _folder() -> resources.abc.Traversable:
    return resources.files("verifypd.distil") / "data"


def _parse(text: str, where: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold other characters that end a line, as they are
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(Prompt("chat", line.strip()))
            continue
        try:
            raw = json.loads(line)
            prompt = Prompt(raw.get("kind", "chat"), raw["text"], raw.get("source", ""))
            if not isinstance(prompt.kind, str) or not prompt.text.strip():
                raise ValueError(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f'{where}, line {number}: give one JSON object a line, {{"text": "…"}}') from None
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{where} holds no prompt")
    return prompts
