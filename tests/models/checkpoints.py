"""Tiny random checkpoints of every family, complete Hugging Face folders, and a paged harness to run them.

Knows transformers, which writes the checkpoints and is what their logits are held against.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifypd.attention import AttentionBackend, PassLayout
from verifypd.attention.torch import TorchAttention
from verifypd.kernels import Kernels
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import Fp8Weight, Int8Weight, Weight
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.loader import load_model

VOCAB = 384
BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# family -> (transformers config class, fields that make it what it is at this size)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 12, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 12, "num_hidden_layers": 7}),
}


def tiny(family: str, folder: Path, *, seed: int = 0, shards: bool = False, **overrides: Any) -> Path:
    """Write a random checkpoint of `family` with its tokenizer into `folder`; the same arguments give the same files.

    overrides: fields of the family's config. shards: several safetensors files and an index.
    """
    import transformers

    class_name, fields = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**_COMMON, **fields, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    gemma = family.startswith("gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 2:  # logits of order one, and no two rows alike
                weight.copy_(noise * weight.shape[1] ** -0.5)
            else:
                weight.copy_(0.1 * noise + (0.0 if gemma or name.endswith("bias") else 1.0))
    model.save_pretrained(folder, max_shard_size="100KB" if shards else "1GB")
    write_tokenizer(folder, config.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int = VOCAB) -> None:
    """A byte-level BPE that covers every text: bytes, then merges of two letters up to `vocab_size`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(("<s>", "</s>", "<unk>"))}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    merges = []
    for pair in _pairs():
        if len(vocab) >= vocab_size:
            break
        vocab["".join(pair)] = len(vocab)
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<unk>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _pairs() -> list[tuple[str, str]]:
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    return [(a, b) for a in "Ġ" + letters for b in letters]


@cache
def _reference(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab_size]: what transformers computes over the whole sequence at once, float32."""
    logits: Tensor = _reference(folder)(torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0].float()


class Unpacked(TorchKernels):
    """Weights stay as a GPU has them: a CPU would widen fp8."""

    def pack(self, weight: Tensor | Int8Weight | Fp8Weight) -> Weight:
        """As it is."""
        return weight


def load(folder: Path, *, kernels: Kernels | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """The model in `folder` through our loader."""
    source = ModelSource(str(folder), ModelConfig.from_folder(folder), folder=folder)
    return load_model(source, dtype=dtype, device="cpu", kernels=kernels or TorchKernels(), **options)


def layout_for(spans: Sequence[tuple[int, int, int]], block_table: Tensor, block_size: int) -> PassLayout:
    """A layout of (slot, start, rows) spans; a negative start makes void rows."""
    device = block_table.device
    return PassLayout.build(
        span_rows=[rows for _, _, rows in spans],
        contexts=[max(start + rows, 0) for _, start, rows in spans],
        slots=torch.tensor([slot for slot, _, _ in spans], device=device),
        starts=torch.tensor([start for _, start, _ in spans], device=device),
        block_table=block_table,
        block_size=block_size,
    )


class PagedRun:
    """A model with a cache of its own; blocks of a slot lie scattered over the pool."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 4,
        length: int = 128,
        block_size: int = 4,
        attention: AttentionBackend | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config, device = model.config, model.device
        per_slot = -(-length // block_size)
        order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(1)) + 1  # block 0 is nobody's
        self.model = model
        self.attention = attention or TorchAttention()
        self.block_table = order.view(slots, per_slot).to(device, torch.int32)
        self.cache = KVCache(
            config.layers,
            slots * per_slot + 1,
            block_size,
            config.kv_heads,
            config.head_dim,
            dtype or model.activation_dtype,
            device,
        )

    @torch.inference_mode()
    def hidden(self, spans: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """One pass over (slot, start, token ids) spans -> [N, H]."""
        layout = layout_for([(s, start, len(ids)) for s, start, ids in spans], self.block_table, self.cache.block_size)
        ids = torch.tensor([token for _, _, span in spans for token in span], device=self.model.device)
        return self.model.forward(ids, layout, self.attention, self.cache)

    @torch.inference_mode()
    def logits(self, spans: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """One pass over (slot, start, token ids) spans -> [N, vocab_size]."""
        return self.model.logits(self.hidden(spans))


def random_ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Token ids past the special ones."""
    ids: list[int] = torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids
