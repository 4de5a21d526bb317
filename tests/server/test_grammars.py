"""Matchers over llguidance: what they allow, and what becomes of a format that takes too much work to follow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.server.clients import together
from tests.server.serving import Server
from verifypd.errors import RequestError
from verifypd.sampling.grammar import GrammarState
from verifypd.server.engine_process import grammar_compiler
from verifypd.server.grammar import GrammarCompiler, Matcher, check
from verifypd.server.messages import GrammarSpec
from verifypd.server.schema import FunctionDefinition, Tool
from verifypd.server.tools import ToolFormat
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

IDS = [5, 9, 200, 31, 7, 9, 200, 31]
HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolFormat("[TOOL_CALLS]", "", "arguments", many=True)
HEAVY = 'start: a{0,2000}\na: b{0,2000}\nb: "x" | "y"\n'  # as many ways to read x… as it is long, squared


@pytest.fixture(scope="module")
def compiler(folders: tuple[Path, Path], tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(str(folders[0]), tokenizer.vocab_size, tokenizer.eos_ids)


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(-(-matcher._vocab // 32), dtype=np.int32)
    matcher.fill(row)
    return set(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def heavy(compiler: GrammarCompiler, token: int) -> tuple[Matcher, int]:
    """A matcher just before it gives up, and how many tokens it has read."""
    matcher = compiler.start(GrammarSpec("lark", HEAVY), 1).result()[0]
    count = 0
    while allowed(matcher) and matcher.advance([token]):
        count += 1
        assert count < 200, "it never gave up"
    matcher.rollback(1)
    return matcher, count - 1


def test_a_text_that_is_whole_allows_its_end_only(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.start(GrammarSpec("regex", "x"), 1).result()[0]
    [x] = tokenizer.encode("x", add_special_tokens=False)
    assert matcher.advance([x]) == 1
    assert allowed(matcher) == set(tokenizer.eos_ids) and matcher.error is None


def test_a_tokenizer_that_llguidance_cannot_read_does_not_keep_the_server_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Odd"}}')
    engine = SimpleNamespace(sampling=SimpleNamespace(vocab=384), eos_ids=(2,))
    assert grammar_compiler(str(tmp_path), engine) is None and grammar_compiler(None, engine) is None
    assert "cannot be constrained" in caplog.text


def test_what_cannot_be_compiled_says_so(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.start(GrammarSpec("regex", "[0-9"), 1).result()
    assert caught.value.param == "response_format"


def test_a_matcher_that_gives_up_allows_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Least of all the end of the text, as if it were whole."""
    [x] = tokenizer.encode("x", add_special_tokens=False)
    matcher, count = heavy(compiler, x)
    assert count > 5 and x in allowed(matcher)
    for _ in range(2):
        allowed(matcher)
        matcher.advance([x])
    assert not allowed(matcher)
    assert matcher.error is not None and "items" in matcher.error and "<state>" not in matcher.error


def test_a_draft_that_is_taken_back_does_no_harm(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """It gave up on a draft only: what stands is followed as before."""
    [x] = tokenizer.encode("x", add_special_tokens=False)
    matcher, count = heavy(compiler, x)
    state = GrammarState(matcher, 0)
    state.taken = count
    rows = np.full((4, -(-tokenizer.vocab_size // 32)), -1, dtype=np.int32)
    state.fill([], [x, x, x], rows)
    assert rows[0].any() and not rows[3].any()
    again = np.full_like(rows, -1)
    state.fill([], [], again[:1])
    assert (again[0] == rows[0]).all()


WEATHER = {"type": "object", "properties": {"town": {"enum": ["Ulm", "Bonn"]}}, "required": ["town"]}
TOOLS = [
    Tool(type="function", function=FunctionDefinition(name="weather", parameters=WEATHER, strict=True)),
    Tool(type="function", function=FunctionDefinition(name="time", parameters=WEATHER)),
]
ULM = '{"name": "weather", "arguments": {"town": "Ulm"}}'


@pytest.mark.parametrize(
    ("form", "text", "fits", "ends"),
    [
        (HERMES, "just words { and [ signs", True, True),
        (HERMES, f"Well. <tool_call>\n{ULM}\n</tool_call>\n<tool_call>{ULM}</tool_call> So.", True, True),
        (HERMES, f"Well. <tool_call>{ULM}", True, False),
        (HERMES, 'Well. <tool_call>{"name": "weather", "arguments": {"town": "Rome', False, False),
        (HERMES, "Well. <tool_call>no", False, False),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"at": 7}}</tool_call>', True, True),
        (HERMES, '<tool_call>{"name": "other"', False, False),
        (MISTRAL, f"Well. [TOOL_CALLS][{ULM}, {ULM}]", True, True),
        (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Rome', False, False),
        (MISTRAL, "words", True, True),
    ],
)
def test_strict_functions_are_followed_wherever_they_are_called(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: ToolFormat, text: str, fits: bool, ends: bool
) -> None:
    """Words stay free, so do the arguments of functions that are not strict."""
    spec = form.strict_grammar(TOOLS)
    assert spec is not None
    check(spec)
    matcher = compiler.start(spec, 1).result()[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.advance(ids) == len(ids)) == fits
    assert not fits or bool(allowed(matcher) & set(tokenizer.eos_ids)) == ends


def test_calls_that_nothing_marks_cannot_be_strict() -> None:
    assert ToolFormat("", "", "arguments").strict_grammar(TOOLS) is None


def test_a_format_that_takes_too_much_work_fails_its_request_alone(server: Server) -> None:
    body = {"prompt": IDS, "max_tokens": 200, "response_format": {"type": "grammar", "grammar": HEAVY}}
    bias = {"logit_bias": {str(token): -100 for token in range(3)}}  # it may not end by itself
    broken, other = together(
        [
            lambda: server.post("/v1/completions", {**body, **bias}),
            lambda: server.complete(IDS, max_tokens=50, temperature=0, ignore_eos=True),
        ]
    )
    status, answer, _ = broken
    assert status == 400 and answer["error"]["code"] == "format_too_complex", answer
    assert answer["error"]["param"] == "response_format" and "items" in answer["error"]["message"]
    assert other["usage"]["completion_tokens"] == 50
