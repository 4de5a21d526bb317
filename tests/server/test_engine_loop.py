"""The engine's loop by itself, with an engine that answers at once: grammars beside it, deadlines, its pulse."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from tests.models.checkpoints import VOCAB
from verifypd.config import EngineConfig
from verifypd.errors import RequestError
from verifypd.server.admission import Admission
from verifypd.server.bridge import Bridge
from verifypd.server.engine_loop import PURGE, EngineLoop
from verifypd.server.engine_process import Bell, serve
from verifypd.server.messages import (
    Abort,
    Answer,
    Begun,
    Gone,
    GrammarSpec,
    Outputs,
    Quit,
    Stats,
    Submit,
    Switch,
    encode,
)
from verifypd.server.metrics import EngineFigures
from verifypd.testing.instant import InstantEngine
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")

LETTERS = GrammarSpec("regex", "[a-z]*")


class Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.thread = ThreadPoolExecutor(1)
        self.closed: list[GrammarSpec] = []

    def start(self, spec: GrammarSpec, count: int) -> Future[Sequence[Any]]:
        return self.thread.submit(self._make, spec, count)

    def _make(self, spec: GrammarSpec, count: int) -> list[Any]:
        assert self.go.wait(20)
        if spec.text == "bad":
            raise RequestError("no such format", param="response_format")
        if spec.text == "broken":
            raise ZeroDivisionError
        return [SimpleNamespace(error=None, close=lambda: self.closed.append(spec)) for _ in range(count)]


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.go.set()
    made.thread.shutdown()


@pytest.fixture
def sent() -> list[tuple[int, Any]]:
    return []


@pytest.fixture
def loop(folders: tuple[Path, Path], compiler: Compiler, sent: list[tuple[int, Any]]) -> EngineLoop:
    config = EngineConfig(model=str(folders[0]), batch_size=4, max_model_len=400)
    engine = InstantEngine(config, Tokenizer.from_folder(folders[0]))
    return EngineLoop(
        engine,
        epoch=1,
        admission=Admission(max_queue=100, max_per_key=None, slots=engine.config.slots),
        send=lambda worker, message: sent.append((worker, message)),
        workers=(0,),
        compile_grammar=compiler.start,
        interval=1e9,
    )


def submit(call: int, worker: int = 0, n: int = 1, grammar: GrammarSpec | None = None, **params: Any) -> Submit:
    fields = {"max_tokens": 4, "n": n, **params}
    return Submit(worker, call, f"r{call}", [[5, 6, 7]], n, fields, [0], time.monotonic(), 0, [], grammar)


def answers(sent: list[tuple[int, Any]]) -> dict[int, int]:
    return {message.call: message.status for _, message in sent if isinstance(message, Answer)}


def tokens(sent: list[tuple[int, Any]], call: int) -> int:
    outputs = [output for _, message in sent if isinstance(message, Outputs) for output in message.outputs]
    return sum(len(output.tokens) for output in outputs if output.call == call)


def joined(loop: EngineLoop, compiler: Compiler) -> None:
    """Let it compile, and take in what came of it."""
    compiler.go.set()
    compiler.thread.submit(int).result()
    loop.join()


def test_no_step_waits_for_a_grammar(loop: EngineLoop, compiler: Compiler, sent: list[tuple[int, Any]]) -> None:
    loop.take(submit(1, grammar=LETTERS, n=2))
    loop.take(submit(2))
    for _ in range(4):
        loop.join()
        loop.turn()
    assert tokens(sent, 2) == 4 and answers(sent) == {2: 0}
    joined(loop, compiler)
    assert answers(sent) == {2: 0, 1: 0}
    for _ in range(4):
        loop.turn()
    assert tokens(sent, 1) == 8 and not loop.admission.open
    assert compiler.closed == [LETTERS] * 2


def test_steps_within_a_moment_share_a_message(loop: EngineLoop, sent: list[tuple[int, Any]]) -> None:
    """Each token is told once and in order, who leaves meanwhile is told so, and nothing waits for an idle engine."""
    now = [100.0]
    loop.clock, loop.gather = lambda: now[0], 1.0
    for call, most in ((1, 20), (2, 8), (3, 6)):
        loop.take(submit(call, max_tokens=most))

    def step(seconds: float) -> list[tuple[int, int, int, str | None]]:
        sent.clear()
        now[0] += seconds
        loop.turn()
        news = [output for _, message in sent if isinstance(message, Outputs) for output in message.outputs]
        return sorted((output.call, output.start, len(output.tokens), output.finish) for output in news)

    assert step(0.0) == [(call, 0, 1, None) for call in (1, 2, 3)]
    assert step(0.4) == step(0.4) == []
    assert step(0.4) == [(call, 1, 3, None) for call in (1, 2, 3)]
    assert step(0.4) == [] and step(0.4) == []
    loop.take(Abort(0, 2, -1))
    assert 3 not in {track.call for track in loop.tracks.values() if not track.request.finished}
    assert step(0.4) == [(1, 4, 3, None), (2, 4, 2, "abort"), (3, 4, 2, "length")]
    for _ in range(12):
        assert step(0.05) == []
    assert step(0.05) == [(1, 7, 13, "length")] and not loop.engine.busy and not loop.tracks


def test_a_call_that_was_let_in_before_is_not_turned_away(loop: EngineLoop, sent: list[tuple[int, Any]]) -> None:
    """Its choices that have not ended go on where they stood; a new one finds the queue full."""
    loop.admission.max_queue = 0
    for call in range(1, 5):
        loop.take(submit(call, max_tokens=40))
    loop.turn()
    loop.take(submit(5, n=3))
    begun = [Begun(0, [70, 71, 72]), Begun(2, [])]
    loop.take(msgspec.structs.replace(submit(6, n=3), begun=begun))
    assert answers(sent) == {1: 0, 2: 0, 3: 0, 4: 0, 5: 429, 6: 0}
    requests = [track.request for track in loop.calls[0, 6].values()]
    assert [request.choice for request in requests] == [0, 2]
    assert [request.output_ids for request in requests] == [[70, 71, 72], []]
    for _ in range(45):
        loop.turn()
    news = [out for _, message in sent if isinstance(message, Outputs) for out in message.outputs if out.call == 6]
    assert sum(len(out.tokens) for out in news if out.choice == 0) == 1, "of four it had three"
    assert sum(len(out.tokens) for out in news if out.choice == 2) == 4
    assert not loop.admission.open


def test_a_grammar_that_cannot_be_compiled_refuses_its_call_alone(
    loop: EngineLoop, compiler: Compiler, sent: list[tuple[int, Any]]
) -> None:
    for call, text in enumerate(("bad", "broken", "[a-z]*"), 1):
        loop.take(submit(call, grammar=GrammarSpec("regex", text)))
    joined(loop, compiler)
    assert answers(sent) == {1: 400, 2: 500, 3: 0}
    [refused] = [m for _, m in sent if isinstance(m, Answer) and m.status == 400]
    assert refused.param == "response_format" and "no such format" in refused.message
    assert loop.admission.open == {0: 1}


def test_calls_that_leave_while_they_are_compiled(
    loop: EngineLoop, compiler: Compiler, sent: list[tuple[int, Any]]
) -> None:
    loop.take(submit(1, grammar=LETTERS))
    loop.take(submit(2, worker=1, grammar=LETTERS, n=3))
    loop.take(submit(3, grammar=LETTERS))
    assert loop.joining is not None and loop.joining.requests == 5
    loop.take(Abort(0, 1, -1))
    loop.take(Gone(1))
    joined(loop, compiler)
    assert answers(sent) == {3: 0} and loop.admission.open == {0: 1}
    assert not loop.engine.free_slots or len(loop.engine.waiting) == 1


def test_those_that_wait_for_a_grammar_count_in_the_queue(loop: EngineLoop, sent: list[tuple[int, Any]]) -> None:
    room = 100 + loop.engine.config.slots
    for call in range(room + 1):
        loop.take(submit(call, grammar=LETTERS))
    assert answers(sent) == {room: 429}
    assert loop.joining is not None
    loop.take(Gone(0))
    assert not loop.joining.requests and not loop.admission.open


@pytest.mark.parametrize("choice", [-1, 1])
def test_who_leaves_is_out_before_the_next_step(loop: EngineLoop, sent: list[tuple[int, Any]], choice: int) -> None:
    """All of a call or one choice of it: no step carries it any more, and its slots are free."""
    loop.take(submit(1, n=2, max_tokens=100))
    loop.take(submit(2, max_tokens=100))
    loop.turn()
    free, told = len(loop.engine.free_slots), [tokens(sent, call) for call in (1, 2)]
    assert all(told)
    loop.take(Abort(0, 1, choice))
    gone = 2 if choice < 0 else 1
    assert len(loop.tracks) == 3 - gone
    loop.turn()
    assert len(loop.engine.free_slots) == free + gone
    assert tokens(sent, 1) - told[0] == 2 - gone and tokens(sent, 2) - told[1] == 1
    assert loop.totals.finished["abort"] == gone and loop.admission.open[0] == (1 if choice < 0 else 2)


def test_changes_of_architecture_are_counted(loop: EngineLoop) -> None:
    loop.take(submit(1, max_tokens=100))
    for name in ("pd", "pd", "unified", "pd"):
        loop.engine.architecture = SimpleNamespace(name="auto", ran=name, state=dict)
        loop.turn()
    assert loop.totals.switches == 2 and loop.totals.architecture_steps == {"pd": 3, "unified": 1}


def test_waiting_for_work_is_part_of_no_step(loop: EngineLoop) -> None:
    now = 1.0
    loop.clock = lambda: now
    loop.take(submit(1))
    loop.collect()
    loop.take(Abort(0, 1, -1))
    assert not loop.engine.busy
    now = 100.0
    loop.take(submit(2))
    loop.turn()
    assert loop.totals.step_count == 1 and loop.totals.steps.seconds == 0.0


@pytest.mark.parametrize("words", [[[5] * 33], [[5], [VOCAB]], [[-1]]])
def test_bad_words_no_worker_should_send_are_refused(
    loop: EngineLoop, sent: list[tuple[int, Any]], words: list[list[int]]
) -> None:
    loop.take(msgspec.structs.replace(submit(1), bad_words=words))
    [(_, answer)] = sent
    assert (answer.status, answer.param) == (400, "bad_words") and not loop.admission.open and not loop.engine.busy


def test_deadlines_of_what_has_ended_are_forgotten(loop: EngineLoop) -> None:
    for call in range(20 * PURGE):
        loop.take(submit(call, deadline_ms=3_600_000.0, max_tokens=1))
        loop.turn()
    assert not loop.tracks and len(loop._deadlines) <= PURGE
    loop.take(submit(-1, deadline_ms=3_600_000.0))
    loop.turn()
    assert any(order in loop.tracks for _, order in loop._deadlines)


class Receiver:
    """Stands in for the engine's inbox: notes the pulse whenever it is asked."""

    def __init__(self, inner: zmq.Socket, pulse: list[float]) -> None:
        self.inner, self.pulse, self.seen = inner, pulse, []

    def recv(self, flags: int) -> bytes:
        self.seen.append(self.pulse[0])
        return self.inner.recv(flags)

    def fileno(self) -> int:
        return self.inner.fileno()


def test_the_watchdog_covers_the_whole_turn(loop: EngineLoop, compiler: Compiler) -> None:
    """Messages, steps and sending all have a pulse; waiting for work has none."""
    pulse, flushed, context = [0.0], [], zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://engine")
    outbox.connect("inproc://engine")
    flush = loop.flush
    loop.flush = lambda: (flushed.append(pulse[0]), flush())[1]  # type: ignore[method-assign]
    loop.interval = 0.01
    for message in (submit(1), submit(2, grammar=LETTERS), Abort(0, 2, -1)):
        outbox.send(encode(message))
    timer = threading.Timer(0.2, lambda: outbox.send(encode(Quit())))
    timer.start()
    receiver: Any = Receiver(inbox, pulse)
    serve(loop, receiver, Bell(), pulse, os.getppid())
    timer.join()
    assert len(receiver.seen) > 4 and all(receiver.seen) and all(flushed)
    assert pulse == [0.0]
    context.destroy(linger=0)


def test_a_compiled_grammar_wakes_the_loop(loop: EngineLoop, compiler: Compiler, sent: list[tuple[int, Any]]) -> None:
    """The loop waits for an hour when there is nothing to do; a grammar that is ready is something to do."""
    context, bell = zmq.Context(), Bell()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://engine")
    outbox.connect("inproc://engine")
    loop.interval = 3600.0
    assert loop.joining is not None
    loop.joining._ring = bell.ring
    outbox.send(encode(submit(1, grammar=LETTERS)))
    thread = threading.Thread(target=serve, args=(loop, inbox, bell, [0.0], os.getppid()), daemon=True)
    thread.start()
    time.sleep(0.1)
    compiler.go.set()
    until = time.monotonic() + 20
    while tokens(sent, 1) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert tokens(sent, 1) == 4
    outbox.send(encode(Quit()))
    thread.join(20)
    assert not thread.is_alive()
    context.destroy(linger=0)


def test_the_wait_for_a_slot_begins_in_the_engine(loop: EngineLoop, compiler: Compiler) -> None:
    """Neither reading a body nor compiling a format is part of it; a deadline counts both."""
    begun = time.monotonic()
    late = msgspec.structs.replace(submit(1), arrival=begun - 5)
    loop.take(late)
    loop.take(msgspec.structs.replace(submit(2, grammar=GrammarSpec("regex", "a")), arrival=begun - 5))
    joined(loop, compiler)
    assert all(track.request.entered >= begun for track in loop.tracks.values()) and len(loop.tracks) == 2
    assert all(track.request.metrics.arrival_time == begun - 5 for track in loop.tracks.values())


def test_a_switch_is_answered(loop: EngineLoop, sent: list[tuple[int, Any]]) -> None:
    made: list[str] = []
    loop.engine.switch = made.append
    loop.take(Switch(0, 7, "pdv"))
    (first, stats), last = sent[-2:]
    assert made == ["pdv"] and last == (0, Answer(1, 7))
    assert first == 0 and isinstance(stats, Stats) and stats.figures["policy"] == loop.engine.architecture.name
    del loop.engine.switch
    loop.take(Switch(0, 8, "pdv"))
    assert sent[-1][1].call == 8 and sent[-1][1].status == 400 and "'pdv'" in sent[-1][1].message


def test_calls_for_memory_are_shown(loop: EngineLoop, sent: list[tuple[int, Any]]) -> None:
    """A CPU makes none, and has no such figure."""
    loop.engine.switch = lambda name: None
    for taken, expected in (({}, []), ({"allocated": 0, "pinned": 3}, [0.0, 3.0])):
        loop.engine.memory_taken = taken
        loop.take(Switch(0, 7, "pdv"))
        bridge = Bridge(0, None, 0)
        bridge.figures = next(each.figures for _, each in reversed(sent) if isinstance(each, Stats))
        found = {metric.name: metric for metric in EngineFigures(bridge, "m").collect()}
        calls = found.get("verifypd:memory_calls")
        assert [sample.value for sample in calls.samples] == expected if calls else not expected
