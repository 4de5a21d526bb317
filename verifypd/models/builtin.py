"""Models known by a short name: their shapes, where real weights come from, and what is already here.

Knows names and numbers; nothing of weights. With `--load-format dummy` a shape needs no file at all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifypd.models import smollm2
from verifypd.models.config import ModelConfig

DATA = Path(__file__).parent / "data"  # drafts that ship with the package


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model known by name. `raw` is its Hugging Face config."""

    name: str
    title: str
    hub_id: str
    raw: Mapping[str, Any] = field(repr=False)
    gated: bool = False  # the hub asks for a token and a licence
    artifact: smollm2.Artifact | None = None  # comes from the package index instead of the hub
    draft: str | None = None  # name of the draft that was made for it and ships with this package

    @property
    def config(self) -> ModelConfig:
        """Shape and arithmetic."""
        return ModelConfig.from_dict(self.raw, self.name)


@dataclass(frozen=True, slots=True)
class Description:
    """What `verifypd models` says of one model."""

    name: str
    title: str
    parameters: int
    needs: str  # what real weights need; dummy weights need nothing
    present: bool  # in a cache of this machine
    hub_id: str


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **more,
    }


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",  # q, k and v have biases in every Qwen2 model
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": layers,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "torch_dtype": "bfloat16",
    }


def _gemma(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int) -> dict[str, Any]:
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",  # no soft-caps and no windows: those came with Gemma 2
        "vocab_size": 256000,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,  # not hidden / heads in the 7B
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


_SMOLLM2 = _llama(30, 576, 9, 3, 1536, 8192, vocab_size=49152, rope_theta=100000.0, tie_word_embeddings=True)
_TINYLLAMA = _llama(22, 2048, 32, 4, 5632, 2048)
_LLAMA_2_7B = _llama(32, 4096, 32, 32, 11008, 4096, torch_dtype="float16")
_CODELLAMA_34B = _llama(48, 8192, 64, 8, 22016, 16384, rope_theta=1000000.0)

BUILTINS: dict[str, Builtin] = {
    model.name: model
    for model in (
        Builtin(
            "smollm2",
            "SmolLM2-135M-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            _SMOLLM2,
            artifact=smollm2.SMOLLM2,
            draft="smollm2-draft",
        ),
        Builtin("tinyllama-1.1b", "TinyLlama-1.1B-Chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", _TINYLLAMA),
        Builtin("llama-2-7b", "Llama-2-7B", "meta-llama/Llama-2-7b-hf", _LLAMA_2_7B, gated=True),
        Builtin("codellama-34b", "CodeLlama-34B", "codellama/CodeLlama-34b-hf", _CODELLAMA_34B),
        Builtin("qwen2-1.5b", "Qwen2-1.5B", "Qwen/Qwen2-1.5B", _qwen2(28, 1536, 12, 2, 8960, 151936, tied=True)),
        Builtin("qwen2-7b", "Qwen2-7B", "Qwen/Qwen2-7B", _qwen2(28, 3584, 28, 4, 18944, 152064, tied=False)),
        Builtin("gemma-2b", "Gemma-2b", "google/gemma-2b", _gemma(18, 2048, 8, 1, 16384), gated=True),
        Builtin("gemma-7b", "Gemma-7b", "google/gemma-7b", _gemma(28, 3072, 16, 16, 24576), gated=True),
    )
}


def find(name: str) -> Builtin | None:
    """The built-in model of this name; case does not matter."""
    return BUILTINS.get(name.lower())


def find_hub(hub_id: str) -> Builtin | None:
    """The built-in model that this hub id names."""
    return next((model for model in BUILTINS.values() if model.hub_id.lower() == hub_id.lower()), None)


def packaged(name: str) -> Path | None:
    """Folder of a draft that ships with this package."""
    known = {model.draft for model in BUILTINS.values() if model.draft}
    return DATA / name.lower() if name.lower() in known else None


def describe() -> str:
    """All built-in models as a table, for `verifypd models`."""
    rows = [("name", "model", "parameters", "here", "real weights need")]
    for model in descriptions():
        size = f"{model.parameters / 1e9:.1f} B" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.0f} M"
        rows.append((model.name, model.title, size, "yes" if model.present else "no", model.needs))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows]
    lines += ["", *(f"{m.draft}: the draft of {m.name}, comes with this package" for m in BUILTINS.values() if m.draft)]
    return "\n".join([*lines, "", "With --load-format dummy each of them runs on random weights and needs no file."])


def descriptions() -> list[Description]:
    """All built-in models."""
    return [
        Description(
            name=model.name,
            title=model.title,
            parameters=model.config.parameters,
            needs=_needs(model),
            present=smollm2.is_whole(model.artifact) if model.artifact else _in_hub_cache(model.hub_id),
            hub_id=model.hub_id,
        )
        for model in BUILTINS.values()
    ]


def _needs(model: Builtin) -> str:
    if model.artifact:
        return f"{model.artifact.wheel_bytes / 1e6:.0f} MB from the package index, once"
    gate = ", a token and the licence accepted there" if model.gated else ""
    return f"{model.config.parameters * 2 / 1e9:.1f} GB from the hub{gate}"


def _in_hub_cache(hub_id: str) -> bool:
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(hub_id, name), str) for name in names)
