"""The fewest tokens a text can have: never more than it has, and of use where a text is far too long."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from tests.tokenizer.kinds import CORES, core_of
from verifypd.tokenizer import Tokenizer
from verifypd.tokenizer.bounds import _COMPOSED
from verifypd.tokenizer.detokenize import byte_alphabet

LETTERS = [
    "h",
    "e",
    "l",
    " ",
    "  ",
    "\n",
    "hell",
    " w",
    "<s>",
    "▁",
    "é",
    "e\u0301",
    "\u212a",
    "日",
    "\u1112\u1161\u11ab",
    "🙂",
    "\ud800",
]


def texts() -> list[str]:
    dice = random.Random(1)
    mixed = ["".join(dice.choices(LETTERS, k=dice.randrange(1, 60))) for _ in range(300)]
    return [*mixed, *(letter * 100 for letter in LETTERS), "", " " * 500 + "<s>" + " " * 500]


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("normalizer", [None, "NFC", "NFKC", "strip", "shorten"])
@pytest.mark.parametrize("strips", [False, True])
def test_no_text_has_fewer(kind: str, normalizer: str | None, strips: bool) -> None:
    core = core_of(kind)
    if strips:
        core.add_special_tokens([AddedToken("<s>", lstrip=True, rstrip=True, normalized=False, special=True)])
    steps = {"NFC": normalizers.NFC(), "NFKC": normalizers.NFKC(), "strip": normalizers.Strip()}
    steps["shorten"] = normalizers.Replace(Regex(" +"), " ")
    if normalizer is not None:
        core.normalizer = normalizers.Sequence([steps[normalizer], *([core.normalizer] if core.normalizer else [])])
    words = Tokenizer(core, bos_id=0)
    for text in texts():
        assert words.fewest_tokens(text) <= len(words.encode(text, add_special_tokens=False))
    if normalizer in ("NFKC", "strip", "shorten"):
        assert words.fewest_tokens("hello" * 1000) == 0, "it may lose any amount of text"


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_a_text_far_too_long_is_known_to_be(kind: str) -> None:
    words = Tokenizer(core_of(kind), bos_id=0)
    assert words.fewest_tokens("ab " * 100_000) >= 300_000 // 7  # <0x0A> has six letters, <pad> five
    assert words.fewest_tokens("é" * 100_000) >= 200_000 // 7


@pytest.mark.parametrize("kind", ["metaspace", "word-piece"])
def test_unknown_text_may_be_one_token(kind: str) -> None:
    assert Tokenizer(core_of(kind), bos_id=0).fewest_tokens("日" * 100_000) == 0


def test_bytes_without_a_token_count_for_nothing() -> None:
    """As in the built-in model's vocabulary, which lacks some control characters."""
    state = json.loads(core_of("byte-level").to_str())
    del state["model"]["vocab"][byte_alphabet()[4]]
    words = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), bos_id=0)
    assert words.encode("\x04" * 1000) == [] and words.fewest_tokens("\x04" * 1000) == 0
    assert words.fewest_tokens("ab " * 1000 + "\x04" * 100_000) == words.fewest_tokens("ab " * 1000) > 400


def test_text_may_be_dropped_between_tokens() -> None:
    core = core_of("byte-level")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words = Tokenizer(core, bos_id=0)
    assert words.encode(" " * 1000) == [] and words.fewest_tokens(" " * 1000) == 0


def test_composing_makes_text_at_most_that_much_shorter() -> None:
    """Every character with the longest text that becomes it: its parts, each by its longest name."""
    longest: dict[str, int] = {}
    characters = [chr(i) for i in range(0x30000) if not 0xD800 <= i < 0xE000]  # planes with letters
    for one in characters:
        whole = unicodedata.normalize("NFC", one)
        if len(whole) == 1:
            longest[whole] = max(longest.get(whole, 0), len(one.encode()))
    for one in characters:
        parts = unicodedata.normalize("NFD", one)
        size = sum(longest.get(part, len(part.encode())) for part in parts)
        assert size <= _COMPOSED * len(unicodedata.normalize("NFC", one).encode())
