"""Built-in names: the shapes are those of the real models, and the table says what is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifypd.models import builtin
from verifypd.models.builtin import BUILTINS

# layers, hidden, heads, kv heads, head dim, MLP, vocabulary, parameters published (norms and biases included)
SHAPES = {
    "smollm2": (30, 576, 9, 3, 64, 1536, 49152, 134_515_008),
    "tinyllama-1.1b": (22, 2048, 32, 4, 64, 5632, 32000, 1_100_048_384),
    "llama-2-7b": (32, 4096, 32, 32, 128, 11008, 32000, 6_738_415_616),
    "codellama-34b": (48, 8192, 64, 8, 128, 22016, 32000, 33_743_970_304),
    "qwen2-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, 1_543_714_304),
    "qwen2-7b": (28, 3584, 28, 4, 128, 18944, 152064, 7_615_616_512),
    "gemma-2b": (18, 2048, 8, 1, 256, 16384, 256000, 2_506_172_416),
    "gemma-7b": (28, 3072, 16, 16, 256, 24576, 256000, 8_537_680_896),
}


def test_names() -> None:
    assert list(BUILTINS) == list(SHAPES)
    assert builtin.find("Llama-2-7B") is BUILTINS["llama-2-7b"]
    assert builtin.find("nothing") is None


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str) -> None:
    config = BUILTINS[name].config
    found = (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim)
    assert (*found, config.mlp_size, config.vocab_size) == SHAPES[name][:7]


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_published_number(name: str) -> None:
    config = BUILTINS[name].config
    norms = config.hidden_size * (2 * config.layers + 1)
    biases = config.layers * config.head_dim * (config.heads + 2 * config.kv_heads) if config.qkv_bias else 0
    assert config.parameters + norms + biases == SHAPES[name][7]


@pytest.mark.parametrize(
    ("name", "theta", "eps", "tied", "bias", "activation", "position", "bos", "eos"),
    [
        ("smollm2", 1e5, 1e-5, True, False, "silu", 8192, 1, 2),
        ("tinyllama-1.1b", 1e4, 1e-5, False, False, "silu", 2048, 1, 2),
        ("llama-2-7b", 1e4, 1e-5, False, False, "silu", 4096, 1, 2),
        ("codellama-34b", 1e6, 1e-5, False, False, "silu", 16384, 1, 2),
        ("qwen2-1.5b", 1e6, 1e-6, True, True, "silu", 131072, 151643, 151643),
        ("qwen2-7b", 1e6, 1e-6, False, True, "silu", 131072, 151643, 151643),
        ("gemma-2b", 1e4, 1e-6, True, False, "gelu_tanh", 8192, 2, 1),
        ("gemma-7b", 1e4, 1e-6, True, False, "gelu_tanh", 8192, 2, 1),
    ],
)
def test_arithmetic(
    name: str,
    theta: float,
    eps: float,
    tied: bool,
    bias: bool,
    activation: str,
    position: int,
    bos: int,
    eos: int,
) -> None:
    config = BUILTINS[name].config
    assert (config.rope.theta, config.rope.kind, config.norm_eps) == (theta, "default", eps)
    assert (config.tie_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias) == (tied, bias, False, False)
    assert (config.activation, config.max_position) == (activation, position)
    assert (config.bos_id, config.eos_ids) == (bos, (eos,))
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert config.windows == (None,) * config.layers
    assert config.unit_offset == name.startswith("gemma")


def test_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "_in_hub_cache", lambda hub_id: hub_id == "Qwen/Qwen2-7B")
    found = {model.name: model for model in builtin.descriptions()}
    assert list(found) == list(SHAPES)
    assert [model.name for model in found.values() if model.present] == ["qwen2-7b"]
    assert found["smollm2"].needs == "93 MB from the package index, once"
    assert "token" in found["gemma-7b"].needs
    lines = builtin.describe().splitlines()
    assert lines[0].split() == ["name", "model", "parameters", "here", "real", "weights", "need"]
    assert lines[6].split()[:5] == ["qwen2-7b", "Qwen2-7B", "7.6", "B", "yes"]


def test_hub_cache_is_looked_at_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, str]] = []

    def look(repo: str, name: str) -> str | None:
        asked.append((repo, name))
        return str(tmp_path) if name.endswith("index.json") else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    assert builtin._in_hub_cache("a/b")
    assert asked == [("a/b", "model.safetensors"), ("a/b", "model.safetensors.index.json")]
