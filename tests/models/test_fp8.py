"""Checkpoints in fp8 as they are published: what is loaded is what their scales say, and stays fp8 where it can."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import PagedRun, Unpacked, load, random_ids
from verifypd.config import EngineConfig
from verifypd.engine.quantized import check_verifier, kept_in
from verifypd.errors import ConfigError, ModelError
from verifypd.kernels.choose import select
from verifypd.kernels.weights import FP8, FP8_MAX, Fp8Weight, Weight
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.fp8_config import Fp8Format
from verifypd.models.shards import Shard

Checkpoint = Callable[[str], Path]

STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [40, 24]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy},
    }
    group["weights"] |= weights  # type: ignore[operator]
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}  # type: ignore[assignment]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    }


def rounded(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, the scale as it is stored, and as it is meant."""
    scale = weight.abs().max() / FP8_MAX
    return rounded(weight, scale), scale, scale


def by_row(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / FP8_MAX).bfloat16()
    return rounded(weight, scale.float()), scale, scale.float()


def by_block(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 40 by 24, which do not divide the matrix."""
    rows, columns = -(-weight.shape[0] // 40), -(-weight.shape[1] // 24)
    padded = torch.zeros(rows * 40, columns * 24)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = (padded.view(rows, 40, columns, 24).abs().amax((1, 3)) / FP8_MAX).bfloat16().clamp_min(1e-9)
    wide = scale.float().repeat_interleave(40, 0).repeat_interleave(24, 1)[: weight.shape[0], : weight.shape[1]]
    return rounded(weight, wide), scale, wide


FORMATS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]] = {
    "tensor": (STATIC, "weight_scale", by_tensor),
    "channel": (compressed("channel"), "weight_scale", by_row),
    "block": (BLOCKS, "weight_scale_inv", by_block),
    "compressed block": (compressed("block", block_structure=[40, 24]), "weight_scale", by_block),
}
KEPT = ("tensor", "channel")
BETWEEN = "layers.1.mlp.down_proj.weight"  # a matrix that is not quantised


def stored(folder: Path, form: str, to: Path) -> tuple[Path, Path]:
    """The checkpoint in fp8, and another with the same numbers in float32."""
    settings, name_of_scale, quantise = FORMATS[form]
    packed, wide = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "wide"))
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in [n for n in tensors if "_proj.weight" in n and BETWEEN not in n]:
        values, scale, factor = quantise(tensors[name] * (3.0 if "k_proj" in name else 1.0))
        tensors[name], meant[name] = values, values.float() * factor
        tensors[name.replace("weight", name_of_scale)] = scale
        if form == "tensor":
            tensors[name.replace("weight", "input_scale")] = torch.tensor([0.5])
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.25 + layer)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([2.0 + layer], dtype=torch.bfloat16)
    save_file(tensors, packed / "model.safetensors")
    save_file(meant, wide / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return packed, wide


def wide(weight: Weight) -> Tensor:
    assert isinstance(weight, Fp8Weight)
    return weight.dequantize()


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_the_checkpoints_own(form: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """On a CPU they are widened, with every kernel; q, k and v, fused, keep scales of their own."""
    packed, widened = stored(checkpoint("qwen2"), form, tmp_path)
    spans = [(0, 0, random_ids(30))]
    expected = PagedRun(load(widened)).logits(spans)
    for kernels in (select("cpu", "torch"), select("cpu"), Unpacked()):
        model = load(packed, kernels=kernels)
        assert (PagedRun(model).logits(spans) - expected).abs().max() <= 1e-4
        assert isinstance(model.layers[0].qkv, Fp8Weight) == (form in KEPT and isinstance(kernels, Unpacked))
    assert model.config.fp8 == Fp8Format(None if form in KEPT else (40, 24))


@pytest.mark.parametrize("form", KEPT)
def test_values_stay_as_they_are_stored(form: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = stored(checkpoint("llama"), form, tmp_path)
    model, tensors = load(packed, kernels=Unpacked()), load_file(packed / "model.safetensors")
    gate_up, parts = model.layers[2].gate_up, [f"model.layers.2.mlp.{part}_proj." for part in ("gate", "up")]
    assert isinstance(gate_up, Fp8Weight)
    assert torch.equal(gate_up.values.float(), torch.cat([tensors[part + "weight"].float() for part in parts]))
    scales = [tensors[part + "weight_scale"].float().expand(96, 1)[:, 0] for part in parts]
    assert torch.equal(gate_up.scale, torch.cat(scales))
    assert isinstance(model.layers[1].down, Tensor)  # as it is stored
    again = load(packed, kernels=Unpacked(), quantization="fp8")
    assert isinstance(again.layers[1].down, Fp8Weight)  # as it is asked for
    assert isinstance(again.layers[2].gate_up, Fp8Weight)
    assert torch.equal(again.layers[2].gate_up.scale, gate_up.scale)


def test_dummy_weights_are_as_the_checkpoint_would_be(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = stored(checkpoint("llama"), "channel", tmp_path)
    model = load(packed, kernels=Unpacked(), load_format="dummy")
    assert 0.01 < wide(model.layers[1].down).std() < 0.03
    assert isinstance(model.head, Tensor)


def test_blocks_are_widened_and_it_is_said(checkpoint: Checkpoint, tmp_path: Path, caplog: Any) -> None:
    packed, _ = stored(checkpoint("llama"), "block", tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load(packed, kernels=Unpacked(), dtype=torch.bfloat16)
    assert "20 matrices in fp8 have scales by block and are widened as they are read" in caplog.text
    assert isinstance(model.layers[0].qkv, Tensor) and model.layers[0].qkv.dtype == torch.bfloat16
    again = load(packed, kernels=Unpacked(), quantization="fp8")
    assert isinstance(again.layers[0].qkv, Fp8Weight)


def test_shards_have_the_scales_of_the_whole(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = stored(checkpoint("qwen2"), "channel", tmp_path)
    whole, *ranks = (load(packed, kernels=Unpacked(), shard=s) for s in (Shard(0, 1), Shard(0, 2), Shard(1, 2)))
    parts = [rank.layers[0] for rank in ranks]
    assert torch.equal(torch.cat([wide(part.output) for part in parts], 1), wide(whole.layers[0].output))
    gates = [wide(part.gate_up).chunk(2) for part in parts]
    assert torch.equal(torch.cat([gates[i][j] for j in (0, 1) for i in (0, 1)]), wide(whole.layers[0].gate_up))


def test_what_is_wrong_with_a_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = stored(checkpoint("llama"), "channel", tmp_path)
    path, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight_scale"
    tensors = load_file(path)
    for scale, words in (
        (None, "tensor layers.0.mlp.up_proj.weight is stored as F8_E4M3 without a scale beside it"),
        (
            torch.ones(3, 1),
            "layers.0.mlp.up_proj.weight_scale has shape (3, 1): neither one scale, nor one for each row",
        ),
    ):
        save_file({n: t for n, t in {**tensors, name: scale}.items() if t is not None}, path)
        with pytest.raises(ModelError) as error:
            load(packed)
        assert words in str(error.value) and "\n" not in str(error.value)
    strange = torch.zeros(2, 3, 4).to(torch.float8_e4m3fn)
    save_file({**tensors, "vision_tower.patches.weight": strange}, path)
    load(packed)  # of a part that is not loaded
    save_file(
        {**tensors, "vision_tower.patches.weight": strange, "vision_tower.patches.weight_scale": torch.ones(2)}, path
    )
    with pytest.raises(ModelError, match=r"vision_tower.patches.weight is stored as F8_E4M3 with shape \(2, 3, 4\)"):
        load(packed)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq quantisation is not supported; supported: fp8 (e4m3)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 quantisation is not supported"),
        ({**compressed("channel"), "format": "pack-quantized"}, "compressed-tensors pack-quantized quantisation"),
        (compressed("channel", num_bits=4), "compressed-tensors float-quantized quantisation is not supported"),
        (compressed("group"), "is not supported"),
        ({**BLOCKS, "weight_block_size": [128]}, "blocks of [128] with one scale are not known"),
    ],
)
def test_other_formats_are_refused(quantization: dict[str, Any], words: str, checkpoint: Checkpoint) -> None:
    raw = json.loads((checkpoint("llama") / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict({**raw, "quantization_config": quantization})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_is_said_of_it_at_start(checkpoint: Checkpoint, caplog: Any) -> None:
    raw = json.loads((checkpoint("llama") / "config.json").read_text())
    shape = ModelConfig.from_dict({**raw, "quantization_config": STATIC})
    source, cpu, cuda = ModelSource("a/b", shape), torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError, match="a/b is stored in fp8: leave out --quantization int8"):
        check_verifier(EngineConfig(quantization="int8"), source, cuda)
    with caplog.at_level(logging.WARNING):
        check_verifier(EngineConfig(), source, cuda)
        assert not caplog.text
        check_verifier(EngineConfig(), source, cpu)
    assert "a CPU does not multiply fp8" in caplog.text
    assert kept_in(shape, None, cuda) == "fp8" and kept_in(shape, None, cpu) is None
    blocks = ModelConfig.from_dict({**raw, "quantization_config": BLOCKS})
    assert kept_in(blocks, None, cuda) is None and kept_in(blocks, "fp8", cuda) == "fp8"
