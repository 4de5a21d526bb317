"""Engines of random weights: folders with a model's shape alone, and settings as typed. Knows nothing of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def dummy_model(name: str, folder: Path, tiny: bool = False, divisor: int = 1) -> str:
    """The shape of a built-in model, shrunk by `divisor`, as a folder; tiny: a small Llama in its place."""
    known = find(name)
    if known is None:
        raise ConfigError(f"--pair: {name} is no built-in model; `verifypd models` lists them")
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    raw = known.raw if divisor == 1 else shrunk(known.raw, divisor)
    config = TINY if tiny else {**raw, "max_position_embeddings": POSITIONS}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def shrunk(raw: Mapping[str, Any], divisor: int) -> dict[str, Any]:
    """A model's shape with widths, heads and vocabulary divided, and half as many times fewer layers.

    Heads keep their width. Verifier and draft shrink alike, so about the same ratio of costs stays between them.
    """
    heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    few = max(1, heads // divisor)
    return {
        **raw,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "hidden_size": raw["hidden_size"] // divisor,
        "intermediate_size": raw["intermediate_size"] // divisor,
        "num_attention_heads": few,
        "num_key_value_heads": few if kv == heads else 1,
        "num_hidden_layers": max(2, 2 * raw["num_hidden_layers"] // divisor),
        "vocab_size": raw["vocab_size"] // divisor,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


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
