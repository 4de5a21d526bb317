"""What the config of a downloaded EAGLE head says, in the fields other models have. Knows dicts and files; no tensors.

Auxiliary states are counted as Hugging Face counts `hidden_states`: id k is the stream before layer k, so 0 is the
embedding. SGLang's files count from the first layer's output instead, one lower.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifypd.errors import ConfigError

EAGLE, EAGLE3 = "eagle", "eagle3"
SUPPORTED = "supported: EAGLE-1, EAGLE-2, EAGLE-3, speculators eagle3, and what `verifypd distil` makes"
# architectures in config.json -> format; a one-layer Llama with an `fc` is EAGLE-1 or 2 whatever it is called
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "Eagle3Speculator": EAGLE3,
    "Eagle3DraftModel": EAGLE3,
    "LlamaForCausalLMEagle": EAGLE,
    "EagleLlamaForCausalLM": EAGLE,
    "EAGLEModel": EAGLE,
}
# a field that only another kind of drafter has -> what that is called
OTHERS = {
    "dflash_config": "DFlash",
    "markov_rank": "DSpark",
    "pard_token": "P-EAGLE",
    "mask_token_id": "P-EAGLE",
    "medusa_num_heads": "Medusa",
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleFields:
    """What an EAGLE head says beside the shape of its layers."""

    states: tuple[int, ...] | None = None  # ids of the auxiliary states, in the order `fc` has them; None: the default
    target_hidden: int | None = None  # hidden size of the verifier, where it is not the head's own
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    norm_before_fc: bool = False  # one norm over all states side by side
    fc_norm: bool = False  # a norm for each state
    norm_output: bool = False  # what is carried to the next draft step is normed
    verifier: str | None = None  # that it was made for
    verifier_kinds: tuple[str, ...] = ()  # architectures of that verifier
    # what its file holds; the loader finds out
    own_embedding: bool = False
    own_head: bool = False
    fc_bias: bool = False


def default_states(layers: int) -> tuple[int, int, int]:
    """The states an EAGLE-3 head reads of a verifier of so many layers, where its config does not say."""
    return 2, layers // 2, layers - 3


def read_fields(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], EagleFields | None]:
    """A config as that of a Llama-like model with a family of its own, and what EAGLE adds; others as they are."""
    kind = _kind(raw, where)
    if kind is None:
        return raw, None
    other = next((name for field, name in OTHERS.items() if raw.get(field) is not None), None)
    if other is not None:
        raise ConfigError(f"{where}: {other} heads are not supported; {SUPPORTED}")
    inner = raw.get("transformer_layer_config" if "speculators_model_type" in raw else "model")
    if "speculators_model_type" in raw and not isinstance(inner, dict):
        raise ConfigError(f"{where}: transformer_layer_config is missing; download the speculators checkpoint again")
    layer = dict(inner) if isinstance(inner, dict) else dict(raw)
    # the speculators library's own default is a Qwen3 layer, which has norms of queries and keys
    model_type = layer.get("model_type", "qwen3" if inner is not None and kind == EAGLE3 else "llama")
    if model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ConfigError(f"{where}: a head with layers of {model_type!r} is not supported; supported: llama, qwen3")
    draft_vocab = raw.get("draft_vocab_size") or layer.get("draft_vocab_size")
    layer |= {
        "model_type": f"verifypd_{kind}",
        "layer_type": model_type,
        "architectures": None,
        "draft_vocab_size": draft_vocab if kind == EAGLE3 else None,
        "tie_word_embeddings": False,
        "quantization_config": raw.get("quantization_config") or layer.get("quantization_config"),
    }
    return layer, _fields(raw, kind, where)


def _kind(raw: Mapping[str, Any], where: str) -> str | None:
    """The EAGLE format a config is of; None: it is of none."""
    speculators = raw.get("speculators_model_type")
    if speculators is not None:
        if speculators != EAGLE3:
            raise ConfigError(f"{where}: speculators_model_type {speculators!r} is not supported; {SUPPORTED}")
        return EAGLE3
    named = raw.get("architectures") or ()
    found = next((ARCHITECTURES[name] for name in named if name in ARCHITECTURES), None)
    if found is None and any("eagle" in str(name).lower() for name in named):
        raise ConfigError(f"{where}: {', '.join(map(str, named))} is no EAGLE format known here; {SUPPORTED}")
    return found


def _fields(raw: Mapping[str, Any], kind: str, where: str) -> EagleFields:
    if kind == EAGLE:
        return EagleFields()
    nested = raw.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{where}: an EAGLE-3 head without auxiliary states is not supported; {SUPPORTED}")
    flags = {name: bool(raw.get(name, nested.get(name, False))) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ConfigError(f"{where}: norm_before_fc and fc_norm exclude each other; download the checkpoint again")
    states = _states(raw.get(AUX_IDS), where)
    if states is None and (counted := _states(nested.get(AUX_IDS), where)) is not None:
        states = tuple(k + 1 for k in counted)  # SGLang's fields, in SGLang's way of counting
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    width = raw.get("target_hidden_size")
    if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        raise ConfigError(f"{where}: target_hidden_size is {width!r}, not a whole number; download the config again")
    return EagleFields(
        states=states,
        target_hidden=width,
        verifier=verifier.get("name_or_path"),
        verifier_kinds=tuple(verifier.get("architectures") or ()),
        **flags,
    )


def _states(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(k) is int and k >= 0 for k in value):
        raise ConfigError(f"{where}: {AUX_IDS} is {value!r}, not a list of layer numbers; give --draft-layers 2,16,29")
    return tuple(value)


def windows(raw: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """Windows of a head's layers: those that `layer_types` names, or every layer of a Mistral-like one."""
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if raw.get("layer_type") == "mistral" and window else "full_attention"] * layers
    if "sliding_attention" in kinds and (type(window) is not int or window < 1):
        raise ConfigError(f"{where}: sliding_window is {window!r} and must be a positive whole number")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def may_be_eagle(folder: Path) -> bool:
    """Whether a folder without weights may be that of an EAGLE head: by its architecture, or one layer alone."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and (raw.get("num_hidden_layers") == 1 or _kind(raw, "config.json") is not None)


def hidden_architecture(raw: Mapping[str, Any], folder: Path) -> str | None:
    """The architecture of an EAGLE head under the plain name of a Llama: one layer, and an `fc` in its file."""
    plain = raw.get("model_type") in ("llama", "mistral", "qwen2") and _kind(raw, "config.json") is None
    if raw.get("num_hidden_layers") != 1 or not plain:
        return None
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not any(_mentions(path, b"fc.weight") for path in files):
        return None
    third = any(_mentions(path, b"hidden_norm.weight") for path in files)
    return "LlamaForCausalLMEagle3" if third else "EagleLlamaForCausalLM"


def _mentions(path: Path, name: bytes) -> bool:
    """Names of tensors stand in clear in safetensors headers and in the pickles of torch, which come first."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0


def shown(states: Sequence[int]) -> str:
    """Ids as --draft-layers takes them."""
    return ",".join(map(str, states))
