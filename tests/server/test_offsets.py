"""Offsets of tokens whose bytes never become a character, or that are hidden."""

from __future__ import annotations

import pytest

from verifypd.server.offsets import Offsets
from verifypd.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ([b"a", b"\xc3", b"\xa9", b"b"], "aéb", [0, 1, 1, 2]),
        ([b"\xe4", b"a", b"b"], "\ufffdab", [0, 1, 2]),  # the first never becomes whole
        ([b"\xf0", b"\x9f", b"\xc3", b"\xa9"], "\ufffdé", [0, 0, 1, 1]),
        ([b"\xff", b"\xff", b"a"], "\ufffd\ufffda", [0, 1, 2]),
        ([b"\xef", b"\xbf", b"\xbd", b"a"], "\ufffda", [0, 0, 0, 1]),  # U+FFFD itself
    ],
)
def test_a_token_begins_where_its_character_does(
    tokenizer: Tokenizer, pieces: list[bytes], text: str, expected: list[int]
) -> None:
    of = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    ids = [of[piece] for piece in pieces]
    offsets = Offsets(tokenizer, [], True, 0)
    assert [offsets.take(token) for token in ids] == expected
    assert tokenizer.decode(ids) == text
    for token, at in zip(pieces, expected, strict=True):
        assert text[at] == "\ufffd" or token in text[at].encode()


def test_what_is_hidden_has_no_length(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_ids[0]
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    hidden, shown = Offsets(tokenizer, [a], True, 7), Offsets(tokenizer, [], False, 0)
    assert [hidden.take(token) for token in (a, eos, a)] == [7, 8, 8]
    assert [shown.take(token) for token in (a, eos, a)] == [0, 1, 5]


def test_without_a_tokenizer_there_is_no_text() -> None:
    offsets = Offsets(None, [5], True, 0)
    assert [offsets.take(token) for token in (5, 6)] == [0, 0]
