"""Text of tokens as they arrive: the same whole, one by one or in any pieces, with and without stop strings."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from verifypd.engine.output import TextOutput
from verifypd.request import Request, SamplingParams, State
from verifypd.tokenizer import Tokenizer

TEXT = "Größe: 12 €, ein Häuschen — and then some more of the same, 日本"


@pytest.mark.parametrize("params", [{}, {"stop": ["never"]}, {"stop": ["some"]}])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_text_in_pieces(pair: tuple[Path, Path], params: dict[str, Any], size: int) -> None:
    tokenizer = Tokenizer.from_folder(pair[0])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    request = Request("r", [5, 6], SamplingParams(max_tokens=500, **params), seed=0, max_length=500)
    output, stopped, shown = TextOutput(request, tokenizer), False, ""
    for at in range(0, len(ids), size):
        request.tokens.extend(ids[at : at + size])
        stopped = stopped or output.update()
        assert output.visible().startswith(shown), "what was shown is never taken back"
        shown = output.visible()
    request.state, request.finish_reason = State.FINISHED, "length"
    if not stopped:
        output.update()
    expected = tokenizer.decode([5, 6, *ids])[len(tokenizer.decode([5, 6])) :]
    if params.get("stop") == ["some"]:
        assert stopped and output.text == expected[: expected.index("some")]
    else:
        assert not stopped and output.text == expected


def test_nothing_is_text_behind_a_stop_string(pair: tuple[Path, Path]) -> None:
    """Not even the beginning of a character that came with it, whoever looks again."""
    tokenizer = Tokenizer.from_folder(pair[0])
    ids = tokenizer.encode("Tü", add_special_tokens=False)
    begun = tokenizer.encode("日", add_special_tokens=False)[0]
    params = SamplingParams(max_tokens=9, stop=["ü\ufffd"], include_stop_str_in_output=True)
    request = Request("r", [5, 6], params, seed=0, max_length=500)
    request.tokens.extend([*ids, begun, begun])
    output = TextOutput(request, tokenizer)
    assert output.update() and output.text == "Tü\ufffd"
    request.state, request.finish_reason = State.FINISHED, "stop"
    assert not output.update() and output.text == "Tü\ufffd"


@pytest.mark.parametrize("stops", [["aab"], ["b", "abaab"], ["aaaa", "ba"], ["c" * 1000, "ab" * 200]])
def test_what_may_become_a_stop_string_is_held_back(stops: list[str]) -> None:
    """As much as the longest beginning of any of them that the text ends with."""
    request = Request("r", [5, 6], SamplingParams(max_tokens=500, stop=stops), seed=0, max_length=500)
    output = TextOutput(request, None)
    for letters in itertools.product("ab", repeat=6):
        output.text = "".join(letters)
        begun = [size for stop in stops for size in range(1, len(stop)) if output.text.endswith(stop[:size])]
        assert output.visible() == output.text[: len(output.text) - max(begun, default=0)]


class Counted(str):
    """A text that counts how often it is looked at."""

    looks = 0

    def find(self, *args: Any) -> int:
        Counted.looks += 1
        return super().find(*args)

    def endswith(self, *args: Any) -> bool:
        Counted.looks += 1
        return super().endswith(*args)


def test_a_long_stop_string_costs_no_more_than_the_text_has_beginnings_of_it() -> None:
    request = Request("r", [5, 6], SamplingParams(stop="x" + "y" * 1023), seed=0, max_length=500)
    output = TextOutput(request, None)
    output.text = Counted("a short text, with an x in it")
    assert output.visible() == output.text
    assert 0 < Counted.looks < 10
