"""Engines of random weights: folders with a model's shape alone, and settings as typed. Knows nothing of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifypd.errors import ConfigError
from verifypd.models.builtin import find

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 600, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip
HEADS = ("eagle", "eagle3")  # drafts that the engine makes itself, to its verifier's shape
POSITIONS = 8192  # room for prompts of 4,096 tokens and what follows


def dummy_model(name: str, folder: Path, tiny: bool = False) -> str:
    """The shape of a built-in model as a folder under `folder`; tiny: a small Llama in its place."""
    known = find(name)
    if known is None:
        raise ConfigError(f"--pair: {name} is no built-in model; `verifypd models` lists them")
    path = folder / name
    path.mkdir(parents=True)
    config = TINY if tiny else {**known.raw, "max_position_embeddings": POSITIONS}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def dummy_draft(name: str, folder: Path, tiny: bool = False) -> str:
    """A draft for such a model: a head by its name, which the engine knows, or another model's shape."""
    return name if name in HEADS else dummy_model(name, folder, tiny)


def parsed(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings from `NAME=VALUE` as typed on a command line; a value that is JSON is read as such."""
    return {name: _value(text) for name, _, text in (pair.partition("=") for pair in pairs)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
