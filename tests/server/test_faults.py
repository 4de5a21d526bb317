"""What clients see when engine, worker or supervisor break: each test breaks one thing and asserts both sides."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import faulty
from tests.server.clients import Stream, check_counters, connect, greedy_and_drawn, read_all, request_bytes, together
from tests.server.frail import LONG, PROMPTS, all_at_once, body
from tests.server.serving import Server, children, launch

pytestmark = pytest.mark.xdist_group("server-faults")


def restarts(server: Server) -> float:
    return server.metrics()["verifypd:engine_restarts_total"]


def test_counters_of_one_worker_are_the_servers_own(frail: Server, foreign: Path) -> None:
    check_counters(frail, foreign)


def test_a_server_can_leave_the_models_sampling_aside(frail: Server) -> None:
    """The model asks for one token out of one, the server was started with `--generation-config none`."""
    greedy, drawn = greedy_and_drawn(frail)
    assert any(each != greedy for each in drawn) and "top_k" not in frail.log.read_text()


@pytest.mark.parametrize("how", ["kill", "stall"])
def test_the_engine_dies(frail: Server, texts: list[str], faults: Path, how: str) -> None:
    """Nobody notices, but for the wait: neither streams that had begun nor whoever has no token yet."""
    before = restarts(frail)
    # eight slots and two in the queue beyond them: begun, not streaming, and not begun
    begun = [Stream(frail, body(i)).start() for i in range(6)]
    for stream in begun:
        stream.begun()
    hurry = {"max_tokens": 380, "deadline_ms": 2000}  # passes before anybody knows that the engine hangs
    hurried = [Stream(frail, body(7, **hurry)).start()] if how == "stall" else []
    for stream in hurried:  # let in before others queue: a deadline that their queue would break is refused
        stream.begun()
    whole = Stream(frail, body(6, stream=False)).start()
    waiting = [Stream(frail, body(i, priority=1)).start() for i in range(7, 12)]
    time.sleep(0.2)
    if how == "kill":
        os.kill(frail.children()["engine"], signal.SIGKILL)
    else:
        (faults / how).write_text("now")
    for stream in hurried:
        stream.join()
        assert stream.error is None and stream.finish == "deadline" and stream.done
    whole.join()
    assert whole.status == 200 and whole.error is None
    for index, stream in [*enumerate(begun), *enumerate(waiting, 7)]:
        stream.join()
        assert stream.error is None and stream.text == texts[index] and stream.finish == "length" and stream.done
    frail.wait_ready()
    assert restarts(frail) == before + 1
    engine = frail.children()["engine"]
    assert Path(f"/proc/{engine}/comm").read_text() == "verifypd-engine\n"
    why = {"kill": "killed by SIGKILL", "stall": "a step took longer than"}[how]
    ends = frail.log.read_text().rpartition(f'engine died reason="{why}')[2]
    assert re.search(rf"engine ready epoch=\d+ pid={engine} ", ends)
    assert frail.complete(PROMPTS[0], **LONG)["choices"][0]["text"] == texts[0]
    frail.idle()


def test_a_worker_dies(frail: Server, texts: list[str]) -> None:
    """Its clients lose their connections, the engine frees what they held, and a new worker serves.

    What the engine had sent to the old worker reaches none of the new one's clients, and a worker that dies again is
    started again later each time.
    """
    for _ in range(2):
        streams = [Stream(frail, body(i)).start() for i in range(8)]
        for stream in streams:
            stream.begun()
        os.kill(frail.children()["api"], signal.SIGKILL)
        for stream, text in zip(streams, texts, strict=False):
            assert not stream.join().done and text.startswith(stream.text)
        # these wait at the door until the new worker is there, and come in while the old one's requests end
        again = together([lambda i=i: patient(frail, 11 - i) for i in range(8)])
        assert again == [texts[11 - i] for i in range(8)]
    pauses = re.findall(r"API worker restarts worker=0 seconds=(\S+)", frail.log.read_text())
    assert pauses == ["0.25", "0.5"]
    frail.idle()


def patient(server: Server, index: int) -> str:
    """The text of a prompt from a client that tries again while the server is not ready."""
    until = time.monotonic() + 60
    while True:
        status, answer, _ = server.post("/v1/completions", body(index))
        if status == 200:
            text: str = answer["choices"][0]["text"]
            return text
        assert status == 503 and time.monotonic() < until, answer
        time.sleep(0.02)


def test_a_pass_out_of_memory_fails_nobody_that_fits(frail: Server, texts: list[str], faults: Path) -> None:
    """With many in the pass they are computed again, fewer at once: all get their whole text."""
    before = frail.metrics()["verifypd:out_of_memory_steps_total"]
    streams = [Stream(frail, body(i)).start() for i in range(8)]
    for stream in streams:
        stream.begun()
    (faults / "memory").write_text("2")
    for stream, text in zip(streams, texts, strict=False):
        stream.join()
        assert stream.error is None and stream.text == text
    now = frail.idle()
    assert now["verifypd:out_of_memory_steps_total"] == before + 2
    assert now["vllm:num_preemptions_total"] > 0


def test_a_request_too_large_alone_fails_alone(frail: Server, texts: list[str], faults: Path) -> None:
    before = restarts(frail)
    stream = Stream(frail, body(0)).start().begun()
    (faults / "memory").write_text("1")
    stream.join()
    assert stream.error is not None and stream.error["code"] == "engine_error" and texts[0].startswith(stream.text)
    assert frail.complete(PROMPTS[1], **LONG)["choices"][0]["text"] == texts[1]
    assert restarts(frail) == before
    frail.idle()


def start(folders: tuple[Path, Path], tmp_path: Path, **flags: Any) -> Server:
    os.environ[faulty.VARIABLE] = str(tmp_path)
    flags["engine-factory"] = "tests.server.faulty:build"
    return Server(folders[0], str(folders[1]), tmp_path / "server.log", **flags)


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_under_load(
    folders: tuple[Path, Path], tmp_path: Path, texts: list[str], signal_: signal.Signals
) -> None:
    """What runs finishes, what is new is refused, and the server ends with status 0 and nothing left behind."""
    before = signal.signal(signal_, signal.SIG_DFL)  # the tests may run under `nohup`, and programs inherit that
    try:
        server = start(folders, tmp_path, **{"drain-timeout": 40})
    finally:
        signal.signal(signal_, before)
    children = server.children()
    running = [Stream(server, body(i)).start() for i in range(10)]
    for stream in running[:6]:
        stream.begun()
    for pid in children.values() if signal_ is signal.SIGHUP else ():
        os.kill(pid, signal_)  # a terminal that is closed sends it to all its processes
    os.kill(server.process.pid, signal_)
    until = time.monotonic() + 5
    while server.ready() and time.monotonic() < until:
        time.sleep(0.02)
    status, answer, headers = server.post("/v1/completions", {"prompt": PROMPTS[0]})
    assert status == 503 and answer["error"]["code"] == "draining" and int(headers["retry-after"]) > 0
    assert server.get("/ready")[0] == 503 and server.get("/health")[0] == 200
    os.kill(server.process.pid, signal.SIGHUP)  # systemd sends it behind SIGTERM: no second wish to end
    for stream, text in zip(running, texts, strict=False):
        stream.join()
        assert stream.error is None and stream.text == text and stream.done
    assert server.wait(20) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())
    assert f"draining signal={signal_.name} seconds=40" in server.stop()


@pytest.fixture(scope="module")
def hung_up(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is started as `nohup` does it, and ends because of SIGTERM and nothing else."""
    log = tmp_path_factory.mktemp("log") / "hung_up.log"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # programs inherit what is ignored
    try:
        server = Server(folders[0], str(folders[1]), log)
    finally:
        signal.signal(signal.SIGHUP, before)
    with server:
        yield server
    assert "draining signal=SIGTERM" in log.read_text()


def test_nohup_is_heeded(hung_up: Server) -> None:
    os.kill(hung_up.process.pid, signal.SIGHUP)
    assert hung_up.complete(PROMPTS[0], max_tokens=2)["usage"]["completion_tokens"] == 2
    assert hung_up.ready()


@pytest.mark.slow
def test_bodies_that_are_read_when_the_server_is_told_to_end(hung_up: Server) -> None:
    """One that is read in time has its answer; others are told that the server ends, in the shape of any error."""
    soon = {"prompt": "hello world " * 40_000, "truncate_prompt_tokens": 5, "max_tokens": 4, "ignore_eos": True}
    never = {"prompt": "a " * 3_900_000}
    asked = [request_bytes("/v1/completions", soon), request_bytes("/tokenize", never)]
    asked.append(request_bytes("/v1/completions", soon)[:-5])  # it never arrives whole
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(connect(hung_up)) for _ in asked]
        for each, data in zip(made, asked, strict=True):
            each.sendall(data)
        time.sleep(0.5)
        hung_up.terminate()
        answers = [read_all(each).partition(b"\r\n\r\n") for each in made]
        assert hung_up.wait(30) == 0
    assert [head.split()[1] for head, _, _ in answers] == [b"200", b"503", b"503"]
    assert json.loads(answers[0][2])["usage"]["completion_tokens"] == 4
    assert all(json.loads(body)["error"]["code"] == "draining" for _, _, body in answers[1:])
    assert "Traceback" not in hung_up.log.read_text()


@pytest.mark.parametrize("moment", ["begun", "loading"])
def test_nothing_outlives_a_supervisor_that_is_killed(folders: tuple[Path, Path], tmp_path: Path, moment: str) -> None:
    """Not even what it had only just started, or what loads a model for as long as it takes."""
    os.environ[faulty.VARIABLE] = str(tmp_path)
    (tmp_path / "load").write_text("for ever")
    with (tmp_path / "server.log").open("w") as log:
        process = launch(folders[0], str(folders[1]), log, **{"engine-factory": "tests.server.faulty:build"})
        until = time.monotonic() + 60
        while len(children(process.pid)) < 2 or (moment == "loading" and not (tmp_path / "loading").exists()):
            assert time.monotonic() < until and process.poll() is None, "it never got that far"
            time.sleep(0.01)
        left = children(process.pid)
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
    while any(Path(f"/proc/{pid}/exe").exists() for pid in left):
        assert time.monotonic() < until, "a process was left behind"
        time.sleep(0.05)


def test_calls_do_not_cross_after_all_that(frail: Server, texts: list[str]) -> None:
    assert all_at_once(frail) == texts
    frail.idle()


def restart_pauses(server: Server) -> list[float]:
    """What was waited for each start of another engine, s."""
    return [float(pause) for pause in re.findall(r"engine restarts seconds=(\S+)", server.log.read_text())]


def test_sigterm_while_the_engine_is_to_be_started_again(frail: Server) -> None:
    """It is not started any more; who waited for it is told, and nobody waits for the drain to time out."""
    waiting = Stream(frail, body(0, stream=False, max_tokens=380)).start()
    until = time.monotonic() + 60
    while not frail.metrics().get("vllm:num_requests_running"):
        assert time.monotonic() < until
    others = set(children(frail.process.pid)) - {frail.children()["engine"]}
    pauses = restart_pauses(frail)
    while not pauses or pauses[-1] < 2:  # each is twice as long; this one can be stepped into
        while not (engine := set(children(frail.process.pid)) - others):
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(*engine, signal.SIGKILL)
        known = len(pauses)
        while len(pauses := restart_pauses(frail)) == known:
            assert time.monotonic() < until
            time.sleep(0.01)
    frail.terminate()
    assert frail.wait(30) == 0
    waiting.join()
    assert waiting.status == 500 and waiting.error is not None and waiting.error["code"] == "engine_lost"
    ends = frail.stop().partition("draining")[2]
    assert ends and "engine ready" not in ends
