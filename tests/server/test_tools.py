"""Tool calls in text: found wherever the text is cut, left alone where they are none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from verifypd.server.tools import FoundCall, Piece, ToolFormat, ToolStream, calls_of, words_of

HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolFormat("[TOOL_CALLS]", "", "arguments", many=True)
BARE = ToolFormat("", "", "parameters")
CALL = FoundCall("f", '{"a": 1}')
HERMES_CALL = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'


def run(form: ToolFormat, pieces: Sequence[str], one: bool = False) -> tuple[str, list[FoundCall]]:
    made = said(form, pieces, one)
    return words_of(made), calls_of(made)


def said(form: ToolFormat, pieces: Sequence[str], one: bool = False) -> list[Piece]:
    stream, made = ToolStream(form, ["f", "g"], one), []
    for place, piece in enumerate(pieces):
        made += stream.push(piece, last=place == len(pieces) - 1)
    return made


CASES = [
    (HERMES, 'Well. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Well. ", [CALL]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n' * 2, "", [CALL, CALL]),
    (
        HERMES,
        'A <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n' * 2 + "\n ",
        "A \nA ",
        [CALL, CALL],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n \nSo.\n', "\n \nSo.\n", [CALL]),
    (HERMES, "a <tool and <tool_cal", "a <tool and <tool_cal", []),
    (HERMES, "<tool_call>no json</tool_call> x", "<tool_call>no json</tool_call> x", []),
    (
        HERMES,
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [CALL]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [CALL]),
    (BARE, '{"name": "f", "parameters": {"a": 1}}', "", [CALL]),
    (BARE, '{"name": 7}', '{"name": 7}', []),
    (BARE, '{"name": "f"}', '{"name": "f"}', []),  # any JSON with a name
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [FoundCall("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [FoundCall("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [CALL]),
    (HERMES, HERMES_CALL.format('" "'), "", [FoundCall("f", "{}")]),
    (HERMES, HERMES_CALL.format('{"a": 1e999}'), "", [FoundCall("f", '{"a": 1.7976931348623157e+308}')]),
    *((HERMES, text, text, []) for text in map(HERMES_CALL.format, ("[1]", "1", '"a"', '{"a": NaN}'))),
    (BARE, "plain words", "plain words", []),
]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        (HERMES, 'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2 + " and", "Well. "),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', ""),
        (BARE, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', ""),
    ],
)
def test_one_call_where_no_more_are_wanted(form, text, words, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert run(form, pieces, one=True) == (words, [CALL])


@pytest.mark.parametrize(("form", "text", "words", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(form, text, words, calls, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert run(form, pieces) == (words, calls)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_words_and_calls_keep_their_order_and_places(size):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = f"Well {call} so {call}\n{call}\nyes "
    made = said(HERMES, [text[at : at + size] for at in range(0, len(text), size)])
    order: list[str | FoundCall] = []
    for piece in made:
        if isinstance(piece.said, str) and order and isinstance(order[-1], str):
            order[-1] += piece.said
        else:
            order.append(piece.said)
    assert order == ["Well ", CALL, " so ", CALL, CALL, "\nyes "]
    ends = [piece.end for piece in made if isinstance(piece.said, FoundCall)]
    assert ends == [at + len(call) for at in range(len(text)) if text.startswith(call, at)]
    assert made[-1].end == len(text)
