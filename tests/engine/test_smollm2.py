"""The built-in model for real: greedy text in fp32 equals transformers running the same dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from verifypd import LLM, SamplingParams
from verifypd.models.hub import resolve

pytestmark = pytest.mark.slow
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "List three uses of a paperclip.",
    "In 1969, the first humans",
    "To make bread you need flour, water, salt and",
    "Q: What is 12 times 12?\nA:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Dear Sir or Madam,",
    "Photosynthesis is the process by which",
    "import numpy as np\n\nx = np.",
    "Roses are red, violets are",
    "SELECT name, age FROM users WHERE",
    "The three states of matter are",
    "A haiku about the sea:\n",
    "Translate to Spanish: good morning ->",
    "1, 2, 3, 4, 5, 6, 7,",
    "Newton's second law says that",
    "Breaking news:",
    "<html>\n<head>\n<title>",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' Llama over the dequantised tensors of the GGUF, mapped here and not by the engine's loader."""
    import gguf
    import transformers

    source = resolve("smollm2")
    assert source.gguf is not None and source.folder is not None
    config = transformers.AutoConfig.from_pretrained(source.folder)
    state = {}
    for tensor in gguf.GGUFReader(source.gguf).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        part = tensor.name.split(".")[-2]
        if part in heads:  # llama.cpp interleaves the two halves of each head
            rows = values.shape[0] // heads[part] // 2
            values = values.reshape(heads[part], rows, 2, -1).transpose(1, 2).reshape(values.shape)
        state[_name(tensor.name)] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return made.eval()


def _name(name: str) -> str:
    parts = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    *block, part, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{parts[part]}.{kind}"


REPEATING = {2, 6, 7, 11, 16, 19}  # places of prompts whose texts repeat themselves
OTHERS = {0, 5, 13}  # some whose texts do not: most drafts are wrong there


def test_greedy_text(reference: Any) -> None:
    """Twenty texts are the reference's, with speculation where drafts stand and where they fall, and without it."""
    settings = {"dtype": "float32", "kv_memory": "300MB", "max_model_len": 1024, "controller": "fixed", "max_draft": 4}
    base = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    params = [replace(base, speculation=place in REPEATING | OTHERS) for place in range(len(PROMPTS))]
    with LLM("smollm2", draft="ngram", arch="unified", **settings) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert llm.engine.stats.accepted > 50
    for output, name in zip(outputs, PROMPTS, strict=True):
        prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(ids) == 64
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids]), logits_to_keep=len(ids) + 1).logits[0]
        assert ids == logits[:-1].argmax(-1).tolist(), name
