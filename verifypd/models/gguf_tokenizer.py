"""Writes the Hugging Face files (tokenizer, chat template, config) that a GGUF file holds as metadata.

Knows byte-level BPE vocabularies whose pre-tokenizer it can name exactly; refuses the others. Nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifypd.errors import ModelError, TokenizerError

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched before the text is split

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# By `tokenizer.ggml.pre`. SmolLM splits every digit from its neighbours before the GPT-2 rules see the text.
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]},
    "gpt-2": _BYTE_LEVEL,
}


def read_metadata(path: Path) -> dict[str, Any]:
    """All key/value pairs of a GGUF file, and `tensors`: the names of its tensors."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as GGUF ({error}); download it again") from None
    pairs: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    return {**pairs, "tensors": [tensor.name for tensor in reader.tensors]}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    _write_json(folder / "tokenizer.json", tokenizer_json(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata), indent=2)
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    _write_json(folder / "generation_config.json", _special_ids(metadata), indent=2)


def write_config(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write config.json of a Llama-type model."""
    _write_json(folder / "config.json", llama_config(metadata), indent=2)


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"the tokenizer in this GGUF file (model {model!r}, pre-tokenizer {pre!r}) cannot be rebuilt exactly;"
            " put the model's own tokenizer.json and tokenizer_config.json into the folder of the GGUF file"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    # A byte missing from the vocabulary leaves no token: unk_token is null, as in the original file
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **flags} for index, flags in _added_tokens(metadata).items()],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": bpe,
    }


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer_config.json; the chat template stands in its own file."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    named = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for key, role in roles.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    return {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): flags for index, flags in _added_tokens(metadata).items()},
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        # not GPT2Tokenizer: transformers would build that one's own pre-tokenizer and lose the digits
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def llama_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json."""
    if metadata.get("general.architecture") != "llama":
        raise ModelError(f"no config.json can be made for GGUF architecture {metadata.get('general.architecture')!r}")
    of = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    heads, hidden = of["attention.head_count"], of["embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        **_special_ids(metadata),
        "head_dim": of.get("rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": of["feed_forward_length"],
        "max_position_embeddings": of["context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": of["block_count"],
        "num_key_value_heads": of.get("attention.head_count_kv", heads),
        "rms_norm_eps": _shortest(of["attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(of.get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in metadata["tensors"],
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _added_tokens(metadata: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return {
        index: {
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    }


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _shortest(value: float) -> float:
    """The decimal number that was meant: 9.999999747378752e-06, a float32, is 1e-05."""
    return float(f"{value:.7g}")


def _write_json(path: Path, contents: Mapping[str, Any], indent: int | None = None) -> None:
    path.write_text(json.dumps(contents, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8", newline="\n")
