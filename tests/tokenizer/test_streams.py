"""Text to token ids and back, whole and token by token, for every decoder kind."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback

from tests.tokenizer.kinds import CORES, KINDS, TOKENIZERS, core_of
from verifypd.tokenizer import Tokenizer
from verifypd.tokenizer.detokenize import WindowStream

TEXTS = [
    "Hello world",
    " leading",
    "two  spaces",
    "naïve café",
    "日本語 テスト",
    "😀 and 👩‍👩‍👧",
    "line\nline\t1 2",
    "",
    " ",
]


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], cuts: list[int], skip: bool) -> str:
    stream = tokenizer.stream(prompt, skip_special_tokens=skip)
    edges = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    return "".join(stream.push(output[a:b]) for a, b in zip(edges, edges[1:], strict=False)) + stream.finish()


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_stream_continues_the_prompt(kind: str, data: st.DataObject) -> None:
    """Whatever the tokens and however they arrive, prompt text + streamed text is the text of all tokens."""
    tokenizer = TOKENIZERS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24)
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 24), max_size=6))
    before, whole = (tokenizer.decode(part, skip) for part in (prompt, prompt + output))
    if before.endswith("�"):  # the prompt may stop inside a character, which the output then completes
        before = before.rstrip("�")
        assert whole.startswith(before)
        return
    assert streamed(tokenizer, prompt, output, cuts, skip) == whole[len(before) :]
    assert whole.startswith(before)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_an_id_past_the_vocabulary_leaves_no_trace(kind: str) -> None:
    size = TOKENIZERS[kind].vocab_size
    for ids in ([size + 1, 3], [3, size + 1, 3]):
        assert TOKENIZERS[kind].decode(ids, False) == CORES[kind].decode(ids, False)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@settings(max_examples=150)
@given(data=st.data())
def test_decode_equals_the_library(kind: str, data: st.DataObject) -> None:
    """Ill-formed UTF-8 included."""
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[kind].vocab_size + 3), max_size=24))
    skip = data.draw(st.booleans())
    assert TOKENIZERS[kind].decode(ids, skip) == CORES[kind].decode(ids, skip)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@settings(max_examples=100)
@given(text=st.text(st.sampled_from("abz HTé日😀.\n"), max_size=30))
def test_byte_fallback_text_decodes_as_in_the_library(kind: str, text: str) -> None:
    ids = CORES[kind].encode(text).ids
    assert TOKENIZERS[kind].encode(text) == ids
    assert TOKENIZERS[kind].decode(ids) == CORES[kind].decode(ids) == text


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_half_characters(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.stream()
    parts = [stream.push([i]) for i in tokenizer.encode(text)]
    assert "".join(parts) == text
    assert "�" not in "".join(parts)
    assert stream.finish() == ""


def test_unfinished_character_appears_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ok 😀")
    stream = tokenizer.stream()
    assert stream.push(ids[:-1]) == "ok "
    assert stream.finish() == "�"
    assert tokenizer.decode(ids[:-1]) == "ok �"


def test_prompt_may_end_inside_a_character() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("😀!")
    assert tokenizer.stream(ids[:2]).push(ids[2:]) == "😀!"


@pytest.mark.parametrize("text", ["ab😀 x", "abé�é"])
def test_a_prompt_of_a_window_may_end_inside_a_character(text: str) -> None:
    core = CORES["byte-level"]
    ids = core.encode(text).ids
    for cut in range(len(ids)):
        stream = WindowStream(core.decode, ids[:cut])
        got = "".join(stream.push([index]) for index in ids[cut:]) + stream.finish()
        before = core.decode(ids[:cut])
        assert got == text[len(before) if text.startswith(before) else len(before) - 1 :]


@pytest.mark.parametrize("text", ["a€ b", "😀!", "é"])
def test_a_prompt_may_end_inside_a_character_whose_bytes_are_tokens(text: str) -> None:
    """A decoder of bytes gives a � for each byte of a character that is not whole."""

    def decode(ids: list[int]) -> str:
        return ByteFallback().decode([chr(byte) if byte < 0x80 else f"<0x{byte:02X}>" for byte in ids])

    whole = list(text.encode())
    for cut in range(len(whole) + 1):
        stream = WindowStream(decode, whole[:cut])
        got = "".join(stream.push([byte]) for byte in whole[cut:]) + stream.finish()
        begun = whole[:cut].copy()
        while begun and decode(begun) != bytes(begun).decode(errors="ignore"):
            begun.pop()
        assert got == text[len(decode(begun)) :], cut


def test_leading_space_is_stripped_only_at_the_start_of_the_whole_text() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer.encode("he w")
    assert tokenizer.token(ids[0]) == "<s>"
    assert tokenizer.stream(ids[:1]).push(ids[1:]) == "he w"  # only <s> before it: the text opens here
    tail = [i for i in ids if tokenizer.token(i) == "▁w"]
    assert tokenizer.stream(ids).push(tail) == " w"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> he w"


def test_byte_run_is_not_poisoned_by_its_end() -> None:
    """Text that was streamed stays; the library would turn the whole run into replacement characters."""
    tokenizer = TOKENIZERS["gemma"]
    ids = [tokenizer.token_id(f"<0x{b:02X}>") for b in "日".encode() + b"\xe6\x97"]
    assert all(i is not None for i in ids)
    assert tokenizer.decode([i for i in ids if i is not None]) == "日�"


def test_streaming_is_linear() -> None:
    """Bytes that never make a character are the worst case of a stream that waits for one."""
    tokenizer = TOKENIZERS["byte-level"]
    bad = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff")
    stream = tokenizer.stream([bad] * 100_000)
    start = time.thread_time()
    size = sum(len(stream.push([bad])) for _ in range(50_000))
    assert size == 50_000
    assert time.thread_time() - start < 5


def test_other_decoders_stream_through_a_window() -> None:
    tokenizer, core = TOKENIZERS["word-piece"], CORES["word-piece"]
    ids = core.encode("hello world , hellos").ids
    assert isinstance(tokenizer.stream(), WindowStream)
    for cut in range(len(ids) + 1):
        got = streamed(tokenizer, ids[:cut], ids[cut:], [1, 2], skip=True)
        assert core.decode(ids[:cut]) + got == core.decode(ids)
    many = ids * 40
    assert streamed(tokenizer, [], many, list(range(0, len(many), 3)), skip=True) == core.decode(many)


# --- encoding ---------------------------------------------------------------------------------------------------------


def test_special_tokens_and_sizes() -> None:
    tokenizer = TOKENIZERS["llama"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("</s>he", add_special_tokens=False)[0] == 1
    assert tokenizer.decode([0, 1]) == ""
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<s></s>"
    assert tokenizer.token(tokenizer.vocab_size + 5) == ""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.token_bytes(3) == b"\x00"


@pytest.mark.parametrize(("kind", "add_bos", "first"), [("llama", None, 0), ("llama", False, None), ("gemma", True, 0)])
def test_add_bos_of_the_config_goes_first(kind: str, add_bos: bool | None, first: int | None) -> None:
    tokenizer = Tokenizer(core_of(kind), bos_id=0, add_bos=add_bos)
    ids = tokenizer.encode("he")
    assert ids.count(0) == (first is not None)
    assert (ids[0] == 0) == (first == 0)
    assert 0 not in tokenizer.encode("he", add_special_tokens=False)


def test_truncation_and_padding_left_in_the_file_are_ignored() -> None:
    core = core_of("byte-level")
    core.enable_truncation(4)
    core.enable_padding(length=64)
    assert len(Tokenizer(core).encode("abcdefgh")) == 8


def test_lone_surrogates_do_not_break_encoding() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"
