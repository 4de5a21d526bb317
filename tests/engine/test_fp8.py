"""The engine with weights in fp8: texts are the quantised verifier's own, whoever drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.arms import prompts
from tests.engine.pairs import assert_greedy, noisy_copy
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.bench.exact import same_in_any_company, write_pair
from verifypd.kernels.weights import Fp8Weight

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kv_memory": "32MB", "max_model_len": 128, "controller": "fixed", "max_draft": 4,
    "batch_size": 4,
}  # fmt: skip
cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def quantised(folder: Path, to: Path) -> tuple[Path, Path]:
    """A verifier quantised by hand, in fp8 with its scales and widened to float32."""
    packed, wide = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "wide"))
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if "_proj.weight" in name]:
        made = Fp8Weight.quantize(tensors[name])
        tensors[name], meant[name] = made.values, made.dequantize()
        tensors[f"{name}_scale"] = made.scale[:, None]
    save_file(tensors, packed / "model.safetensors")
    save_file(meant, wide / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(config))
    return packed, wide


def test_texts_are_the_quantised_verifiers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Token for token, plain and drafted, and those of transformers over the widened weights."""
    many, stored = prompts(4), quantised(pair[0], tmp_path)
    with LLM(str(pair[0]), draft=None, arch="plain", quantization="fp8", **OPTIONS) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(many, PARAMS)]
    for prompt, output in zip(many, plain, strict=True):
        assert_greedy(stored[1], prompt, output)
    head = str(pair[0].parent / "head")
    for model, draft, settings in (
        (pair[0], str(pair[1]), {"quantization": "fp8", "draft_quantization": "fp8"}),
        (pair[0], head, {"quantization": "fp8", "draft_quantization": "fp8", "kernels": "torch"}),
        (stored[0], str(pair[1]), {}),
    ):
        with LLM(str(model), draft=draft, arch="unified", **settings, **OPTIONS) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(many, PARAMS)] == plain
            assert llm.engine.stats.accepted
            assert dict(llm.budget.parts)["verifier weights"] == llm.engine.verify.runner.model.weight_bytes


class TestOnTheDevice:
    pytestmark = cuda

    @pytest.mark.parametrize(("dtype", "slack"), [("float32", 0.0), ("bfloat16", 0.5)])
    def test_texts_are_the_quantised_verifiers(self, dtype: str, slack: float, tmp_path: Path) -> None:
        """Token for token in float32. In bfloat16 up to rounding: of bfloat16 in passes of few rows, of fp8 in others;
        logits are of order one."""
        sizes = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
        verifier = tiny("llama", tmp_path / "verifier", **sizes)
        packed, wide = quantised(verifier, tmp_path)
        draft = str(noisy_copy(verifier, tmp_path / "draft", 0.05))
        many = prompts(6)
        for model, settings in ((verifier, {"quantization": "fp8"}), (packed, {"draft_quantization": "fp8"})):
            options = {**OPTIONS, **settings, "dtype": dtype, "graphs": "lazy", "measure_costs": False}
            with LLM(str(model), draft=draft, arch="unified", device="cuda", **options) as llm:
                assert isinstance(llm.engine.verify.runner.model.layers[1].down, Fp8Weight)
                texts = [output.outputs[0].token_ids for output in llm.generate(many, PARAMS)]
                assert llm.engine.stats.accepted
            for prompt, output in zip(many, texts, strict=True):
                assert_greedy(wide, prompt, output, slack)

    def test_batch_invariant(self, tmp_path: Path) -> None:
        """Weights are widened in every pass: slow, and the same text in any company."""
        found = same_in_any_company(write_pair(tmp_path), graphs="lazy", quantization="fp8")
        assert found["passed"], found
