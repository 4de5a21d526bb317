"""SmolLM2's tokenizer written a second time, in plain Python: no `tokenizers`, no regex for the GPT-2 rules.

Vocabulary and merges come straight from the GGUF file. Also the paragraphs to compare on, made of what every machine
has: the standard library's own sources, and generated text in many scripts.
"""

from __future__ import annotations

import random
import re
import struct
import sysconfig
import unicodedata
from functools import lru_cache
from pathlib import Path

# White_Space of the Unicode standard; str.isspace() counts four control characters more
SPACES = frozenset(
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
)
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def kind(char: str) -> str:
    """L letter, N number, S white space, P anything else."""
    if char in SPACES:
        return "S"
    category = unicodedata.category(char)[0]
    return category if category in "LN" else "P"


def split_words(text: str) -> list[str]:
    """GPT-2's pieces: a contraction; one space and a run of letters, numbers or others; white space."""
    words, at = [], 0
    while at < len(text):
        start = at
        short = next((c for c in CONTRACTIONS if text.startswith(c, at)), None)
        body = at + 1 if text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "S" else at
        if short:
            at += len(short)
        elif kind(text[body]) != "S":
            at = body + 1
            while at < len(text) and kind(text[at]) == kind(text[body]):
                at += 1
        else:
            while at < len(text) and kind(text[at]) == "S":
                at += 1
            if at < len(text) and at - start > 1:
                at -= 1  # the last one goes with the word that follows
        words.append(text[start:at])
    return words


def split_digits(text: str) -> list[str]:
    """Every number character by itself, and what stands between them."""
    pieces, rest = [], ""
    for char in text:
        if kind(char) == "N":
            pieces += [rest, char]
            rest = ""
        else:
            rest += char
    return [piece for piece in (*pieces, rest) if piece]


def read_vocabulary(path: Path) -> dict[str, list]:
    """The array values of a GGUF file's metadata, by key. The format is in ggml's docs/gguf.md."""
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    arrays: dict[str, list] = {}
    with path.open("rb") as file:

        def number(form: str) -> int:
            return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

        def value(kind: int) -> object:
            if kind == 8:
                return file.read(number("Q")).decode()
            if kind == 9:
                inner = number("I")
                return [value(inner) for _ in range(number("Q"))]
            return number(sizes[kind])

        assert file.read(4) == b"GGUF"
        assert number("I") == 3
        number("Q")  # tensors
        for _ in range(number("Q")):
            key, found = value(8), value(number("I"))
            if isinstance(key, str) and isinstance(found, list):
                arrays[key] = found
    return arrays


class ReferenceTokenizer:
    """encode() as SmolLM2 does it."""

    def __init__(self, gguf: Path) -> None:
        arrays = read_vocabulary(gguf)
        tokens, merges, types = (arrays[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type"))
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        self.alphabet = {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}
        self.word_ids = lru_cache(maxsize=None)(self._word_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self.special.split(text)):
            if i % 2:
                ids.append(self.ids[part])
                continue
            for piece in split_digits(part):
                for word in split_words(piece):
                    ids += self.word_ids(word)
        return ids

    def _word_ids(self, word: str) -> tuple[int, ...]:
        symbols = [self.alphabet[byte] for byte in word.encode()]
        symbols = [symbol for symbol in symbols if symbol in self.ids]  # bytes without a token are dropped
        while len(symbols) > 1:
            pairs = [self.ranks.get(pair, len(self.ranks)) for pair in zip(symbols, symbols[1:], strict=False)]
            best = min(pairs)
            if best == len(self.ranks):
                break
            at = pairs.index(best)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return tuple(self.ids[symbol] for symbol in symbols)


def paragraphs(count: int, seed: int = 0) -> list[str]:
    """Varied text: two thirds from the standard library's sources, one third generated."""
    rng = random.Random(seed)
    found = library_paragraphs(count * 2 // 3, rng)
    return [*found, *(generated_paragraph(rng) for _ in range(count - len(found)))]


def library_paragraphs(count: int, rng: random.Random) -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("email/*.py")) + sorted(folder.glob("encodings/*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [part for part in re.split(r"\n\s*\n", text) if 20 <= len(part) <= 1200]
    return rng.sample(found, min(count, len(found)))


# first and last code point; all of them in Unicode since long before the oldest Python we run on
RANGES = [
    *([(0x20, 0x7E)] * 8),
    (0x00, 0x1F),
    (0x80, 0xFF),
    (0x100, 0x17F),  # Latin
    (0x370, 0x3FF),  # Greek
    (0x400, 0x45F),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew
    (0x621, 0x64A),  # Arabic
    (0x660, 0x669),  # and its digits
    (0x905, 0x939),  # Devanagari
    (0x966, 0x96F),  # and its digits
    (0xE01, 0xE3A),  # Thai
    (0xE50, 0xE59),  # and its digits
    (0x10D0, 0x10F0),  # Georgian
    (0x1200, 0x1206),  # Ethiopic
    (0x1E00, 0x1EFF),  # Latin with marks
    (0x2000, 0x206F),  # spaces and punctuation
    (0x2074, 0x2079),  # superscripts
    (0x20A0, 0x20B5),  # currencies
    (0x2150, 0x2182),  # fractions and Roman numerals
    (0x2190, 0x22FF),  # arrows and operators
    (0x2460, 0x249B),  # numbers in circles
    (0x2500, 0x25FF),  # boxes
    (0x3000, 0x3003),  # the ideographic space
    (0x3041, 0x3096),  # Hiragana
    (0x30A1, 0x30FA),  # Katakana
    (0x4E00, 0x4FFF),  # Han
    (0xAC00, 0xAD00),  # Hangul
    (0xE000, 0xE010),  # private use
    (0xFB00, 0xFB06),  # ligatures
    (0xFE00, 0xFE0F),  # variation selectors
    (0xFF10, 0xFF19),  # wide digits
    (0x1D400, 0x1D419),  # bold letters
    (0x1D7CE, 0x1D7FF),  # bold digits
    (0x1F1E6, 0x1F1FF),  # flags
    (0x1F300, 0x1F5FF),  # pictures
    (0x1F600, 0x1F64F),  # faces
]
PHRASES = [
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say it's what we've DON'T'd; you're 'tis 'S 'LL",
    "In 1789, 3.14159 and 1,000,000 people; x² + y³ = ½ or Ⅳ, ٣٤٥ and ४५६.",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # ok\n\n\nclass A:\n\tpass\n',
    "<|im_start|>user\nhi 12<|im_end|>\n",
    "<|endoftext|>",
    "<repo_name>a/b<file_sep>c.py <reponame> <gh_stars>7",
    "<|im_start|<|im_end|>> <|im_end |> <empty_output",
    "日本語のテキスト、漢字とカナ。",
    "中文句子，没有空格。",
    "한국어 문장입니다.",
    "Это предложение по-русски.",
    "Ελληνικά κείμενα",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇺🇳 ❤\ufe0f 🏴\u200d☠\ufe0f",
    "Ça coûte 20 € à l’Hôtel-Dieu – « déjà vu »…",
    "Zoë naïve coöperate, a\u0301e\u0308 n\u0303",
    "https://example.org/a?b=1&c=%20#d",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
    "SELECT * FROM t WHERE x>=10;",
    "\u200bzero\u200cwidth\u200d\ufeff",
    "tab\there  two   three    four\n\n\nlines\r\n\r\n  end  ",
    "____----====****",
    "CamelCaseAndSNAKE_CASE42times",
]


def generated_paragraph(rng: random.Random) -> str:
    """Phrases, runs of one script, digits and white space, in any order."""
    parts = []
    for _ in range(rng.randint(1, 12)):
        choice = rng.random()
        if choice < 0.4:
            parts.append(rng.choice(PHRASES))
        elif choice < 0.75:
            span = rng.choice(RANGES)
            parts.append("".join(chr(rng.randint(*span)) for _ in range(rng.randint(1, 12))))
        elif choice < 0.9:
            parts.append(
                rng.choice(["  ", "\n", "\n\n  ", "\t\t", " \u00a0 ", "\u3000", "\r\n", " ", "      ", "\x0b\x0c"])
            )
        else:
            parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
        parts.append(rng.choice(["", "", " ", " ", "'s", "'"]))
    return "".join(parts)
