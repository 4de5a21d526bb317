"""Writes a head as a folder the engine loads by path: config.json, model.safetensors, and how it was made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from verifypd.distil.head import Head, HeadShape
from verifypd.models.config import ModelConfig

MODEL_TYPE = "verifypd_head"


def write_draft(folder: Path, head: Head, ids: Tensor, verifier: ModelConfig, name: str, made: dict[str, Any]) -> None:
    """ids [V]: the verifier's id of each token the head proposes. made: all that is known of how it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    weights["vocab_map"] = ids.to("cpu", torch.int32).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", head_config(head.shape, verifier, name))
    write_json(folder / "distil.json", made)


def head_config(shape: HeadShape, verifier: ModelConfig, name: str) -> dict[str, Any]:
    """The head in the fields of a Hugging Face config, and three of its own."""
    return {
        "architectures": ["VerifyPDHeadForCausalLM"],
        "model_type": MODEL_TYPE,
        "verifier": name,
        "feature_layers": list(shape.feature_layers),
        "draft_vocab_size": shape.vocab,
        "vocab_size": verifier.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write it whole."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
