"""A GGUF made from a checkpoint the way llama.cpp makes it gives the checkpoint's logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.checkpoints import PagedRun, load, random_ids, reference_logits, tiny
from verifypd.errors import ModelError
from verifypd.kernels.torch import TorchKernels
from verifypd.models.base import Model
from verifypd.models.config import ModelSource
from verifypd.models.gguf import gguf_config, read_gguf_header
from verifypd.models.loader import load_model

Checkpoint = Callable[[str], Path]
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def write_gguf(folder: Path, path: Path, arch: str, quant: gguf.GGMLQuantizationType = F32, **extra: int) -> Path:
    """Convert a checkpoint folder, following llama.cpp's convert_hf_to_gguf."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["rope_parameters"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_token_list([f"<{i}>" for i in range(raw["vocab_size"])])
    writer.add_eos_token_id(raw["eos_token_id"])
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
    if arch.startswith("gemma") and raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    for name, value in extra.items():
        writer.add_uint32(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], raw["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
            data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = quant if data.ndim == 2 else F32
        writer.add_tensor(stored, gguf.quants.quantize(data, kind), raw_dtype=kind)
    if arch == "llama" and rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(raw).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(raw: dict) -> np.ndarray:
    """What llama.cpp divides each frequency by."""
    rope = raw["rope_parameters"]
    dim = raw["head_dim"]
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = (context / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(wavelength < context / high, 1.0, np.where(wavelength > context / low, rope["factor"], between))


def load_gguf(path: Path, **options: bool) -> Model:
    source = ModelSource(str(path), gguf_config(path), gguf=path)
    return load_model(source, dtype=torch.float32, device="cpu", kernels=TorchKernels(), **options)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
def test_logits_equal_the_checkpoints(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family)
    if family == "qwen2":  # the file has no word for windows there
        folder = tiny("qwen2", tmp_path, use_sliding_window=False)
    if family == "gemma2":  # nor for a query scale other than the head's
        folder = tiny("gemma2", tmp_path, query_pre_attn_scalar=32)
    if family == "gemma3":
        folder = tiny("gemma3", tmp_path, query_pre_attn_scalar=32)
    path = write_gguf(folder, tmp_path / "model.gguf", "llama" if family == "llama3" else family)
    ids = random_ids(50)
    assert (PagedRun(load_gguf(path)).logits([(0, 0, ids)]) - reference_logits(folder, ids)).abs().max() <= 1e-4


def test_a_gemma2_file_older_than_its_caps_has_the_usual_ones(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("add_attn_logit_softcapping", "add_final_logit_softcapping"):
        monkeypatch.setattr(gguf.GGUFWriter, name, lambda *_: None)
    config = gguf_config(write_gguf(checkpoint("gemma2"), tmp_path / "model.gguf", "gemma2"))
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


def test_biases_are_unpermuted_like_their_weights(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, attention_bias=True)
    path = write_gguf(folder, tmp_path / "model.gguf", "llama")
    ids = random_ids(30)
    assert (PagedRun(load_gguf(path)).logits([(0, 0, ids)]) - reference_logits(folder, ids)).abs().max() <= 1e-4


def test_quantised_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Q8_0 gives the rounded weights exactly, in the checkpoint's order of rows."""
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama", Q8_0)
    ours, exact = load_gguf(path).layers[2], load(checkpoint("llama")).layers[2]
    for name in ("qkv", "output", "gate_up", "down"):
        weight = getattr(exact, name).numpy()
        rounded = gguf.quants.dequantize(gguf.quants.quantize(weight, Q8_0), Q8_0)
        assert np.array_equal(getattr(ours, name).numpy(), rounded)
    assert torch.equal(ours.input_norm, exact.input_norm)
    assert load_gguf(path, quantization="int8").weight_bytes < 0.6 * load_gguf(path).weight_bytes


def test_large_tensors_are_read_in_chunks(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama", Q8_0)
    whole = load_gguf(path)
    monkeypatch.setattr("verifypd.models.gguf.CHUNK", 1000)
    parts = load_gguf(path)
    assert torch.equal(parts.embedding, whole.embedding)
    assert torch.equal(parts.layers[0].qkv, whole.layers[0].qkv)


def test_header_leaves_token_lists_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    header = read_gguf_header(write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama"))
    assert header.metadata["tokenizer.ggml.tokens"] is None
    assert header.metadata["llama.embedding_length"] == 64
    assert gguf_config(tmp_path / "model.gguf").eos_ids == (1,)


@pytest.mark.parametrize(
    ("keep", "words"), [(0, "not a whole"), (3, "not a whole"), (900, "not a whole"), (-40, "cut short")]
)
def test_truncated_file(keep: int, words: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=words) as error:
        gguf_config(path)
    assert "\n" not in str(error.value)


def test_a_mixture_of_experts_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Mixtral calls itself `llama`; its experts have tensors of their own, and none seems to be missing."""
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama", llama__expert_count=8)
    with pytest.raises(ModelError, match="mixture of experts"):
        gguf_config(path)


def test_other_files_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="does not exist"):
        gguf_config(path)
    path.write_text("GGML, the format before" * 10)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        gguf_config(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported; supported: llama"):
        gguf_config(path)
    split = write_gguf(checkpoint("llama"), tmp_path / "part.gguf", "llama", split__count=3)
    with pytest.raises(ModelError, match="one part of several"):
        gguf_config(split)
