"""Reads GGUF files: metadata into a ModelConfig, quantised tensors into ordinary ones. Knows llama.cpp's conventions.

Against a Hugging Face checkpoint, a GGUF names tensors differently, interleaves the rows of q and k (llama only) and
stores Gemma's norms with the 1 already added. The tokenizer in the file is not read here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd.errors import ModelError
from verifypd.models.checkpoint import CHUNK, copy_chunks
from verifypd.models.config import ModelConfig

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
# the same stored name is a different norm in families with norms after each part
_PRE_NORMS = {"ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


# metadata value types of the format: struct codes of scalars, and two kinds of their own
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies, and how its rows are quantised."""

    shape: tuple[int, ...]  # rows first
    kind: int  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the weights. Arrays (of tokens, mostly) are left out: walking them is slow."""

    metadata: dict[str, Any]
    tensors: dict[str, Entry]


class _Cursor:
    """Reads a GGUF header value by value; running out of bytes is a struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(f"{self.take('Q')}s").decode()  # type: ignore[no-any-return]

    def value(self, kind: int) -> Any:
        """A scalar or string; None for an array, which is stepped over."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        item, count = self.take("I"), self.take("Q")
        if item in _SCALARS:
            self.at += count * struct.calcsize("<" + _SCALARS[item])
            return None
        for _ in range(count):
            if item == _STRING:
                length = self.take("Q")
                self.at += length
            else:
                self.value(item)
        return None


def read_gguf_header(path: Path) -> Header:
    """Metadata and tensor places of a whole, single GGUF file; every tensor is known to lie within it."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist: give a GGUF file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header, size = _parse(_Cursor(data)), len(data)
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError, OSError):
        raise ModelError(f"{path} is not a whole GGUF file: download it again") from None
    end = max((e.offset + prod(e.shape[:-1]) * e.row_bytes for e in header.tensors.values()), default=0)
    if end > size:
        raise ModelError(f"{path} is cut short ({size} of {end} bytes): download it again")
    if header.metadata.get("split.count", 1) > 1:
        raise ModelError(f"{path} is one part of several: join them with llama.cpp's `llama-gguf-split --merge`")
    return header


def _parse(cursor: _Cursor) -> Header:
    sizes = _quants().GGML_QUANT_SIZES  # kind -> weights and bytes of a block
    if cursor.take("4s") != b"GGUF" or cursor.take("I") not in (2, 3):
        raise ValueError("not a little-endian GGUF")
    tensors, values = cursor.take("Q"), cursor.take("Q")
    metadata = {}
    for _ in range(values):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.take("I"))
    found = []
    for _ in range(tensors):
        name = cursor.string()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        found.append((name, shape, cursor.take("I"), cursor.take("Q")))
    alignment = metadata.get("general.alignment", 32)
    base = -(-cursor.at // alignment) * alignment
    entries = {}
    for name, shape, kind, offset in found:
        block, size = sizes[kind]
        entries[name] = Entry(shape, kind, base + offset, shape[-1] // block * size)
    return Header(metadata, entries)


def _quants() -> Any:
    try:
        import gguf
    except ImportError:
        raise ModelError("reading GGUF files needs the gguf package: pip install gguf") from None
    return gguf


def gguf_config(path: Path) -> ModelConfig:
    """The config a GGUF's metadata describes."""
    header = read_gguf_header(path)
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor token_embd.weight is missing: download it again")

    def meta(name: str, default: Any = None) -> Any:
        value = header.metadata.get(f"{arch}.{name}")
        return default if value is None else value

    if meta("expert_count"):
        raise ModelError(f"{path}: a mixture of experts ({arch}) is not supported; choose a dense model")
    window = meta("attention.sliding_window")
    raw = {
        "model_type": "mistral" if arch == "llama" and window else ARCHITECTURES[arch],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": meta("embedding_length"),
        "intermediate_size": meta("feed_forward_length"),
        "num_hidden_layers": meta("block_count"),
        "num_attention_heads": meta("attention.head_count"),
        "num_key_value_heads": meta("attention.head_count_kv"),
        "head_dim": meta("attention.key_length", meta("rope.dimension_count")),
        "max_position_embeddings": meta("context_length"),
        "rms_norm_eps": meta("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "sliding_window": window,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            header.metadata[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in header.metadata
        ],
        "attn_logit_softcapping": meta("attn_logit_softcapping"),
        "final_logit_softcapping": meta("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(arch, meta),
        **_rope(arch, meta, path, tensors),
    }
    return ModelConfig.from_dict({name: value for name, value in raw.items() if value is not None}, str(path))


def _query_scalar(arch: str, meta: Any) -> float | None:
    """Gemma's 27B models scale scores by hidden size / heads; the file does not say so, llama.cpp knows it by size."""
    if (arch, meta("block_count")) in (("gemma2", 46), ("gemma3", 62)):
        return float(meta("embedding_length") / meta("attention.head_count"))
    return meta("attention.key_length")  # type: ignore[no-any-return]


def _rope(arch: str, meta: Any, path: Path, tensors: dict[str, Entry]) -> dict[str, Any]:
    """rope_parameters; Llama 3's stretching is stored as a tensor of divisors instead of its settings."""
    full: dict[str, Any] = {"rope_theta": meta("rope.freq_base"), "rope_type": "default"}
    kind = meta("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        entry = tensors["rope_freqs.weight"]
        factors = np.fromfile(path, np.float32, entry.shape[0], offset=entry.offset)
        full.update(rope_type="factors", factors=factors.tolist())
    elif kind != "none":
        full.update(
            rope_type=kind,
            factor=meta("rope.scaling.factor"),
            original_max_position_embeddings=meta("rope.scaling.original_context_length"),
        )
    if arch != "gemma3":
        return {"rope_parameters": full}
    local = {"rope_theta": meta("rope.freq_base_swa"), "rope_type": "default"}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


class GGUFFile:
    """The tensors of a GGUF under their checkpoint names, dequantised as they are read."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.where = str(path)
        self._path = path
        self._config = config
        tensors = read_gguf_header(path).tensors
        tensors.pop("rope_freqs.weight", None)  # part of the config
        ordered = sorted(tensors.items(), key=lambda item: item[1].offset)
        self._entries = {_checkpoint_name(name, config): entry for name, entry in ordered}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self._entries.items()}

    def read_into(self, name: str, out: Tensor) -> None:
        """See TensorSource.read_into."""
        copy_chunks(self.chunks(name), out)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """See TensorSource.chunks; float32, a vector comes whole."""
        gguf = _quants()
        entry = self._entries[name]
        kind = gguf.GGMLQuantizationType(entry.kind)
        rows = 1 if len(entry.shape) == 1 else entry.shape[0]
        data = np.fromfile(self._path, np.uint8, rows * entry.row_bytes, offset=entry.offset).reshape(rows, -1)
        order = self._row_order(name)
        if order is not None:
            data = data[order] if rows > 1 else data.reshape(len(order), -1)[order].reshape(1, -1)
        step = max(1, CHUNK // entry.shape[-1])
        for start in range(0, rows, step):
            try:
                values = gguf.quants.dequantize(data[start : start + step], kind)
            except NotImplementedError:
                raise ModelError(f"{self.where}: {kind.name} tensors cannot be read; use Q8_0 or Q4_K_M") from None
            part = torch.from_numpy(np.require(values, np.float32, ("C", "W")))
            part = part[0] if len(entry.shape) == 1 else part
            yield part - 1 if self._config.unit_offset and name.endswith("norm.weight") else part

    def _row_order(self, name: str) -> np.ndarray[Any, Any] | None:
        """Stored row of each row of q and k: llama.cpp interleaves the two halves of a head."""
        if self._config.family != "llama" or not (".q_proj." in name or ".k_proj." in name):
            return None
        half = self._config.head_dim // 2
        rows = self.shapes[name][0]  # of a bias: its length
        return np.arange(rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)


def _checkpoint_name(name: str, config: ModelConfig) -> str:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`; names it does not know stay as they are."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    prefix, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    part = {**_LAYER, **(_POST_NORMS if config.post_norms else _PRE_NORMS)}.get(part, "")
    return f"layers.{index}.{part}.{suffix}" if prefix == "blk" and part else name
