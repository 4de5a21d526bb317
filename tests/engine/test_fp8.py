"""The engine with weights in fp8: texts are the quantised verifier's own, whoever drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.arms import prompts
from tests.engine.pairs import assert_greedy
from verifypd import LLM, SamplingParams
from verifypd.kernels.base import Fp8Weight

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kv_memory": "32MB", "max_model_len": 128, "controller": "fixed", "max_draft": 4,
    "batch_size": 4,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def stored(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The verifier quantised by hand, in fp8 with its scales and widened to float32."""
    base = tmp_path_factory.mktemp("fp8")
    packed, wide = (Path(shutil.copytree(pair[0], base / name)) for name in ("packed", "wide"))
    tensors = load_file(pair[0] / "model.safetensors")
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


def test_texts_are_the_quantised_verifiers(pair: tuple[Path, Path], stored: tuple[Path, Path]) -> None:
    """Token for token, plain and drafted, and those of transformers over the widened weights."""
    many = prompts(4)
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
