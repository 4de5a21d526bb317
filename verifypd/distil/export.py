"""A head as a folder the engine loads by path: config.json, model.safetensors, how it was made. Knows no training."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from verifypd.distil.head import Head, HeadShape
from verifypd.errors import ConfigError
from verifypd.models.config import ModelConfig

MODEL_TYPE = "verifypd_head"
_SIZES = {  # of a head's layers: field of HeadShape -> of config.json
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_SHAPE = {**_SIZES, "feature_layers": "feature_layers"}  # what decides the sizes of a head's own weights


def write_draft(folder: Path, head: Head, ids: Tensor, verifier: ModelConfig, name: str, made: dict[str, Any]) -> None:
    """ids [V]: the verifier's id of each token the head proposes. made: all that is known of how it was made."""
    weights = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    weights["vocab_map"] = ids.to("cpu", torch.int32).contiguous()
    write_folder(folder, weights, head_config(head.shape, verifier, name), made)


def write_folder(folder: Path, weights: dict[str, Tensor], config: dict[str, Any], made: dict[str, Any]) -> None:
    """The three files of a head, each of them whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole(folder / "model.safetensors") as path:
        path.write_bytes(save(weights, metadata={"format": "pt"}))  # save_file lets nobody else read it
    for name, content in (("config.json", config), ("distil.json", made)):
        with whole(folder / name) as path:
            write_json(path, content)


def read_draft(folder: Path, shape: HeadShape) -> dict[str, Tensor]:
    """The weights of a draft in a folder, in float32; raises ConfigError where they do not fit a head of this shape."""
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"--start {folder} is no draft that can be read ({error}): give a folder of `distil`"
        ) from None
    found = {name: config.get(field) for name, field in _SHAPE.items()}
    found["feature_layers"] = tuple(found["feature_layers"] or ())
    wrong = [
        f"{name} {found[name]}, not {getattr(shape, name)}" for name in _SHAPE if found[name] != getattr(shape, name)
    ]
    if wrong:
        raise ConfigError(f"--start {folder} is a head of another shape: {'; '.join(wrong)}")
    weights.pop("vocab_map", None)
    odd = weights.keys() ^ Head(shape).state_dict().keys()
    if odd:
        raise ConfigError(
            f"--start {folder} lacks or has too much of {', '.join(sorted(odd)[:3])}: make the draft again"
        )
    return {name: weight.float() for name, weight in weights.items()}


def how_made(folder: Path) -> dict[str, Any] | None:
    """What a draft's folder says of how it was made, its own start included; None where it says nothing."""
    path = folder / "distil.json"
    try:
        made: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise ConfigError(f"--start: {path} is damaged ({error}): restore it, or delete it to go on without") from None
    return made


def head_config(shape: HeadShape, verifier: ModelConfig, name: str) -> dict[str, Any]:
    """The head in the fields of a Hugging Face config, and three of its own."""
    return {
        "architectures": ["VerifyPDHeadForCausalLM"],
        "model_type": MODEL_TYPE,
        "verifier": name,
        "feature_layers": list(shape.feature_layers),
        "draft_vocab_size": shape.vocab,
        "vocab_size": verifier.vocab_size,
        **size_fields(shape),
        "max_position_embeddings": verifier.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "sliding_window": shape.window,
        "final_logit_softcapping": shape.softcap,
        "tie_word_embeddings": False,
        "bos_token_id": verifier.bos_id,
        "eos_token_id": list(verifier.eos_ids),
        "torch_dtype": "bfloat16",
    }


def size_fields(shape: HeadShape) -> dict[str, int]:
    """The sizes of a head's layers in the fields of a Hugging Face config."""
    return {field: getattr(shape, name) for name, field in _SIZES.items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """For people to read, too."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all is written; a full disk is an error of one line."""
    beside = path.with_name(path.name + ".tmp")
    try:
        yield beside
        beside.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors do not say why they cannot write
        reason = getattr(error, "strerror", None) or "is the disk full?"
        raise ConfigError(f"{path} cannot be written ({reason}): make room, then run the same command again") from error


def commit_here() -> str | None:
    """The commit of the source tree this runs from; None where there is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
