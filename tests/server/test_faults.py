"""What clients see when things break: each test breaks one thing in the real server and asserts both sides."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import faulty
from tests.server.clients import Stream, connect, read_all, request_bytes, together, vanish
from tests.server.serving import Server, children, launch

pytestmark = pytest.mark.xdist_group("server-faults")

PROMPTS = [[5 + 3 * i, 9, 200 - i, 31, 7, 9, 200 - i, 31] for i in range(12)]
CONNECTIONS = 48  # a worker of the frail server keeps open
LONG: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose files set off faults."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def frail(folders: tuple[Path, Path], faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine can be broken."""
    os.environ[faulty.VARIABLE] = str(faults)
    flags: dict[str, Any] = {"engine-factory": "tests.server.faulty:build", "step-timeout": 3, "send-timeout": 2}
    log = tmp_path_factory.mktemp("log") / "frail.log"
    limits = {"header-timeout": 2, "max-body": "100KB", "max-connections": CONNECTIONS, "drain-timeout": 90}
    with Server(folders[0], str(folders[1]), log, **limits, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def texts(frail: Server) -> list[str]:
    """What each prompt gives when nothing breaks."""
    return [choice["text"] for choice in frail.complete(PROMPTS, **LONG)["choices"]]


def body(index: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[index], **LONG, **more}


def restarts(server: Server) -> float:
    return server.metrics()["verifypd:engine_restarts_total"]


def assert_lost(stream: Stream, text: str) -> None:
    """It had begun: what it got is right, and it was told that the engine is gone."""
    stream.join()
    assert stream.text and text.startswith(stream.text) and stream.text != text
    assert stream.error is not None and stream.error["code"] == "engine_lost" and stream.done


@pytest.mark.parametrize("how", ["kill", "stall"])
def test_the_engine_dies(frail: Server, texts: list[str], faults: Path, how: str) -> None:
    """Streams that had begun get an error event; whoever has no token yet never notices, but for the wait."""
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
    for stream, text in zip(begun, texts, strict=False):
        assert_lost(stream, text)
    for stream in hurried:
        stream.join()
        assert stream.error is None and stream.finish == "deadline" and stream.done
    whole.join()
    assert whole.status == 200 and whole.error is None  # tried again: nothing had been sent
    untouched = 0
    for index, stream in enumerate(waiting, 7):
        stream.join()
        if stream.error is None:
            assert stream.text == texts[index] and stream.finish == "length" and stream.done
            untouched += 1
        else:
            assert_lost(stream, texts[index])
    assert untouched >= 2
    frail.wait_ready()
    assert restarts(frail) == before + 1
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


def test_a_client_that_leaves_frees_its_memory(frail: Server) -> None:
    """Streaming or not, with another request behind it or not: what it asked for is aborted, and does not run on."""
    before = frail.idle()
    for stream, another in ((True, False), (False, False), (True, True), (False, True)):
        ask = request_bytes("/v1/completions", {**body(0), "stream": stream, "n": 4, "seed": 1, "max_tokens": 380})
        made = connect(frail)
        made.sendall(ask)
        until = time.monotonic() + 10
        while frail.metrics()["vllm:num_requests_running"] < 4 and time.monotonic() < until:
            time.sleep(0.01)
        if another:
            made.sendall(ask)
            time.sleep(0.1)
        vanish(made)
        now = frail.idle()
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    assert now[aborted] == before.get(aborted, 0) + 16
    assert now['verifypd:calls_total{outcome="gone"}'] >= 4


def dropped(server: Server) -> float:
    """Calls that ended because their client did not read: seen by us, or by the kernel."""
    now = server.metrics()
    return sum(now.get(f'verifypd:calls_total{{outcome="{name}"}}', 0.0) for name in ("unread", "gone"))


def test_a_client_that_does_not_read(frail: Server, texts: list[str]) -> None:
    """Nobody else waits for it, its request does not stay in the engine, and it is dropped in the end."""
    before = dropped(frail)
    made = connect(frail, receive_buffer=4096)
    wide = {**body(0), "n": 8, "seed": 1, "temperature": 1, "logprobs": 20, "stream": True, "max_tokens": 380}
    made.sendall(request_bytes("/v1/completions", wide))
    made.recv(100)
    other = Stream(frail, body(1)).start().join()
    assert other.text == texts[1]
    frail.idle(40)
    until = time.monotonic() + 20
    while dropped(frail) == before:
        assert time.monotonic() < until, f"it was never dropped: {frail.metrics()}"
        time.sleep(0.1)
    data = read_all(made)
    assert b"[DONE]" not in data
    made.close()


def fall_silent(made: socket.socket) -> None:
    """From here on the kernel drops what arrives, unacknowledged, and sends no reset: a cable that was pulled."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of every packet
    made.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(code)))  # SO_ATTACH_FILTER


def established(server: Server, port: int) -> bool:
    """Whether the server's kernel still has the connection from this port of loopback."""
    ends = f"0100007F:{server.port:04X} 0100007F:{port:04X} 01 "
    return ends in Path("/proc/net/tcp").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="drops packets with a filter of Linux")
def test_a_client_that_falls_silent(frail: Server) -> None:
    """No end and no reset ever come of it: its call ends, its memory is free, and its connection does not stay."""
    before = dropped(frail)
    made = connect(frail)
    wide = {**body(0), "n": 8, "seed": 1, "temperature": 1, "logprobs": 20, "stream": True, "max_tokens": 380}
    made.sendall(request_bytes("/v1/completions", wide))
    made.recv(100)
    port = made.getsockname()[1]
    assert established(frail, port)
    fall_silent(made)
    frail.idle(40)
    until = time.monotonic() + 20
    while dropped(frail) == before or established(frail, port):
        assert time.monotonic() < until, "its connection is still there"
        time.sleep(0.1)
    made.close()


def test_half_a_request(frail: Server) -> None:
    """Half a head is closed, half a body is answered, both after the time a client has for it."""
    head, part = connect(frail), connect(frail)
    head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    part.sendall(request_bytes("/v1/completions", body(0))[:-20])
    assert read_all(head) == b""
    assert b" 408 " in read_all(part).split(b"\r\n")[0]
    head.close()
    part.close()


def test_half_a_request_on_a_connection_that_was_used_before(frail: Server) -> None:
    """The head of every request has its time, not only that of the first; drops of it do not set the clock back."""
    drops = {connect(frail): drop for drop in (b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 100, b"\r\n" * 60)}
    for made in drops:
        use(made)
        made.settimeout(0.1)
    still = set(drops)
    for pair in itertools.zip_longest(*drops.values(), fillvalue=10):
        still = {made for made, drop in zip(drops, pair, strict=True) if made in still and drips(made, drop)}
    assert not still, "it is still open"
    for made in drops:
        made.close()


def drips(made: socket.socket, drop: int) -> bool:
    """Send one byte; whether the connection is still open a moment later."""
    try:
        made.sendall(bytes([drop]))
        return made.recv(100) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_more_connections_than_allowed(frail: Server) -> None:
    """Those beyond are told so at once, whether they ask or not; when others leave there is room again."""
    idle = [connect(frail) for _ in range(CONNECTIONS)]
    for ask in (b"", request_bytes("/v1/completions", body(0))):
        made = connect(frail)
        made.sendall(ask)
        head, _, text = read_all(made).partition(b"\r\n\r\n")
        assert b" 503 " in head and b"retry-after" in head and b"too_many_connections" in text
        made.close()
    for made in idle:
        made.close()
    frail.wait_ready()
    assert frail.metrics()['verifypd:refused_total{code="too_many_connections"}'] >= 2


def test_a_body_too_large(frail: Server) -> None:
    status, answer, _ = frail.post("/v1/completions", {"prompt": "x" * 200_000})
    assert status == 413 and answer["error"]["code"] == "body_too_large"
    made = connect(frail)
    made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    made.sendall(chunk * 2)
    assert b" 413 " in made.recv(1000)
    made.close()


def use(made: socket.socket, request: bytes = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") -> None:
    """Ask for something, and take the whole answer."""
    made.sendall(request)
    answer = b""
    while not answer.endswith(b"}"):
        part = made.recv(4096)
        assert part, "it was closed"
        answer += part
    assert b" 200 " in answer


@pytest.mark.parametrize("used", [False, True])
def test_a_head_too_long(frail: Server, used: bool) -> None:
    """One header without end, very many of them, a path without end: each is told so, on a used connection too."""
    begin = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    for head in (
        begin + b"X: " + b"a" * 300_000,
        begin + b"X: a\r\n" * 30_000,
        begin + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 300_000,
    ):
        made = connect(frail)
        if used:
            use(made, begin + b"X: " + b"a" * 50_000 + b"\r\n\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for at in range(0, len(head), 10_000):
                made.sendall(head[at : at + 10_000])
        answer = read_all(made)
        assert b" 431 " in answer.split(b"\r\n")[0] and b"headers_too_large" in answer
        made.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00\xff\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
)
def test_garbage_on_the_wire(frail: Server, junk: bytes) -> None:
    """One answer, in the shape of all errors, on a used connection too; what follows the garbage is not read."""
    for used in (False, True):
        made = connect(frail)
        if used:
            use(made)
        made.sendall(junk + b"GET /health HTTP/1.1\r\n\r\n")
        head, _, text = read_all(made).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
        assert json.loads(text)["error"]["code"] == "invalid_http"
        made.close()


def test_garbage_behind_a_request_does_not_come_into_its_answer(frail: Server) -> None:
    for stream in (True, False):
        made = connect(frail)
        made.sendall(request_bytes("/v1/completions", {**body(0), "stream": stream}) + b"\x00\xff\r\n\r\n")
        assert b" 400 " not in read_all(made)
        made.close()
    frail.idle()


def start(folders: tuple[Path, Path], tmp_path: Path, **flags: Any) -> Server:
    os.environ[faulty.VARIABLE] = str(tmp_path)
    flags["engine-factory"] = "tests.server.faulty:build"
    return Server(folders[0], str(folders[1]), tmp_path / "server.log", **flags)


def test_sigterm_under_load(folders: tuple[Path, Path], tmp_path: Path, texts: list[str]) -> None:
    """What runs finishes, what is new is refused, and the server ends with status 0 and nothing left behind."""
    server = start(folders, tmp_path, **{"drain-timeout": 40})
    children = server.children()
    running = [Stream(server, body(i)).start() for i in range(10)]
    for stream in running[:6]:
        stream.begun()
    server.terminate()
    until = time.monotonic() + 5
    while server.ready() and time.monotonic() < until:
        time.sleep(0.02)
    status, answer, headers = server.post("/v1/completions", {"prompt": PROMPTS[0]})
    assert status == 503 and answer["error"]["code"] == "draining" and int(headers["retry-after"]) > 0
    assert server.get("/ready")[0] == 503 and server.get("/health")[0] == 200
    for stream, text in zip(running, texts, strict=False):
        stream.join()
        assert stream.error is None and stream.text == text and stream.done
    assert server.wait(20) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())
    assert "draining" in server.stop()


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
    got = together([lambda i=i: frail.complete(PROMPTS[i], **LONG)["choices"][0]["text"] for i in range(12)])
    assert got == texts
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
