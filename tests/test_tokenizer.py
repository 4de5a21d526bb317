"""Tokenizers of every decoder kind, made here: streams, special tokens, chat templates, differences."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from verifypd.errors import RequestError, TokenizerError
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


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], cuts: list[int], skip: bool) -> str:
    stream = tokenizer.stream(prompt, skip_special_tokens=skip)
    edges = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    return "".join(stream.push(output[a:b]) for a, b in zip(edges, edges[1:], strict=False)) + stream.finish()


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_equals_the_library(kind: str, data: st.DataObject) -> None:
    """Ill-formed UTF-8 included."""
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[kind].vocab_size + 3), max_size=24))
    skip = data.draw(st.booleans())
    assert TOKENIZERS[kind].decode(ids, skip) == CORES[kind].decode(ids, skip)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@settings(max_examples=100, deadline=None)
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
    start = time.perf_counter()
    size = sum(len(stream.push([bad])) for _ in range(50_000))
    assert size == 50_000
    assert time.perf_counter() - start < 5


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


# --- folders ----------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, **files: Any) -> Path:
    core_of("byte-level").save(str(folder / "tokenizer.json"))
    for name, contents in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents), encoding="utf-8")
    return folder


def test_folder_gives_special_ids_from_all_its_files(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        tokenizer_config__json={"eos_token": {"content": "</s>"}, "bos_token": None},
        special_tokens_map__json={"bos_token": "<s>", "eos_token": "<pad>"},
        generation_config__json={"eos_token_id": [2, 1]},
        config__json={"eos_token_id": 7},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == (1, 2)


def test_eos_of_config_counts_where_generation_config_has_none(tmp_path: Path) -> None:
    write_folder(tmp_path, config__json={"text_config": {"eos_token_id": 7}, "eos_token_id": 9})
    assert Tokenizer.from_folder(tmp_path).eos_ids == (7,)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; copy"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match="only a SentencePiece tokenizer; make"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"cannot be read .*download it again"):
        Tokenizer.from_folder(tmp_path)


def test_broken_side_file_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, generation_config__json="{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


# --- chat templates ---------------------------------------------------------------------------------------------------

MESSAGES = [
    {"role": "user", "content": "<1> & 'é'"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go"},
]
TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m['role'] == 'tool' %}{% continue %}{% endif %}
    {%- if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m['role']) }}{% endif %}
    {% generation %}[{{ m['role'] }}] {{ m['content'] | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}[assistant]{% endif %}{{ mood | default('calm') }}"""


def template_folder(folder: Path, **files: Any) -> Path:
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files.setdefault("tokenizer_config__json", config)
    return write_folder(folder, **files)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<x>", "description": "é"}}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_renders_as_in_transformers(tmp_path: Path, tools: Any, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = template_folder(tmp_path, chat_template__jinja=TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"tools": tools, "mood": "bright"}
    got = Tokenizer.from_folder(folder).apply_chat_template(MESSAGES, add_generation_prompt=prompt, **options)
    assert got == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt, **options)
    assert got.startswith("<s>")


def test_template_sources_and_their_order(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = template_folder(tmp_path, tokenizer_config__json={"chat_template": named})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "with tools"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "file"


def test_missing_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    with pytest.raises(RequestError, match=r"no default chat template.*chat_template\.jinja") as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, "no role system"),
        ("{{ messages[0].content.nothing.at_all }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely|refuses"),
        ("{{ messages[0]['content'] + 1 }}", "refuses these messages"),
    ],
)
def test_what_a_template_refuses_is_a_request_error(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = Tokenizer.from_folder(template_folder(tmp_path, chat_template__jinja=template))
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])


def test_broken_template_is_refused_at_load(tmp_path: Path) -> None:
    folder = template_folder(tmp_path, chat_template__jinja="{% if %}")
    with pytest.raises(TokenizerError, match="chat template is broken"):
        Tokenizer.from_folder(folder)


def test_template_knows_the_date(tmp_path: Path) -> None:
    folder = template_folder(tmp_path, chat_template__jinja="{{ strftime_now('%Y') }}")
    assert int(Tokenizer.from_folder(folder).apply_chat_template([])) >= 2024


# --- differences ------------------------------------------------------------------------------------------------------


def renamed(core: tokenizers.Tokenizer, old: str, new: str) -> Tokenizer:
    state = json.loads(core.to_str())
    vocabulary = state["model"]["vocab"]
    state["model"]["vocab"] = {new if token == old else token: i for token, i in vocabulary.items()}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))


def test_difference() -> None:
    mine = TOKENIZERS["gemma"]
    assert mine.difference(TOKENIZERS["llama"]) is None  # same tokens, another decoder
    longer = core_of("gemma")
    longer.add_tokens([AddedToken("extra")])
    assert mine.difference(Tokenizer(longer)) is None
    assert Tokenizer(longer).difference(mine) is None
    other = renamed(core_of("gemma"), "é", "è")
    at = mine.token_id("é")
    assert mine.difference(other) == f"token {at} is 'é' in one and 'è' in the other"
    difference = mine.difference(TOKENIZERS["byte-level"])
    assert difference is not None
    assert difference.startswith("token 3 is '<0x00>' in one")
    assert "\n" not in difference
