"""Workloads: the same seed gives the same requests at the same times, files are read and written, bad ones refused."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench.arrivals import Process, make
from verifypd.bench.sources import OWN_CONVERSATIONS, conversations, source
from verifypd.bench.workload import Arrival, Workload, mixed, read
from verifypd.errors import ConfigError

SOURCES = ("prompts", "sharegpt", "fixed:40x8", "chat", "mixed", "repetition")
PROCESSES = (Process(clients=4), Process(rate=5.0), Process(rate=5.0, cv=2.5), Process())


def turn(who: Any, text: Any) -> dict[str, Any]:
    return {"from": who, "value": text}


GOOD = {
    "id": "a",
    "conversations": [turn("human", "Hi"), turn("gpt", "Hello!"), turn("human", "Why?"), turn("gpt", "x" * 400)],
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_a_seed_is_a_workload(name: str, process: Process, tmp_path: Path) -> None:
    made = make(source(name), process, 7, count=30)
    assert made == make(source(name), process, 7, count=30)
    assert made != make(source(name), process, 8, count=30)
    assert len(made.arrivals) == 30 and made.clients == process.clients
    made.write(tmp_path / "workload.json")
    assert read(tmp_path / "workload.json") == made
    assert read(tmp_path / "workload.json").digest == made.digest


def test_mixed_traffic_is_that_of_the_files() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "workloads"
    assert mixed(16, 20, 0).arrivals == read(folder / "mixed-16.json").arrivals
    assert mixed(8, 60, 2).arrivals == read(folder / "long-8-seed2.json").arrivals


def test_prompts_do_not_depend_on_the_rate() -> None:
    slow, fast = (make(source("sharegpt"), Process(rate=rate), 1, count=20).arrivals for rate in (1.0, 9.0))
    assert [a.messages for a in slow] == [a.messages for a in fast]
    assert [a.at for a in slow] != [a.at for a in fast]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_spread_asked_for(cv: float) -> None:
    times = Process(rate=4.0, cv=cv).times(random.Random(3), 40_000, None)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.04)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.05)


def test_an_open_loop_ends_with_its_duration() -> None:
    made = make(source("fixed:8x8"), Process(rate=20.0), 0, count=None, seconds=5.0)
    assert 60 < len(made.arrivals) < 140 and max(a.at for a in made.arrivals) <= 5.0
    with pytest.raises(ConfigError, match="no request arrives"):
        make(source("fixed:8x8"), Process(rate=0.01), 0, count=None, seconds=0.01)


def test_every_answered_turn_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text(
        json.dumps([GOOD, {"conversations": [turn("user", "Q"), turn("chatgpt", "A"), turn("human", "?")]}])
    )
    made = conversations(path)
    assert made.about == {"records": 2, "requests": 3, "skipped": {}}
    drawn = made.draw(random.Random(0), 3)
    texts = {tuple((m["role"], m["content"]) for m in a.messages or ()): a.output_tokens for a in drawn}
    assert texts == {
        (("user", "Hi"),): 4,
        (("user", "Hi"), ("assistant", "Hello!"), ("user", "Why?")): 100,
        (("user", "Q"),): 4,
    }


BROKEN = {
    "no conversations": [{}, {"id": "x"}, {"conversations": {}}, "text", None, 3, []],
    "a turn without from and value": [
        {"conversations": [{"from": "human"}, turn("gpt", "b")]},
        {"conversations": [turn("human", "a"), turn("gpt", None)]},
        {"conversations": [turn(1, "a"), turn("gpt", "b")]},
        {"conversations": ["a", "b"]},
    ],
    "an empty turn": [{"conversations": [turn("human", " \n"), turn("gpt", "b")]}],
    "the first turn is not a human's": [
        {"conversations": [turn("gpt", "b"), turn("human", "a")]},
        {"conversations": [turn("system", "s"), turn("human", "a"), turn("gpt", "b")]},
    ],
    "roles out of order": [
        {"conversations": [turn("human", "a"), turn("human", "b"), turn("gpt", "c")]},
        {"conversations": [turn("human", "a"), turn("bing", "b")]},
    ],
    "no answer": [{"conversations": [turn("human", "a")]}, {"conversations": []}],
}


def test_broken_records_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([*itertools.chain.from_iterable(BROKEN.values()), GOOD]))
    made = conversations(path)
    assert made.about["requests"] == 2
    assert made.about["skipped"] == {reason: len(records) for reason, records in BROKEN.items()}


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', "not json", '[{"conversations": []}]'])
def test_a_file_without_a_conversation_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "shared.json").write_text(content)
    with pytest.raises(ConfigError, match=r"shared\.json"):
        source(f"sharegpt:{tmp_path / 'shared.json'}")


def test_own_conversations_are_whole() -> None:
    about = conversations(OWN_CONVERSATIONS).about
    assert about["records"] == 12 and about["skipped"] == {} and about["requests"] >= 20


def test_prompt_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 5}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    one, two = sorted(source(f"prompts:{path}").draw(random.Random(0), 2), key=lambda a: a.prompt is None)
    assert (one.prompt, one.output_tokens) == ("a", 5)
    assert two.messages == ({"role": "user", "content": "b"},)
    assert source(f"prompts:{path}").limited(9).draw(random.Random(0), 4)[3].output_tokens == 9
    for bad in ("{}", '{"prompt": 3}', "text", '{"messages": []}', '{"messages": [1]}', '["a"]'):
        path.write_text(f'{{"prompt": "a"}}\n{bad}\n')
        with pytest.raises(ConfigError, match=r"lines\.jsonl:2"):
            source(f"prompts:{path}")


@pytest.mark.parametrize("name", ["", "nothing", "fixed:8", "fixed:0x4", "fixed:axb", "sharegpt:no-such-file.json"])
def test_unknown_sources_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        source(name)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"requests": []}',
        '{"requests": [{"at": 0, "output_tokens": 4}]}',
        '{"requests": [{"at": -1, "prompt": "a", "output_tokens": 4}]}',
        '{"requests": [{"at": 0, "prompt": "a", "output_tokens": 0}]}',
        '{"clients": 0, "requests": [{"at": 0, "prompt": "a", "output_tokens": 4}]}',
        '{"clients": 1.5, "requests": [{"at": 0, "prompt": "a", "output_tokens": 4}]}',
        '{"name": 5, "requests": [{"at": 0, "prompt": "a", "output_tokens": 4}]}',
        '{"rate": "x", "requests": [{"at": 0, "prompt": "a", "output_tokens": 4}]}',
        '{"requests": [{"at": NaN, "prompt": "a", "output_tokens": 4}]}',
        '{"requests": [{"at": 0, "prompt": 5, "output_tokens": 4}]}',
        '{"requests": [{"at": 0, "prompt_tokens": 5.5, "output_tokens": 4}]}',
        '{"requests": [{"at": 0, "prompt": "a", "output_tokens": true}]}',
    ],
)
def test_bad_workload_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "w.json").write_text(content)
    with pytest.raises(ConfigError, match="is no workload"):
        read(tmp_path / "w.json")


def test_a_mark_changes_prompts_and_nothing_else() -> None:
    messages = ({"role": "user", "content": "Hi"},)
    one = Workload(
        "w", 0.0, (Arrival(0.5, 0, 3, prompt="Hi"), Arrival(1.0, 0, 3, messages=messages), Arrival(2.0, 9, 3))
    )
    two = one.marked("x1")
    assert two.seed != one.seed and two.marked("x1").seed != two.seed
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in two.arrivals] == [(0.5, 0, 3), (1.0, 0, 3), (2.0, 9, 3)]
    assert two.arrivals[0].prompt == "[x1] Hi" and two.arrivals[1].messages == ({"role": "user", "content": "[x1] Hi"},)
    assert one.as_text().arrivals[1].prompt == "User: Hi\n\nAssistant:"
