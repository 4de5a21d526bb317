"""Pairs of a draft and a verifier that the protocols run on: real weights where they are, else random ones.

Knows names and settings; loads nothing, and fetches where it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifypd.bench.dummy import dummy_model
from verifypd.errors import ConfigError
from verifypd.models.builtin import descriptions, find
from verifypd.models.hub import pull

OWN = "built-in"  # SmolLM2-135M and the draft that comes with this package
ALPHA = 0.68  # chance of a draft token where weights are random: of four, 42 % stand, as the original reports
SHRINK = 8  # of random weights on a CPU
DUMMY_LENGTH = 1024  # prompt and output, tokens, at least


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and a verifier."""

    name: str  # "tinyllama-1.1b:llama-2-7b", "built-in", or what was given
    model: str
    draft: str
    dummy: bool = False  # random weights, drafts accepted by chance
    shrink: int = 1  # their shapes are divided by this
    simulated: bool = False

    @property
    def note(self) -> str:
        """What a reader must know of it; nothing where weights are real."""
        if not self.dummy or self.simulated:
            return ""
        shape = "" if self.shrink == 1 else f", shapes / {self.shrink}"
        return f"random weights{shape}, drafts accepted by chance (α = {ALPHA})"

    @property
    def label(self) -> str:
        """Its name in tables and plots."""
        if self.simulated:
            return f"{self.name} (simulated)"
        if not self.dummy:
            return self.name
        return f"{self.name} (random{'' if self.shrink == 1 else f', 1/{self.shrink}'})"

    def packed(self) -> dict[str, Any]:
        """What tells it from another."""
        return {"pair": self.name, "dummy": self.dummy, "shrink": self.shrink}

    def settings(self, folder: Path, longest: int = 0) -> dict[str, Any]:
        """What an engine is loaded with. Shapes of random weights are written under `folder`.

        longest: tokens of prompt and output that these must at least hold.
        """
        if not self.dummy:
            return {"model": self.model, "draft": self.draft}
        small = {"dtype": "float32"} if self.shrink > 1 else {}
        return {
            "model": dummy_model(self.model, folder, divisor=self.shrink),
            "draft": dummy_model(self.draft, folder, divisor=self.shrink),
            "load_format": "dummy", "synthetic_acceptance": ALPHA, "prefix_cache": False,
            "max_model_len": max(DUMMY_LENGTH, longest), **small,
        }  # fmt: skip


def pair(text: str, cuda: bool, fetched: bool = False) -> Pair:
    """`built-in`, or DRAFT:VERIFIER by names of `verifypd models`: real where both are here, else random weights.

    fetched: they will be here, for `fetch` comes before the run.
    """
    if text == OWN:
        return Pair(OWN, "smollm2", "auto")
    draft, _, verifier = text.partition(":")
    if find(draft) is None or find(verifier) is None:
        raise ConfigError(f"--pair {text!r}: give {OWN!r} or DRAFT:VERIFIER by names that `verifypd models` lists")
    if fetched or {draft, verifier} <= _here():
        return Pair(text, verifier, draft)
    return Pair(text, verifier, draft, dummy=True, shrink=1 if cuda else SHRINK)


def fetch(pairs: Iterable[Pair], hf_token: str) -> None:
    """Bring the models of real pairs into the cache."""
    for name in dict.fromkeys(name for each in pairs if each.name != OWN for name in (each.draft, each.model)):
        if name not in _here():
            pull(name, hf_token=hf_token)


def _here() -> set[str]:
    return {each.name for each in descriptions() if each.present}


def given(settings: dict[str, Any]) -> Pair:
    """The pair of --model and --draft."""
    model, draft = str(settings["model"]), str(settings.get("draft") or "auto")
    return Pair(f"{Path(draft).name}:{Path(model).name}", model, draft)


def sizes(pair: str) -> tuple[float, float] | None:
    """GB of a pair's verifier in 16 bits, and how many times its draft's size that is; None: models without a name."""
    draft, _, verifier = pair.partition(" ")[0].partition(":")
    large, small = find(verifier), find(draft)
    if large is None or small is None:
        return None
    return 2 * large.config.parameters / 1e9, large.config.parameters / small.config.parameters
