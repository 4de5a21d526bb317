"""Tokenizers of every decoder kind, made here."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from verifypd.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<pad>"]


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "ll", "hell", "Ġw", "Ċt"]
    core = tokenizers.Tokenizer(
        models.BPE(
            {w: i + 3 for i, w in enumerate(words)}, [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ċ", "t")]
        )
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def byte_fallback(strip: bool) -> tokenizers.Tokenizer:
    """Llama-2's kind (with a leading space to strip), or Gemma's."""
    words = [*(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzHT.", "he", "▁w", "▁▁", "é"]
    core = tokenizers.Tokenizer(
        models.BPE(
            {w: i + 3 for i, w in enumerate(words)},
            [("h", "e"), ("▁", "w"), ("▁", "▁")],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    if strip:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return core


def metaspace() -> tokenizers.Tokenizer:
    words = ["▁", *"abcdefghijklmnopqrstuvwxyzHT.é日", "▁w", "▁▁a"]
    core = tokenizers.Tokenizer(models.BPE({w: i + 3 for i, w in enumerate(words)}, [("▁", "w")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return core


def word_piece() -> tokenizers.Tokenizer:
    words = ["hello", "##lo", "##s", "world", ",", "é", "[UNK]"]
    core = tokenizers.Tokenizer(models.WordPiece({w: i + 3 for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    return core


KINDS = {
    "byte-level": byte_level,
    "llama": lambda: byte_fallback(strip=True),
    "gemma": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
}


def core_of(kind: str) -> tokenizers.Tokenizer:
    core = KINDS[kind]() if kind in KINDS else word_piece()
    # ids 0..2 are in no vocabulary yet: put them in front by rebuilding from JSON
    state = json.loads(core.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"] = [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL)]
    state["model"]["vocab"] = {**{token: i for i, token in enumerate(SPECIAL)}, **state["model"]["vocab"]}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


CORES = {kind: core_of(kind) for kind in (*KINDS, "word-piece")}
TOKENIZERS = {kind: Tokenizer(core, bos_id=0, eos_ids=(1,)) for kind, core in CORES.items()}
