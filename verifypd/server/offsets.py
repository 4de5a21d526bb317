"""Where each token begins in the text of its choice. Knows tokenizers; nothing of requests."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from verifypd.tokenizer import Tokenizer


class Offsets:
    """Follows a text token by token. A token that continues a character has the offset of that character."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], skip_special: bool, start: int) -> None:
        """`prompt`: tokens before the text; `start`: the offset at which it begins."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(prompt, skip_special_tokens=skip_special) if tokenizer else None
        self.end = start  # characters that are whole so far

    def take(self, token: int) -> int:
        """The offset of the next token."""
        if self._tokenizer is None or self._stream is None:
            return self.end
        before = self.end
        self.end += len(self._stream.push([token]))
        raw = self._tokenizer.token_bytes(token)
        if not raw or _continues(raw[0]):
            return before
        own = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)
        return max(before, self.end - len(own))  # what was held back, and never became whole, stands before it


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is in the middle of a character."""
    return byte & 0xC0 == 0x80
