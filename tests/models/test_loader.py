"""Loading: shards, dtypes, int8, dummy weights, and one clear line for every way a checkpoint can be broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import FAMILIES, PagedRun, Unpacked, load, random_ids, reference_logits, tiny
from verifypd import kernels
from verifypd.errors import ConfigError, ModelError
from verifypd.kernels import Int8Weight
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import Quantization
from verifypd.models.checkpoint import SafetensorsFolder
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.loader import load_model, weight_bytes

Checkpoint = Callable[[str], Path]
FORMS: tuple[Quantization | None, ...] = (None, "int8", "fp8")


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A llama checkpoint to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def refuses(folder: Path, words: str, **options: Any) -> None:
    with pytest.raises(ModelError) as error:
        load(folder, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    one, many = tiny("qwen2", tmp_path / "one"), tiny("qwen2", tmp_path / "many", shards=True)
    assert len(list(many.glob("*.safetensors"))) > 2
    ids = random_ids(20)
    assert torch.equal(PagedRun(load(one)).logits([(0, 0, ids)]), PagedRun(load(many)).logits([(0, 0, ids)]))


def test_fused_rows_are_the_checkpoints_own(checkpoint: Checkpoint) -> None:
    layer = load(checkpoint("qwen2")).layers[1]
    stored = load_file(checkpoint("qwen2") / "model.safetensors")
    prefix = "model.layers.1."
    parts = [f"{prefix}self_attn.{part}_proj." for part in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([stored[part + "weight"] for part in parts]))
    assert torch.equal(layer.qkv_bias, torch.cat([stored[part + "bias"] for part in parts]))
    assert torch.equal(layer.gate_up, torch.cat([stored[f"{prefix}mlp.{p}_proj.weight"] for p in ("gate", "up")]))


def test_dtype_is_converted(checkpoint: Checkpoint) -> None:
    exact, half = load(checkpoint("llama")), load(checkpoint("llama"), dtype=torch.bfloat16)
    assert half.layers[0].qkv.dtype == half.layers[0].input_norm.dtype == half.activation_dtype == torch.bfloat16
    assert torch.equal(half.head, exact.head.bfloat16())
    assert half.weight_bytes * 2 == exact.weight_bytes


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"quantization": "int8"}, {"quantization": "fp8"}],
    ids=["bfloat16", "int8", "fp8"],
)
def test_conversion_in_chunks(options: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(checkpoint("qwen2"), **options)
    monkeypatch.setattr("verifypd.models.checkpoint.CHUNK", 1000)
    parts = load(checkpoint("qwen2"), **options)
    for one, other in ((whole.layers[1].qkv, parts.layers[1].qkv), (whole.head, parts.head)):
        if isinstance(one, Int8Weight):
            assert torch.equal(one.scale, other.scale)
            one, other = one.values, other.values
        assert torch.equal(one, other)


def test_tied_embeddings_share_memory(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("qwen3"))
    assert model.head is model.embedding
    stored = sum(tensor.nbytes for tensor in load_file(checkpoint("qwen3") / "model.safetensors").values())
    assert model.weight_bytes == stored


def test_a_tied_checkpoint_may_repeat_the_embedding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_checkpoint(prefix: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gemma3"), tmp_path / "model"))
    text = json.loads((folder / "config.json").read_text())
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.embeddings.weight"] = torch.zeros(2, 2)
    save_file(renamed, folder / "model.safetensors")
    ids = random_ids(20)
    ours = PagedRun(load(folder)).logits([(0, 0, ids)])
    assert (ours - reference_logits(checkpoint("gemma3"), ids)).abs().max() <= 1e-4


def test_weight_bytes_is_known_before_loading(checkpoint: Checkpoint) -> None:
    for form in FORMS:
        model = load(checkpoint("llama"), quantization=form, kernels=Unpacked())
        assert weight_bytes(model.config, torch.float32, form) == pytest.approx(model.weight_bytes, rel=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_int8_error_is_small(family: str, checkpoint: Checkpoint) -> None:
    ids = random_ids(40)
    model = load(checkpoint(family), quantization="int8")
    assert isinstance(model.layers[0].qkv, Int8Weight)
    assert isinstance(model.head, Int8Weight)
    assert isinstance(model.embedding, Int8Weight) == model.config.tie_embeddings
    exact = reference_logits(checkpoint(family), ids)
    error = PagedRun(model).logits([(0, 0, ids)]) - exact
    assert error.norm() / exact.norm() < 0.04  # 2 to 3 % measured: eight bits, rows of only 64 weights
    assert model.weight_bytes < 0.6 * load(checkpoint(family)).weight_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights(family: str, form: Quantization | None, checkpoint: Checkpoint) -> None:
    source = ModelSource("shape", ModelConfig.from_folder(checkpoint(family)))
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kernels": TorchKernels()}
    options["quantization"] = form
    one, same, other = (load_model(source, load_format="dummy", seed=s, **options) for s in (1, 1, 2))
    ids = random_ids(12)
    logits = [PagedRun(model).logits([(0, 0, ids)]) for model in (one, same, other)]
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0.01
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert one.weight_bytes == load(checkpoint(family), quantization=form).weight_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_selected_kernels_agree_with_the_reference(
    family: str, form: Quantization | None, checkpoint: Checkpoint
) -> None:
    """Whatever this machine runs by default, native code or torch."""
    from verifypd.attention import backend

    ids = random_ids(40)
    fast = PagedRun(
        load(checkpoint(family), kernels=kernels.select("cpu"), quantization=form),
        attention=backend("auto", "cpu"),
    )
    plain = PagedRun(load(checkpoint(family), quantization=form))
    spans = [[(0, 0, ids[:30])], [(0, 30, ids[30:31])], [(0, 31, ids[31:])]]
    for span in spans:
        assert (fast.logits(span) - plain.logits(span)).abs().max() <= (2e-2 if form == "int8" else 1e-4)


def test_dynamic_rope_is_refused_past_its_context(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ConfigError, match="--max-model-len 256 or less"):
        load(folder, max_model_len=300)


def test_shape_without_weights(checkpoint: Checkpoint) -> None:
    source = ModelSource("gemma-7b", ModelConfig.from_folder(checkpoint("gemma")))
    with pytest.raises(ModelError, match="gemma-7b has no weights"):
        load_model(source, dtype=torch.float32, device="cpu", kernels=TorchKernels())
    with pytest.raises(ConfigError, match="load_format 'tensorizer' is not known"):
        load_model(source, dtype=torch.float32, device="cpu", kernels=TorchKernels(), load_format="tensorizer")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refuses(folder, "holds no safetensors file")
    (folder / "pytorch_model.bin").touch()
    refuses(folder, "PyTorch pickles")
    (folder / "pytorch_model.bin").unlink()
    (folder / "small.gguf").touch()
    refuses(folder, "small.gguf itself")


def test_missing_shard(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, shards=True)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    refuses(folder, f"{lost.name} is missing (1 of ")


def test_an_index_that_outlived_its_shards(tmp_path: Path) -> None:
    """transformers leaves it behind where a model is saved again as one file."""
    tiny("llama", tmp_path, shards=True)
    tiny("llama", tmp_path, seed=1)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ids = random_ids(8)
    ours, theirs = PagedRun(load(tmp_path)).logits([(0, 0, ids)]), reference_logits(tmp_path, ids)
    assert (ours - theirs).abs().max() <= 1e-4


def test_broken_index(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, shards=True)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    refuses(folder, "index.json cannot be read")
    index.unlink()
    refuses(folder, "and no model.safetensors.index.json")


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (0, "is not a whole safetensors file"),
        (5, "is not a whole safetensors file"),
        (300, "not a whole"),
        (-9, "is cut short"),
    ],
)
def test_truncated_file(cut: int, words: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refuses(folder, words)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all.",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}',
        b"[1, 2, 3, 4, 5]",
    ],
)
def test_broken_header(header: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    refuses(folder, "has a broken safetensors header")


def test_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuses(folder, "run `git lfs pull`")


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refuses(folder, "tensor layers.1.mlp.up_proj.weight is missing")


def test_wrong_shape(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 32)}))
    refuses(
        folder,
        "tensor layers.2.mlp.up_proj.weight has shape (96, 32), config says (96, 64): the folder mixes two models",
    )


def test_leftover_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(96, 64)}))
    refuses(folder, "tensor layers.3.mlp.up_proj.weight has no place in a 3-layer llama model")


def test_quantised_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    refuses(folder, "tensor model.norm.weight is stored as I8; supported: F32")


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)


def test_file_cut_after_it_was_opened(folder: Path) -> None:
    source = SafetensorsFolder(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="ends early"):
        source.read_into("norm.weight", torch.empty(64))
