"""Token ids to text, token by token. Knows the decoders of tokenizer.json; nothing of requests or stop strings.

The decoders of all supported families come down to bytes: a token is a byte string, and the text is the UTF-8 of the
bytes put together. One incremental UTF-8 decoder then gives linear time and never half a character. Bytes that are no
UTF-8 become U+FFFD, one for each maximal ill-formed part. (For byte-fallback vocabularies the `tokenizers` library
replaces a whole run of byte tokens, good characters included, once any of it is bad; text already streamed could
never be taken back, so the run is not poisoned here.)

Any other decoder is handled by decoding a short window of tokens again and again (`WindowStream`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRIME_BYTES = 8  # of the prompt's end: more than the longest unfinished UTF-8 sequence (3 bytes)
_WINDOW = 16  # tokens a WindowStream holds back at most while the text ends in U+FFFD


class DetokenizeStream(Protocol):
    """The text of a growing list of token ids."""

    def push(self, ids: Iterable[int]) -> str:
        """The text these tokens add. An unfinished character is held back until it is whole."""

    def finish(self) -> str:
        """What is still held back; a character that was never finished becomes U+FFFD."""


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """How tokens become bytes: by the GPT-2 byte alphabet, or by replacements and byte tokens such as `<0x0A>`."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    first_replacements: tuple[tuple[str, str], ...] = ()  # instead, for the first token of a text (Metaspace)
    strip: str = ""  # up to `strip_count` of these are taken off the start of the text
    strip_count: int = 0

    @classmethod
    def parse(cls, state: dict[str, Any] | None) -> ByteDecoder | None:
        """From the `decoder` of a tokenizer.json; None if it is of another kind."""
        kind = state["type"] if state else None
        if state is None or kind is None:
            return None
        if kind == "ByteLevel":
            return cls(byte_level=True)
        if kind == "Metaspace":
            mark = state["replacement"]
            first = () if state.get("prepend_scheme") == "never" else ((mark, ""),)
            return cls(replacements=((mark, " "),), first_replacements=first)
        steps = state["decoders"] if kind == "Sequence" else [state]
        return cls._parse_sequence(steps)

    @classmethod
    def _parse_sequence(cls, steps: list[dict[str, Any]]) -> ByteDecoder | None:
        """[Replace...] [ByteFallback] [Fuse [Strip at the start]], in this order; None for any other sequence."""
        replacements: list[tuple[str, str]] = []
        strip, strip_count, rank = "", 0, 0
        order = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
        kinds = [step["type"] for step in steps]
        if len(kinds) == 1 and kinds[0] in ("ByteLevel", "Metaspace"):
            return cls.parse(steps[0])
        for step in steps:
            kind = step["type"]
            if kind not in order or order[kind] < rank or (kind == "Strip" and rank < 2):
                return None
            rank = order[kind]
            if kind == "Replace":
                if "String" not in step["pattern"]:
                    return None
                replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Strip":
                if step["stop"] or strip_count:
                    return None
                strip, strip_count = step["content"], step["start"]
        return cls(False, "ByteFallback" in kinds, tuple(replacements), (), strip, strip_count)

    def piece(self, token: str, first: bool = False) -> bytes:
        """The bytes of one token; `first`: it opens the text."""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token, written as plain text
                return token.encode()
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes((int(token[3:5], 16),))
        for old, new in self.first_replacements if first and self.first_replacements else self.replacements:
            token = token.replace(old, new)
        return token.encode()


class Pieces:
    """The bytes of each token id, looked up once. Shared by all streams of a tokenizer."""

    def __init__(self, decoder: ByteDecoder, token: Callable[[int], str | None]) -> None:
        self.decoder = decoder
        self._token = token
        self._known: dict[int, bytes] = {}

    def __getitem__(self, index: int) -> bytes:
        piece = self._known.get(index)
        if piece is None:
            piece = self._known[index] = self.decoder.piece(self._token(index) or "")
        return piece

    def __contains__(self, index: int) -> bool:
        """Whether there is such a token; an id past the vocabulary leaves no trace, as in the library."""
        return bool(self[index]) or self._token(index) is not None

    def first(self, index: int) -> bytes:
        """The bytes of a token that opens a text."""
        return (
            self.decoder.piece(self._token(index) or "", first=True) if self.decoder.first_replacements else self[index]
        )


class ByteStream:
    """Stream for tokens that are bytes."""

    def __init__(self, pieces: Pieces, hidden: frozenset[int], prompt_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._hidden = hidden  # ids that leave no text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._opening = True  # no token yet
        self._strip = pieces.decoder.strip_count
        self.push(self._prompt_end(prompt_ids))

    def push(self, ids: Iterable[int]) -> str:
        """The text these tokens add. An unfinished character is held back until it is whole."""
        visible = [index for index in ids if index not in self._hidden and index in self._pieces]
        if not visible:
            return ""
        pieces = [self._pieces[index] for index in visible]
        if self._opening:
            pieces[0] = self._pieces.first(visible[0])
            self._opening = False
        return self._stripped(self._utf8.decode(b"".join(pieces)))

    def finish(self) -> str:
        """What is still held back; a character that was never finished becomes U+FFFD."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._pieces.decoder.strip):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text

    def _prompt_end(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt: as many as decide how the next one reads."""
        tail: list[int] = []
        size = 0
        for index in reversed(prompt_ids):
            if index not in self._hidden:
                tail.append(index)
                size += len(self._pieces[index])
            if size >= _PRIME_BYTES:
                break
        return tail[::-1]


class WindowStream:
    """Stream for any decoder: decodes the tokens since the last whole character, with a few before them as context."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_ids)[-_WINDOW:]
        self._read = len(self._window)  # tokens of the window whose text is out
        self._out = decode(self._window)  # and that text

    def push(self, ids: Iterable[int]) -> str:
        """The text these tokens add. An unfinished character is held back until it is whole."""
        return "".join(self._one(index) for index in ids)

    def _one(self, index: int) -> str:
        self._window.append(index)
        text = self._decode(self._window)
        if text.endswith("�") and len(self._window) - self._read < _WINDOW:
            return ""
        whole = len(self._out)
        if self._out.endswith("�") and not text.startswith(self._out):
            whole = len(self._out.rstrip("�"))  # the prompt began this character: a � for it, or for each of its bytes
            whole += len(text[whole:]) - len(text[whole:].lstrip("�"))  # those before it that never become one
        new = text[whole:]
        if len(self._window) >= 2 * _WINDOW:
            del self._window[:-_WINDOW]
            text = self._decode(self._window)
        self._read, self._out = len(self._window), text
        return new

    def finish(self) -> str:
        """What is still held back; a character that was never finished becomes U+FFFD."""
        text = self._decode(self._window)
        new, self._out, self._read = text[len(self._out) :], text, len(self._window)
        return new


def parse_decoder(decoder: Any) -> ByteDecoder | None:
    """The byte decoder equal to a decoder of the `tokenizers` library, if there is one."""
    return ByteDecoder.parse(json.loads(decoder.__getstate__())) if decoder is not None else None


def byte_alphabet() -> dict[int, str]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_BYTE_OF = {char: byte for byte, char in byte_alphabet().items()}
