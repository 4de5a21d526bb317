"""Formats that take too much, on the real server: they are refused or ended, others are served as before.

A short form runs with the other tests; `make soak` runs the long one and writes its figures.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.models.checkpoints import tiny
from tests.server.clients import together
from tests.server.neighbour import calmest
from tests.server.results import keep
from tests.server.serving import Server, events

pytestmark = pytest.mark.xdist_group("server")

IDS = [5, 9, 200, 31, 7, 9, 200, 31]
GAP = 1.5  # s a neighbour may wait, on a machine that runs other tests too
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | ""\n'
ENDLESS = {"logit_bias": {str(token): -100 for token in range(3)}}  # it may not end by itself


def huge(number: int) -> str:
    """Each another pattern with millions of states."""
    return f"((a{{100}}){{80}}){{{100 + number}}}"


@dataclass
class Neighbour:
    """A client that streams without a break, and how long it waited for each event."""

    gaps: list[float] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return max(self.gaps)


@contextmanager
def neighbour(server: Server, length: int = 300) -> Iterator[Neighbour]:
    """One request after the other, each from sending to its last event."""
    seen, stop = Neighbour(), threading.Event()
    body = {"prompt": IDS, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}

    def run() -> None:
        while not stop.is_set():
            line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            last = time.monotonic()
            line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = line.getresponse()
            assert answer.status == 200
            while answer.readline():
                seen.gaps.append(time.monotonic() - last)
                last = time.monotonic()
            line.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not seen.gaps:
            time.sleep(0.01)
        yield seen
    finally:
        stop.set()
        thread.join()


def memory(server: Server) -> float:
    """MiB that belong to the server's processes alone."""
    supervisor = psutil.Process(server.process.pid)
    infos = []
    for process in [supervisor, *supervisor.children(recursive=True)]:
        try:
            infos.append(process.memory_info())
        except psutil.NoSuchProcess:
            continue
    return float(sum(info.rss - info.shared for info in infos)) / 2**20


def settled(server: Server, most: float, seconds: float = 10.0) -> float:
    """Memory, once it is below `most`: a process that was killed takes a moment to go."""
    until = time.monotonic() + seconds
    while (now := memory(server)) > most and time.monotonic() < until:
        time.sleep(0.1)
    return now


def refused(server: Server, numbers: Iterable[int]) -> list[tuple[int, Any, Any]]:
    """The answers to patterns of these numbers, all asked at once."""
    bodies = [{"prompt": IDS, "response_format": {"type": "regex", "pattern": huge(each)}} for each in numbers]
    return together([partial(server.post, "/v1/completions", body, 300.0) for body in bodies])


def ambiguous(server: Server, length: int, **fields: Any) -> tuple[int, Any, Any]:
    form = {"type": "grammar", "grammar": AMBIGUOUS}
    body = {"prompt": IDS, "max_tokens": length, "response_format": form, **ENDLESS, **fields}
    return server.post("/v1/completions", body, 300.0)


@pytest.mark.slow
def test_regexes_that_are_refused_cost_nobody_else(server: Server) -> None:
    server.complete(IDS, max_tokens=4, response_format={"type": "regex", "pattern": "[a-z]+"})
    before, new = memory(server), count()

    def attempt() -> float:
        with neighbour(server) as other:
            for status, answer, _ in refused(server, islice(new, 8)):
                assert status == 400 and answer["error"]["param"] == "response_format", answer
                assert "the output format cannot be used" in answer["error"]["message"]
        return other.worst

    assert calmest(attempt, float, GAP) < GAP
    assert settled(server, before + 80) - before < 80, "one of them takes 170 MiB"

    def known() -> float:
        begun = time.monotonic()
        assert refused(server, range(8))[0][0] == 400
        return time.monotonic() - begun

    assert calmest(known, float, 2.0) < 2.0, "what is refused is known"


def test_an_ambiguous_grammar_is_ended_and_slows_nobody(server: Server) -> None:
    def attempt() -> tuple[float, float]:
        with neighbour(server) as other:
            begun = time.monotonic()
            status, answer, _ = ambiguous(server, 380)
            seconds = time.monotonic() - begun
        assert status == 400 and answer["error"]["code"] == "format_too_complex", answer
        assert "server allows" in answer["error"]["message"]
        return other.worst, seconds

    waited, took = calmest(attempt, lambda seen: max(seen[0] / GAP, seen[1] / 20), 1.0)
    assert waited < GAP
    assert took < 20, "to follow it to its end takes minutes"


def test_a_stream_whose_format_is_too_complex_says_why_it_ends(server: Server) -> None:
    status, text, _ = ambiguous(server, 380, stream=True)
    *parts, error = events(text)
    assert status == 200 and error["error"]["code"] == "format_too_complex"
    assert parts[-1]["choices"][0]["finish_reason"] == "error"
    said = "".join(choice["text"] for part in parts for choice in part["choices"])
    assert len(said) > 20 and set(said) == {"a"}


@pytest.mark.soak
def test_formats_that_take_too_much_for_a_while(tmp_path: Path) -> None:
    """48 patterns at once, twice, then eight ambiguous grammars of 1,500 tokens at once."""
    folder = tiny("llama", tmp_path / "model", max_position_embeddings=4096)
    flags: dict[str, Any] = {"max-model-len": 2000, "kv-memory": "256MB", "batch-size": 16}
    figures: dict[str, Any] = {}
    with Server(folder, "ngram", tmp_path / "soak.log", **flags) as server:
        with neighbour(server) as other:
            time.sleep(5)
        figures["gap_s_alone"] = round(other.worst, 3)
        before = memory(server)
        with neighbour(server) as other:
            begun = time.monotonic()
            answers = [*refused(server, range(48)), *refused(server, range(48))]
            figures["refused_patterns_s"] = round(time.monotonic() - begun, 1)
        assert {answer[0] for answer in answers} == {400}
        figures["gap_s_refused_patterns"] = round(other.worst, 3)
        figures["memory_mib"] = {"before": round(before), "after_refused_patterns": round(settled(server, before))}
        with neighbour(server) as other:
            begun = time.monotonic()
            ended = together([partial(ambiguous, server, 1500, seed=seed) for seed in range(8)])
            figures["ambiguous_grammars_s"] = round(time.monotonic() - begun, 1)
        assert {answer["error"]["code"] for _, answer, _ in ended} == {"format_too_complex"}
        figures["gap_s_ambiguous_grammars"] = round(other.worst, 3)
        figures["memory_mib"]["after_ambiguous_grammars"] = round(settled(server, before))
        assert server.idle()["verifypd:engine_restarts_total"] == 0
    keep("server-soak-grammars", ", drafts by n-grams", figures)
    assert max(value for name, value in figures.items() if name.startswith("gap_s")) < GAP, figures
    assert figures["memory_mib"]["after_ambiguous_grammars"] - before < 200, figures
