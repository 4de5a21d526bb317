"""What a checkpoint's config says, as one frozen type. Knows the fields of Hugging Face configs; nothing of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verifypd.errors import ConfigError, ModelError
from verifypd.models.eagle_config import EAGLE, EAGLE3, EagleFields, hidden_architecture, read_fields, windows
from verifypd.models.fp8_config import Fp8Format, read_format

# model_type in config.json -> family implemented here
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",  # multimodal checkpoint: only its text model is read
    "gemma3_text": "gemma3",
    # draft heads, which run only beside the verifier they were made for
    "verifypd_head": "head",
    "verifypd_eagle": EAGLE,
    "verifypd_eagle3": EAGLE3,
}
HEADS = ("head", EAGLE, EAGLE3)
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base frequency and how it is stretched."""

    theta: float
    kind: str = "default"  # one of ROPE_TYPES, or "factors": every frequency divided by its own factor
    factor: float = 1.0
    original_max: int = 0  # context of pre-training, tokens (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin (yarn)
    factors: tuple[float, ...] = ()  # kind "factors", head_dim / 2 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of one decoder-only model."""

    family: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int  # longest context the checkpoint claims, tokens
    norm_eps: float
    activation: Activation
    tie_embeddings: bool
    rope: Rope
    local_rope: Rope | None = None  # layers with a window, where it differs (Gemma 3)
    windows: tuple[int | None, ...]  # per layer: tokens a row may see, itself included; None is all
    scale: float  # attention scores are multiplied by it
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # norms after attention and MLP as well as before
    unit_offset: bool = False  # norms multiply by 1 + weight
    embed_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None  # of the checkpoint: "float32", "bfloat16", "float16"
    draft_vocab_size: int | None = None  # rows of the head, where a draft covers a subset of the vocabulary
    feature_layers: tuple[int, ...] | None = None  # a draft head: verifier layers it reads, besides the last state
    eagle: EagleFields | None = None  # of a head of that format
    fp8: Fp8Format | None = None  # of a checkpoint with matrices in fp8

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "mlp_size", "layers", "heads", "kv_heads", "head_dim", "max_position")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"model config: {name} is {getattr(self, name)} and must be positive")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model config: {self.heads} heads do not divide by {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ConfigError(f"model config: head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        if self.draft_vocab_size is not None and self.tie_embeddings:
            raise ConfigError(
                "model config: draft_vocab_size needs a head of its own; set tie_word_embeddings to false"
            )
        if len(self.windows) != self.layers:
            raise ConfigError(f"model config: {len(self.windows)} layer types for {self.layers} layers")

    @property
    def is_head(self) -> bool:
        """Whether it is no model of its own but reads a verifier's states."""
        return self.family in HEADS

    @property
    def parameters(self) -> int:
        """Number of weights in matrices (norms and biases left out)."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden_size * self.mlp_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.layers * (attention + mlp) + embeddings

    def layer_rope(self, layer: int) -> Rope:
        """The rotary embedding layer `layer` uses."""
        return self.local_rope if self.local_rope and self.windows[layer] is not None else self.rope

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Parse a Hugging Face config (layouts of transformers 4 and 5). `where` names the source in messages."""
        return _parse(raw, where)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Parse `config.json` of a checkpoint folder; `generation_config.json` may add end-of-text ids."""
        path = folder / "config.json"
        raw = dict(_read_json(path))
        if eagle := hidden_architecture(raw, folder):
            raw["architectures"] = [eagle]
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            if eos is not None:
                raw["eos_token_id"] = list(dict.fromkeys((*_ids(eos), *_ids(_text(raw).get("eos_token_id")))))
                if isinstance(raw.get("text_config"), dict):  # what the text part says would hide it
                    raw["text_config"] = {**raw["text_config"], "eos_token_id": raw["eos_token_id"]}
        return _parse(raw, str(path))


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. Neither folder nor gguf: only dummy weights can be made."""

    name: str
    config: ModelConfig
    folder: Path | None = None
    gguf: Path | None = None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: give a folder that holds a Hugging Face checkpoint") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object: download it again")
    return raw


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def _text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a multimodal config; fields the parts share stay visible."""
    inner = raw.get("text_config")
    return {**raw, **inner} if isinstance(inner, dict) else raw


class _Fields:
    """Typed reads from a config dict; a field that is absent or null takes the default, or is an error without one."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = "is missing" if value is None else f"is {value!r}, not a number"
            raise ConfigError(f"{self.where}: {name} {what}; is this the config of a language model?")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise ConfigError(f"{self.where}: {name} is {value!r}, not a whole number")
        return int(value)

    def optional(self, name: str) -> float | None:
        return None if self.raw.get(name) is None else float(self.number(name))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)


# Gemma 3's multimodal configs leave out whatever equals the default of the class they were written from
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
# model_type -> what the class of transformers takes for a field that is absent; a null in its place means none
_ABSENT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096},
    "gemma2": {
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
_DEFAULT_POSITIONS = {
    "llama": 2048,
    EAGLE: 2048,
    EAGLE3: 2048,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "gemma": 8192,
    "gemma2": 8192,
}


def _parse(raw: Mapping[str, Any], where: str) -> ModelConfig:
    raw, eagle = read_fields(raw, where)
    family = _family(raw, where)
    raw = _text(raw)
    raw = {**_ABSENT.get(raw["model_type"], {}), **raw}
    gemma = family.startswith("gemma")
    if family == "gemma3":
        raw = {**_GEMMA3_DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
        if raw.get("use_bidirectional_attention"):
            raise ConfigError(f"{where}: bidirectional attention makes embeddings, not text; choose a causal model")
    field = _Fields(raw, where)
    layers, heads, hidden = (field.whole(n) for n in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    max_position = field.whole("max_position_embeddings", _DEFAULT_POSITIONS.get(family))
    layer_type = raw.get("layer_type") if eagle else None
    wide = "qwen3" in (family, layer_type)
    head_dim = field.whole("head_dim", 256 if gemma else 128 if wide else hidden // max(heads, 1))
    attention_bias = field.flag("attention_bias")
    rope, local_rope = _ropes(raw, family, max_position, where)
    if rope.kind == "yarn":  # configs of Qwen keep the length of pre-training where YaRN is switched on
        max_position = max(max_position, int(rope.factor * rope.original_max))
    query_scalar = field.number("query_pre_attn_scalar", head_dim) if family in ("gemma2", "gemma3") else head_dim
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return ModelConfig(
        family=family,
        vocab_size=field.whole("vocab_size"),
        hidden_size=hidden,
        mlp_size=field.whole("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=field.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=field.number("rms_norm_eps", 1e-6),
        activation=_activation(raw, gemma, where),
        tie_embeddings=field.flag("tie_word_embeddings", gemma),
        rope=rope,
        local_rope=local_rope,
        windows=windows(raw, layers, where) if eagle else _windows(field, family, layers),
        scale=query_scalar**-0.5,
        qkv_bias="qwen2" in (family, layer_type) or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=family in ("llama", EAGLE, EAGLE3) and field.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "gemma3") or layer_type == "qwen3",
        post_norms=family in ("gemma2", "gemma3"),
        unit_offset=gemma,
        embed_scale=math.sqrt(hidden) if gemma else None,
        attention_softcap=field.optional("attn_logit_softcapping") if gemma else None,
        logit_softcap=field.optional("final_logit_softcapping") if gemma or family == "head" else None,
        bos_id=next(iter(_ids(raw.get("bos_token_id"))), None),
        eos_ids=_ids(raw.get("eos_token_id")),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        draft_vocab_size=field.whole("draft_vocab_size") if raw.get("draft_vocab_size") else None,
        feature_layers=_feature_layers(raw, where) if family == "head" else None,
        eagle=eagle,
        fp8=read_format(raw.get("quantization_config"), where),
    )


def _feature_layers(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    layers = raw.get("feature_layers")
    whole = isinstance(layers, list) and all(isinstance(n, int) and n >= 0 for n in layers)
    if not whole or not raw.get("draft_vocab_size"):
        raise ConfigError(f"{where}: a draft head needs feature_layers (whole numbers) and draft_vocab_size")
    assert isinstance(layers, list)
    return tuple(sorted(set(layers)))


def _family(raw: Mapping[str, Any], where: str) -> str:
    supported = "supported: Llama, Mistral, Qwen2, Qwen3, Gemma 1, 2 and 3 (text)"
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(f"{where}: model_type {kind!r} is not supported; {supported}")
    for name in raw.get("architectures") or ():
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise ConfigError(f"{where}: {name} does not generate text; choose a ...ForCausalLM checkpoint")
    return family


def _activation(raw: Mapping[str, Any], gemma: bool, where: str) -> Activation:
    if gemma:  # Gemma 1 configs say "gelu" and mean the tanh form
        name = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
        name = "gelu_pytorch_tanh" if name == "gelu" else name
    else:
        name = raw.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ConfigError(f"{where}: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _windows(field: _Fields, family: str, layers: int) -> tuple[int | None, ...]:
    raw = field.raw
    if raw.get("sliding_window") is None or family == "gemma":
        return (None,) * layers
    if family in ("qwen2", "qwen3") and not field.flag("use_sliding_window"):
        return (None,) * layers
    if family == "llama" and raw.get("model_type") != "mistral":
        return (None,) * layers
    window = field.whole("sliding_window")
    if window < 1:
        raise ConfigError(f"{field.where}: sliding_window is {window} and must be positive")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in _sliding(field, family, layers)]
    unknown = next((kind for kind in kinds if kind not in ("sliding_attention", "full_attention")), None)
    if unknown is not None:
        raise ConfigError(
            f"{field.where}: layer type {unknown!r} is not supported; supported: full and sliding attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _sliding(field: _Fields, family: str, layers: int) -> list[bool]:
    """Which layers have a window, where the config does not list them."""
    if family in ("qwen2", "qwen3"):
        return [i >= field.whole("max_window_layers", 28) for i in range(layers)]
    if family == "gemma2":
        return [i % 2 == 0 for i in range(layers)]
    if family == "gemma3":
        pattern = field.whole("sliding_window_pattern", field.whole("_sliding_window_pattern", 6))
        return [(i + 1) % pattern != 0 for i in range(layers)]
    return [True] * layers


def _ropes(raw: Mapping[str, Any], family: str, max_position: int, where: str) -> tuple[Rope, Rope | None]:
    """Rotary embedding of full layers, and of windowed layers where it is another one."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise ConfigError(f"{where}: rope_parameters and rope_scaling must be objects")
    given = parameters.get("full_attention") or ({} if family == "gemma3" else parameters)
    full = {"rope_theta": raw.get("rope_theta"), **given}
    if scaling:  # what people add to stretch a context; it goes before what the file came with
        full = {"rope_theta": full["rope_theta"], **scaling}
    if family == "gemma3":
        local = parameters.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq")}
        return _rope(raw, full, 1e6, max_position, where), _rope(raw, local, 1e4, max_position, where)
    return _rope(raw, full, 1e4, max_position, where), None


def _rope(raw: Mapping[str, Any], given: Mapping[str, Any], theta: float, max_position: int, where: str) -> Rope:
    field = _Fields(given, f"{where}, rope")
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = field.number("rope_theta", theta)
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"{where}: partial_rotary_factor {partial} is not supported; only whole heads are rotated")
    if kind not in ROPE_TYPES and kind != "factors":
        raise ConfigError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return Rope(theta)
    if kind == "dynamic":  # stretches only past max_position, where the loader refuses to go
        return Rope(theta, "dynamic")
    if kind == "factors":
        return Rope(theta, kind, factors=tuple(float(f) for f in given["factors"]))
    factor = field.number("factor")
    if factor <= 0:
        raise ConfigError(f"{where}: rope factor {factor} must be positive")
    if kind == "linear":
        return Rope(theta, kind, factor)
    trained = "original_max_position_embeddings"
    original = field.whole(trained, int(raw.get(trained) or max_position))
    if kind == "llama3":
        low, high = field.number("low_freq_factor"), field.number("high_freq_factor")
        if high <= low:
            raise ConfigError(f"{where}: rope high_freq_factor {high} must exceed low_freq_factor {low}")
        return Rope(theta, kind, factor, original, low, high)
    return Rope(
        theta,
        kind,
        factor,
        original,
        beta_fast=field.number("beta_fast", 32.0),
        beta_slow=field.number("beta_slow", 1.0),
        truncate=field.flag("truncate", True),
        attention_factor=_yarn_attention(field, factor),
    )


def _yarn_attention(field: _Fields, factor: float) -> float:
    given = field.optional("attention_factor")
    if given is not None:
        return given

    def temper(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = field.optional("mscale"), field.optional("mscale_all_dim")
    return temper(numerator) / temper(denominator) if numerator and denominator else temper(1.0)
