"""Prompts from files and those that come with the package: what is read, what is refused, and which sets overlap."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from verifypd.distil.prompts import Prompt, evaluation_prompts, plain, read_prompts, training_prompts
from verifypd.errors import ConfigError

UNSEEN = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts" / "unseen.jsonl"


def test_the_built_in_sets_are_disjoint() -> None:
    evaluation, training = evaluation_prompts(), training_prompts()
    assert len(evaluation) >= 200 and len(training) > 3500
    assert not {plain(p.text) for p in evaluation} & {plain(p.text) for p in training}
    assert {p.kind for p in evaluation} == {"chat", "question", "code", "story"}


def test_the_unseen_set_is_of_kinds_no_draft_was_trained_on() -> None:
    """By name and by words: no prompt opens as a given one does, and none shares a phrase with one."""

    def words(prompt: Prompt) -> list[str]:
        return plain(prompt.text).split()

    def phrases(prompts: list[Prompt], length: int = 6) -> set[tuple[str, ...]]:
        cut = ((words(prompt), i) for prompt in prompts for i in range(len(words(prompt)) - length + 1))
        return {tuple(text[i : i + length]) for text, i in cut}

    unseen, training = read_prompts(UNSEEN), training_prompts()
    assert min(Counter(p.kind for p in unseen).values()) == 8 and len(unseen) == len({plain(p.text) for p in unseen})
    assert len({p.kind for p in unseen}) == 8 and not {p.kind for p in unseen} & {p.kind for p in training}
    assert not {tuple(words(p)[:3]) for p in unseen} & {tuple(words(p)[:3]) for p in training}
    assert not phrases(unseen) & phrases([*training, *evaluation_prompts()])


def test_a_prompt_file_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"words": "x"}\n')
    with pytest.raises(ConfigError, match=r"line 1"):
        read_prompts(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")


@pytest.mark.parametrize(
    "line", ['{"text": 5}', '{"text": " "}', '{"text": "x", "kind": 3}', '{"text": "x", "kind": null}']
)
def test_a_line_of_another_form_is_refused_before_it_costs_a_run(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('\n{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"line 4: give one JSON object a line"):
        read_prompts(tmp_path / "bad.jsonl")


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """Not at the separators of Unicode, which JSON may hold; and a mark before the first line is none of its text."""
    (tmp_path / "good.jsonl").write_bytes('\ufeff{"text": "a\u2028b\x85c"}\r\nd\u2028e\r\n'.encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "good.jsonl")] == ["a\u2028b\x85c", "d\u2028e"]
