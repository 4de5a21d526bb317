"""Configs of every family, in the layouts of transformers 4 and 5, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verifypd.errors import ConfigError, ModelError
from verifypd.models.config import ModelConfig, Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **changes})


def test_llama() -> None:
    config = parse()
    assert (config.family, config.layers, config.heads, config.kv_heads, config.head_dim) == ("llama", 22, 32, 4, 64)
    assert config.rope == Rope(10_000.0)
    assert config.windows == (None,) * 22
    assert (config.bos_id, config.eos_ids, config.dtype) == (1, (2,), "bfloat16")
    assert config.scale == 64**-0.5
    assert 1.09e9 < config.parameters < 1.11e9  # TinyLlama-1.1B


def test_both_layouts_of_rope_mean_the_same() -> None:
    old = parse(rope_theta=500_000.0, rope_scaling=SCALING)
    new = parse(rope_parameters={"rope_theta": 500_000.0, **SCALING})
    legacy = parse(rope_theta=500_000.0, rope_scaling={**SCALING, "rope_type": None, "type": "llama3"})
    assert old == new == legacy
    assert old.rope == Rope(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    assert parse(rope_theta=1e6, rope_scaling=None).rope == Rope(1e6)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_scaling_added_to_the_layout_of_transformers_5_stretches(kind: str) -> None:
    """As the pages of Qwen's models tell people to."""
    full = {"rope_type": "default", "rope_theta": 1e6}
    given = {"full_attention": full, "sliding_attention": full} if kind == "gemma3_text" else full
    scaling = {"type": "linear", "factor": 4.0}
    assert parse(model_type=kind, hidden_act=None, rope_parameters=given, rope_scaling=scaling).rope == Rope(
        1e6, "linear", 4.0
    )


def test_yarn_takes_its_attention_factor_from_the_factor() -> None:
    rope = parse(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}).rope
    assert (rope.kind, rope.factor, rope.original_max) == ("yarn", 4.0, 32768)
    assert rope.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_yarn_stretches_the_longest_context() -> None:
    """Qwen's configs keep `max_position_embeddings` where YaRN is switched on; others have the stretched one there."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse(max_position_embeddings=40960, rope_scaling=yarn).max_position == 131_072
    assert parse(max_position_embeddings=131_072, rope_scaling=yarn).max_position == 131_072
    assert parse(max_position_embeddings=163_840, rope_scaling=yarn).max_position == 163_840


def test_mistral_window() -> None:
    assert parse(model_type="mistral", sliding_window=4096).windows == (4096,) * 22
    assert parse(model_type="mistral", sliding_window=None).windows == (None,) * 22
    assert parse(sliding_window=4096).windows == (None,) * 22  # Llama has none


def test_qwen2_window_only_where_it_is_used() -> None:
    qwen = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 131072,
        "max_window_layers": 20,
    }
    assert parse(**qwen, use_sliding_window=False).windows == (None,) * 22
    assert parse(**qwen, use_sliding_window=True).windows == (None,) * 20 + (131072,) * 2
    assert parse(**qwen).qkv_bias
    assert not parse(**qwen).output_bias


def test_qwen3() -> None:
    config = parse(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=128)
    assert (config.qk_norm, config.head_dim, config.qkv_bias) == (True, 128, False)


def test_gemma() -> None:
    config = parse(model_type="gemma", hidden_act="gelu", head_dim=256, tie_word_embeddings=None, num_key_value_heads=1)
    assert (config.activation, config.tie_embeddings, config.unit_offset) == ("gelu_tanh", True, True)
    assert config.embed_scale == 2048**0.5


def test_gemma2() -> None:
    config = parse(
        model_type="gemma2",
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=4096,
        query_pre_attn_scalar=144,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    assert config.windows[:4] == (4096, None, 4096, None)
    assert (config.scale, config.attention_softcap, config.logit_softcap) == (1 / 12, 50.0, 30.0)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3", "Gemma2"])
def test_an_absent_field_is_what_transformers_takes_for_it(kind: str) -> None:
    """A null is not an absent field: it switches a window or a cap off."""
    transformers = pytest.importorskip("transformers")
    shape = {**LLAMA, "model_type": kind.lower(), "head_dim": 64, "use_sliding_window": True, "max_window_layers": 1}
    theirs = getattr(transformers, f"{kind}Config")(**shape)
    assert ModelConfig.from_dict(shape).windows[-2:] == (theirs.sliding_window, None if kind == "Gemma2" else 4096)
    if kind == "Gemma2":
        config = ModelConfig.from_dict(shape)
        assert config.scale == theirs.query_pre_attn_scalar**-0.5
        assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
        assert (theirs.attn_logit_softcapping, theirs.final_logit_softcapping) == (50.0, 30.0)
        off = ModelConfig.from_dict({**shape, "attn_logit_softcapping": None, "final_logit_softcapping": None})
        assert (off.attention_softcap, off.logit_softcap) == (None, None)


def test_gemma3_inside_a_multimodal_config() -> None:
    """As published: whatever equals the class default is left out."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    config = ModelConfig.from_dict(raw)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.rope == Rope(1e6, "linear", 8.0)
    assert config.local_rope == Rope(1e4)
    assert config.layer_rope(0) == config.local_rope
    assert config.layer_rope(5) == config.rope
    assert config.eos_ids == (1, 106)
    assert config.scale == 1 / 16


def test_gemma3_layout_of_transformers_5() -> None:
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    config = parse(
        model_type="gemma3_text",
        hidden_act=None,
        rope_parameters={"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        layer_types=["sliding_attention"] * 21 + ["full_attention"],
        sliding_window=512,
    )
    assert config.rope == Rope(1e6, "linear", 8.0)
    assert config.local_rope == Rope(1e4)
    assert config.windows == (512,) * 21 + (None,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported; supported: Llama"),
        ({"model_type": None}, "None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq quantisation is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope' is not supported; supported: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "must be positive"),
        ({"rope_scaling": {**SCALING, "high_freq_factor": 1.0}}, "must exceed"),
        ({"rope_scaling": "linear"}, "must be objects"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big', not a number"),
        ({"vocab_size": 12.5}, "not a whole number"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_attention_heads": 30}, "30 heads do not divide by 4"),
        ({"head_dim": 63}, "odd"),
        ({"model_type": "mistral", "sliding_window": 0}, "must be positive"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["chunked_attention"] * 22},
            "'chunked_attention'",
        ),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]}, "1 layer types for 22"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_from_folder_adds_the_generation_configs_end_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert ModelConfig.from_folder(tmp_path).eos_ids == (8, 9, 7)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "does not exist"), ("{", "cannot be read"), ("[]", "not a JSON object")]
)
def test_unreadable_config(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_folder(tmp_path)
