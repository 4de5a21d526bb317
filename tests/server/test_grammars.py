"""Matchers over llguidance: what they allow, and what becomes of a format that takes too much work to follow."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from tests.server.clients import together
from tests.server.neighbour import calmest
from tests.server.serving import Server
from verifypd.errors import RequestError
from verifypd.sampling.grammar import GrammarState
from verifypd.server import grammar as grammar_module
from verifypd.server.engine_process import grammar_compiler
from verifypd.server.formats import check
from verifypd.server.grammar import FormatLimits, GrammarCompiler, Host, HostedGrammar
from verifypd.server.grammar_host import Matcher, compile_format, load_tokenizer
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
def compiler(folders: tuple[Path, Path], tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(str(folders[0]), tokenizer.vocab_size, tokenizer.eos_ids)
    yield made
    made.close()


@pytest.fixture(scope="module")
def library(folders: tuple[Path, Path], tokenizer: Tokenizer) -> LLTokenizer:
    """The tokenizer as the processes of formats have it."""
    return load_tokenizer(str(folders[0]), tokenizer.vocab_size, tokenizer.eos_ids)


def matcher_of(library: LLTokenizer, spec: GrammarSpec) -> Matcher:
    return Matcher(compile_format(library, spec))


def tokens_of(mask: bytes) -> set[int]:
    return set(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist())


def allowed(matcher: Matcher) -> set[int]:
    return set().union(*(tokens_of(mask) for mask in matcher.masks([], [])))


def fitting(matcher: Matcher, ids: list[int]) -> int:
    """How many of these tokens fit, one after the other."""
    return next(
        (at for at, token in enumerate(ids) if token not in allowed(matcher) or not read(matcher, token)), len(ids)
    )


def read(matcher: Matcher, token: int) -> bool:
    list(matcher.masks([token], []))
    return matcher.error is None


def heavy(library: LLTokenizer, token: int) -> tuple[Matcher, int]:
    """A matcher just before it gives up, and how many tokens it has read."""
    matcher = matcher_of(library, GrammarSpec("lark", HEAVY))
    count = 0
    while len(list(matcher.masks([token] if count else [], [token]))) == 2:
        count += 1
        assert count < 200, "it never gave up"
    return matcher, count


def test_a_text_that_is_whole_allows_its_end_only(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(library, GrammarSpec("regex", "x"))
    [x] = tokenizer.encode("x", add_special_tokens=False)
    [mask] = matcher.masks([x], [])
    assert tokens_of(mask) == set(tokenizer.eos_ids) and matcher.error is None


def test_the_end_may_be_drafted_again_where_it_is_ignored(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    """With `ignore_eos` ends follow ends: a draft of them stands as they do without drafts."""
    matcher = matcher_of(library, GrammarSpec("regex", "x{1,2}"))
    [x], end = tokenizer.encode("x", add_special_tokens=False), tokenizer.eos_ids[0]
    ends = set(tokenizer.eos_ids)
    assert [tokens_of(mask) - {x} for mask in matcher.masks([], [x, x, end, end, x, end])] == [set(), *[ends] * 4]
    assert [tokens_of(mask) for mask in matcher.masks([x, end], [end, end])] == [ends] * 3
    assert [tokens_of(mask) for mask in matcher.masks([end, end], [])] == [ends] and matcher.error is None


def test_a_tokenizer_that_llguidance_cannot_read_does_not_keep_the_server_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Odd"}}')
    engine = SimpleNamespace(sampling=SimpleNamespace(vocab=384), eos_ids=(2,))
    assert grammar_compiler(str(tmp_path), engine) is None and grammar_compiler(None, engine) is None
    assert "cannot be constrained" in caplog.text


def test_what_cannot_be_compiled_says_so(compiler: GrammarCompiler) -> None:
    for _ in range(2):  # the second time it is known
        with pytest.raises(RequestError, match=r"the output format cannot be used: .*unclosed") as caught:
            compiler.start(GrammarSpec("regex", "[0-9"), 1).result()
        assert caught.value.param == "response_format"


def test_a_matcher_that_gives_up_allows_nothing(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    """Least of all the end of the text, as if it were whole."""
    [x] = tokenizer.encode("x", add_special_tokens=False)
    matcher, count = heavy(library, x)
    assert count > 5 and x in allowed(matcher)
    assert not list(matcher.masks([x], []))
    assert not list(matcher.masks([], []))
    assert matcher.error is not None and "items" in matcher.error and "<state>" not in matcher.error


def test_a_draft_that_is_taken_back_does_no_harm(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    """It gave up on a draft only: what stands is followed as before."""
    [x] = tokenizer.encode("x", add_special_tokens=False)
    matcher, _ = heavy(library, x)
    before = list(matcher.masks([], []))
    assert list(matcher.masks([], [x, x, x])) == before != []
    assert list(matcher.masks([], [])) == before


def test_a_draft_that_does_not_fit_ends_the_walk(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    [grammar] = compiler.start(GrammarSpec("regex", "aba[xy]"), 1).result()
    state = GrammarState(grammar, 5)
    rows = np.full((4, -(-tokenizer.vocab_size // 32)), -1, dtype=np.int32)
    state.ask([a], [b, c, a])
    state.fill(rows)
    assert state.position == 6 and state.error is None
    first, second, *after = (tokens_of(row.tobytes()) for row in rows)
    assert b in first and c not in first and a in second and c not in second and after == [set(), set()]
    state.ask([b], [])
    state.fill(rows[:1])
    assert tokens_of(rows[0].tobytes()) == second
    state.close()


@pytest.mark.parametrize(
    ("kind", "format_", "fits", "not_"),
    [
        ("regex", r"\d{2}", ["07"], ["٣", "7a"]),
        ("regex", r"[\d.]+/\w", ["1.2/a"], ["1/é", "٣"]),
        ("regex", r"\D\W\S", ["é, a"[:1] + ",a"], ["1,a"]),
        ("regex", r"a\sb", ["a b"], ["a\u00a0b"]),
        ("regex", r"\p{Nd}\\d", ["٣\\d"], ["٣1"]),
        ("json", '{"type": "string", "pattern": "^\\\\d\\\\w$"}', ['"1a"'], ['"٣', '"1é']),
    ],
)
def test_classes_of_characters_are_ascii(
    library: LLTokenizer, tokenizer: Tokenizer, kind: str, format_: str, fits: list[str], not_: list[str]
) -> None:
    """As in ECMA's regular expressions; whoever wants every digit writes \\p{Nd}."""
    for text, good in [(text, True) for text in fits] + [(text, False) for text in not_]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (fitting(matcher_of(library, GrammarSpec(kind, format_)), ids) == len(ids)) == good, text


# -- limits -----------------------------------------------------------------------------------------------------------

AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | ""\n'
HUGE = "((a{100}){80}){100}"  # 80 million ways to go on, found when the first token is read


def follow(grammar: HostedGrammar, tokens: list[int]) -> int:
    """Tokens it read before it was ended."""
    row = np.zeros((1, 12), dtype=np.int32)
    for count, token in enumerate(tokens):
        grammar.ask([token], [])
        grammar.fill(row)
        if grammar.error is not None:
            assert not row.any()
            return count
    return len(tokens)


def compiler_with(folders: tuple[Path, Path], tokenizer: Tokenizer, **limits: Any) -> GrammarCompiler:
    return GrammarCompiler(str(folders[0]), tokenizer.vocab_size, tokenizer.eos_ids, FormatLimits(**limits))


def test_masks_that_take_too_long_end_their_format_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    [a] = tokenizer.encode("a", add_special_tokens=False)

    def attempt() -> float:
        [bad, same] = compiler.start(GrammarSpec("lark", AMBIGUOUS), 2).result()
        [good] = compiler.start(GrammarSpec("regex", "a*"), 1).result()
        begun = time.monotonic()
        assert 20 < follow(bad, [a] * 400) < 400 and "more than this server allows" in (bad.error or "")
        seconds = time.monotonic() - begun
        assert follow(same, [a]) == 0 and follow(good, [a] * 50) == 50
        for grammar in (bad, same, good):
            grammar.close()
        return seconds

    assert calmest(attempt, float, 5.0) < 5.0, "400 tokens of it take 40 s"
    [again] = compiler.start(GrammarSpec("lark", AMBIGUOUS), 1).result()
    assert follow(again, [a] * 5) == 5, "the next one starts afresh"
    again.close()


def test_many_heavy_formats_in_one_step_are_ended_together(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Once the step is late they are, before they have spent all that each may."""
    [a] = tokenizer.encode("a", add_special_tokens=False)
    numbers = itertools.count()

    def attempt() -> float:
        specs = [GrammarSpec("lark", AMBIGUOUS + f'x{number}: "x"\n') for number in itertools.islice(numbers, 6)]
        heavy = [compiler.start(spec, 1).result()[0] for spec in specs]
        [light] = compiler.start(GrammarSpec("regex", "a*"), 1).result()
        rows = np.zeros((7, 12), dtype=np.int32)
        begun = time.monotonic()
        for grammar in [*heavy, light]:
            grammar.ask([a] * 300, [])
        for grammar, row in zip([*heavy, light], rows, strict=True):
            grammar.fill(row[None])
        seconds = time.monotonic() - begun
        assert all(grammar.error for grammar in heavy) and not rows[:6].any()
        assert any(grammar._host._account > 0 for grammar in heavy)
        assert light.error is None and rows[6].any()
        for grammar in [*heavy, light]:
            grammar.close()
        return seconds

    assert calmest(attempt, float, 5.0) < 10.0, "each takes 30 s alone"


@pytest.mark.parametrize(("limits", "reason"), [({"compile_seconds": 0.02}, "0.02 s"), ({"memory": 8 << 20}, "8 MB")])
def test_a_format_too_large_to_compile_leaves_nothing(
    folders: tuple[Path, Path], tokenizer: Tokenizer, limits: dict[str, Any], reason: str
) -> None:
    compiler = compiler_with(folders, tokenizer, **limits)
    with pytest.raises(RequestError, match=f"takes more than .*{reason}"):
        compiler.start(GrammarSpec("regex", HUGE), 1).result()
    assert not compiler.processes
    [small] = compiler.start(GrammarSpec("regex", "[a-z]+"), 1).result()
    small.close()
    compiler.close()


def test_formats_nobody_uses_are_kept_by_size(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    compiler = compiler_with(folders, tokenizer, cached=8 << 20)
    first = compiler.start(GrammarSpec("regex", "[a-z]+"), 1).result()[0]
    process = compiler.processes
    for number in range(15):
        compiler.start(GrammarSpec("regex", f"[a-z]{{{number}}}x"), 1).result()[0].close()
    assert process[0] in compiler.processes, "it is in use"
    kept = compiler.processes
    assert 2 < len(kept) <= 9
    compiler.start(GrammarSpec("regex", "[a-z]{14}x"), 1).result()[0].close()
    assert set(compiler.processes) == set(kept), "the last one was still there"
    first.close()
    compiler.close()


def test_a_nursery_that_dies_is_replaced(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    compiler = compiler_with(folders, tokenizer)
    [a] = tokenizer.encode("a", add_special_tokens=False)
    [before] = compiler.start(GrammarSpec("regex", "a*"), 1).result()
    compiler._nursery._process.kill()
    compiler._nursery._process.wait()
    assert follow(before, [a] * 3) == 0, "its children die with it"
    before.close()
    [after] = compiler.start(GrammarSpec("regex", "a*"), 1).result()
    assert follow(after, [a] * 3) == 3
    after.close()
    compiler.close()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def children(process: int) -> set[int]:
    """Of a process, those that have ended left out."""
    found = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return {child for child in found if state(child) not in "ZX"}


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_cannot_be_started_is_no_fault_of_the_format(
    folders: tuple[Path, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests share the format: neither is told that it is too large, and the next one is served."""
    compiler, spec, births = compiler_with(folders, tokenizer), GrammarSpec("regex", "a*"), []
    real = compiler.bear

    def bear() -> Any:
        host = compiler._hosts[spec]
        births.append(host)
        if len(births) == 1:
            until(lambda: host.users == 2)
            raise OSError("no process")
        until(lambda: not host.alive)
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "bear", bear)
        both = [compiler.start(spec, 1) for _ in range(2)]
        assert [type(each.exception(20)) for each in both] == [OSError, OSError]
    assert not children(compiler._nursery._process.pid)
    [grammar] = compiler.start(spec, 1).result(20)
    grammar.close()
    compiler.close()


def test_only_what_was_measured_is_remembered(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    """A process that ends without a word may have been killed by anybody."""
    compiler, spec = compiler_with(folders, tokenizer), GrammarSpec("regex", "a*b")
    nursery, line, child = compiler.bear()

    def bear() -> Any:
        os.kill(child, signal.SIGKILL)
        return nursery, line, child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "bear", bear)
        with pytest.raises(RequestError, match="takes more than"):
            compiler.start(spec, 1).result(20)
    [grammar] = compiler.start(spec, 1).result(20)
    grammar.close()
    compiler.close()


def test_a_reason_is_heard_though_its_process_is_buried(compiler: GrammarCompiler) -> None:
    host = Host(GrammarSpec("regex", "[0-9"), compiler.limits, compiler._step)
    host._nursery, host._line, host.pid = compiler.bear()
    host._send(host.spec)

    def buried() -> bool:
        nursery, _, other = compiler.bear()  # which buries the dead first
        nursery.kill(other)
        return not Path(f"/proc/{host.pid}").exists()

    until(buried)
    answer = host._answer(1)
    assert answer is not None and b"unclosed" in answer


def test_a_nursery_that_is_silent_is_replaced(
    folders: tuple[Path, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "BIRTH", 0.2)
    compiler = compiler_with(folders, tokenizer)
    silent = compiler._nursery._process
    os.kill(silent.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match="timed out"):
        compiler.start(GrammarSpec("regex", "a*"), 1).result(10)
    assert silent.poll() is not None
    monkeypatch.setattr(grammar_module, "BIRTH", 10)
    [grammar] = compiler.start(GrammarSpec("regex", "a*"), 1).result(20)
    grammar.close()
    compiler.close()


def test_orders_to_a_silent_nursery_wait_for_nothing(folders: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    compiler = compiler_with(folders, tokenizer)
    nursery = compiler._nursery
    os.kill(nursery._process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    while nursery.alive:
        nursery.kill(1)
        assert time.monotonic() < begun + 5, "no more orders fit, and it is still there"
    compiler.close()


def test_a_tokenizer_that_is_never_read_is_not_waited_for(
    folders: tuple[Path, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "LOADING", 0.01)
    before = children(os.getpid())
    with pytest.raises(OSError, match="timed out"):
        compiler_with(folders, tokenizer)
    assert children(os.getpid()) <= before


# -- tools ------------------------------------------------------------------------------------------------------------

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
    library: LLTokenizer, tokenizer: Tokenizer, form: ToolFormat, text: str, fits: bool, ends: bool
) -> None:
    """Words stay free, so do the arguments of functions that are not strict."""
    spec = form.strict_grammar(TOOLS)
    assert spec is not None
    check(spec)
    matcher = matcher_of(library, spec)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (fitting(matcher, ids) == len(ids)) == fits
    assert not fits or bool(allowed(matcher) & set(tokenizer.eos_ids)) == ends


NODE = {
    "$defs": {"Colour": {"enum": ["red", "blue"]}},
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/Colour"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["colour", "next"],
    "additionalProperties": False,
}
PAIR = '{"colour": "red", "next": {"colour": "blue", "next": null}}'


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"$schema": "http://json-schema.org/draft-04/schema#"},
        {"$id": "urn:mine"},
        {"$id": None},
        {"$id": "#foo"},
        {"$id": "http://[::1"},
    ],
)
@pytest.mark.parametrize("name", ["", "node"])
@pytest.mark.parametrize("form", [HERMES, MISTRAL, ToolFormat("", "", "parameters")])
def test_references_in_parameters_mean_the_parameters(
    library: LLTokenizer, tokenizer: Tokenizer, form: ToolFormat, name: str, draft: dict[str, str]
) -> None:
    """Not the schema of the call around them."""
    node = FunctionDefinition(name="node", parameters={**NODE, **draft}, strict=True)
    tools = [*TOOLS, Tool(type="function", function=node)]
    specs = [form.grammar(tools, name), *filter(None, [form.strict_grammar(tools)])]
    for arguments, fits in (
        (PAIR, True),
        (PAIR.replace("blue", "pink"), False),
        ('{"colour": "red", "next": {"name', False),
    ):
        call = f'{{"name": "node", "{form.arguments}": {arguments}}}'
        ids = tokenizer.encode(form.begin + (f"[{call}]" if form.many else call) + form.end, add_special_tokens=False)
        for spec in specs:
            assert (fitting(matcher_of(library, spec), ids) == len(ids)) == fits, (spec, arguments)


@pytest.mark.parametrize("form", [HERMES, MISTRAL, ToolFormat("", "", "parameters")])
def test_a_function_without_parameters_takes_none(library: LLTokenizer, tokenizer: Tokenizer, form: ToolFormat) -> None:
    tools = [Tool(type="function", function=FunctionDefinition(name="now"))]
    for arguments, fits in (("{}", True), ('{"zone": 1}', False)):
        call = f'{{"name": "now", "{form.arguments}": {arguments}}}'
        ids = tokenizer.encode(form.begin + (f"[{call}]" if form.many else call) + form.end, add_special_tokens=False)
        assert (fitting(matcher_of(library, form.grammar(tools, "now")), ids) == len(ids)) == fits, arguments


INNER = {"$id": "colour.json", "enum": ["red"]}
COLOUR = {"type": "object", "required": ["colour"], "additionalProperties": False}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"Colour": INNER}, "properties": {"colour": {"$ref": "#/$defs/Colour"}}},
        {"$defs": {"Colour": INNER}, "properties": {"colour": {"$ref": "colour.json"}}},
        {
            "$id": "https://example.com/mine.json",
            "$defs": {"Colour": INNER},
            "properties": {"colour": {"$ref": "https://example.com/mine.json#/$defs/Colour"}},
        },
    ],
    ids=["inner", "by name", "absolute"],
)
def test_names_within_parameters_are_found(
    library: LLTokenizer, tokenizer: Tokenizer, parameters: dict[str, Any]
) -> None:
    tool = Tool(type="function", function=FunctionDefinition(name="node", parameters={**COLOUR, **parameters}))
    for colour, fits in (("red", True), ("pink", False)):
        text = f'<tool_call>{{"name": "node", "arguments": {{"colour": "{colour}"}}}}</tool_call>'
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (fitting(matcher_of(library, HERMES.grammar([tool], "node")), ids) == len(ids)) == fits


def test_two_functions_of_one_name_of_schema_keep_their_own(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    tools = [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=colour,
                parameters={
                    **COLOUR,
                    "$id": "https://example.com/mine.json",
                    "$defs": {"C": {"enum": [colour]}},
                    "properties": {"colour": {"$ref": "#/$defs/C"}},
                },
            ),
        )
        for colour in ("red", "blue")
    ]
    for name, colour in (("red", "red"), ("blue", "blue"), ("blue", "red")):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{"colour": "{colour}"}}}}</tool_call>'
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (fitting(matcher_of(library, HERMES.grammar(tools, "")), ids) == len(ids)) == (name == colour)


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
    assert answer["error"]["param"] == "response_format" and "server allows" in answer["error"]["message"]
    assert other["usage"]["completion_tokens"] == 50
