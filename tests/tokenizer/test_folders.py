"""What a model's folder says of its tokenizer: special tokens, chat templates, differences from another's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from tests.tokenizer.kinds import TOKENIZERS, core_of
from verifypd.errors import RequestError, TokenizerError
from verifypd.tokenizer import Tokenizer


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
