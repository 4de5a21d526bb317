"""How few tokens a text can have, told from its length alone. Knows the steps of tokenizer.json; encodes nothing.

A token stands for no more bytes of text than it has itself, so a text has at least bytes / longest token of them. That
holds where no step drops text or makes one token of very much of it. Where that is not certain there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from verifypd.tokenizer.detokenize import byte_alphabet

_COMPOSED = 4  # bytes that NFC may make one: a Kelvin sign of three is a K, and one to spare for what Unicode adds
_KEEP_TEXT = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")  # pre-tokenizers that drop nothing


@dataclass(frozen=True, slots=True)
class LengthBound:
    """The longest token of a vocabulary, and what may come between a text and its tokens."""

    longest: int  # bytes
    composed: bool = False  # text other than ASCII may become shorter first
    strips: bool = False  # some token takes the white space beside it along
    dropped: bytes = b""  # bytes that have no token and count for nothing

    @classmethod
    def of(cls, core: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> LengthBound | None:
        """The bound of a tokenizer; None: its tokens may stand for any amount of text."""
        normalizers, splitters = _steps(core.normalizer), _steps(core.pre_tokenizer)
        by_bytes = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
        dropped = _unknown_bytes(core.model, vocabulary, by_bytes)
        if dropped is None:
            return None
        if not all(map(_keeps_length, normalizers)):
            return None
        if any(step["type"] not in _KEEP_TEXT or step.get("behavior") == "Removed" for step in splitters):
            return None
        added = core.get_added_tokens_decoder().values()
        sizes = (len(token) if by_bytes else len(token.encode("utf-8", "replace")) for token in vocabulary)
        return cls(
            longest=max([1, *sizes, *(len(token.content.encode()) for token in added)]),
            composed=any(step["type"] == "NFC" for step in normalizers),
            strips=any(token.lstrip or token.rstrip for token in added),
            dropped=dropped,
        )

    def fewest(self, text: str) -> int:
        """No encoding of the text has fewer tokens."""
        if self.strips:
            text = "".join(text.split())
        size = len(text.encode("utf-8", "replace").translate(None, self.dropped))
        shrink = _COMPOSED if self.composed and not text.isascii() else 1
        return -(-size // (self.longest * shrink))


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences within it laid open."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    inner = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for each in inner for step in _flat(each)]


def _unknown_bytes(model: Any, vocabulary: Mapping[str, int], by_bytes: bool) -> bytes | None:
    """Bytes without a token to fall back on, which are dropped, or one token for many; None: any text may be that."""
    if not isinstance(model, tokenizers.models.BPE):
        return None
    if by_bytes:
        return bytes(byte for byte, letter in byte_alphabet().items() if letter not in vocabulary)
    whole = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if whole else None


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter, but for what NFC composes."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in ("NFC", "Prepend", "ByteLevel")
