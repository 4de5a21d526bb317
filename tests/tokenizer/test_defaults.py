"""Sampling that a model's folder asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verifypd.errors import TokenizerError
from verifypd.tokenizer.defaults import sampling_defaults


def folder_with(folder: Path, contents: Any) -> Path:
    text = contents if isinstance(contents, str) else json.dumps(contents)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_what_the_file_says_of_sampling(tmp_path: Path) -> None:
    file = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2, "min_p": None}
    found = sampling_defaults(folder_with(tmp_path, {**file, "do_sample": True, "max_new_tokens": 5}))
    assert found == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def test_a_whole_number_may_be_written_as_a_float(tmp_path: Path) -> None:
    found = sampling_defaults(folder_with(tmp_path, {"top_k": 20.0}))
    assert found == {"top_k": 20} and isinstance(found["top_k"], int)


def test_what_says_nothing_asks_for_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(None) == sampling_defaults(tmp_path) == {}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}  # transformers' own defaults
    assert sampling_defaults(folder_with(tmp_path, neutral)) == {}


@pytest.mark.parametrize(
    "contents", ["{", "[1]", {"top_p": 0.0}, {"temperature": "warm"}, {"top_k": [1]}, {"top_k": 2.5}, "[" * 100_000]
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(tmp_path: Path, contents: Any) -> None:
    with pytest.raises(TokenizerError, match=r"generation_config\.json.*--generation-config none"):
        sampling_defaults(folder_with(tmp_path, contents))
