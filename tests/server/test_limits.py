"""Who may come in: keys, queue, streams a key, deadlines, sizes; and what the server shows to whom."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.clients import Stream, check_counters, greedy_and_drawn, together
from tests.server.serving import Server, launch
from verifypd.server.admission import Admission, LeaveRate, Load
from verifypd.server.gate import Keys
from verifypd.server.supervisor import back_off

pytestmark = pytest.mark.xdist_group("server-faults")

IDS = [5, 9, 200, 31, 7, 9, 200, 31]
LONG: dict[str, Any] = {"prompt": IDS, "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(
    folders: tuple[Path, Path], asking: Path, beside: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Two slots, a queue of three, two keys, two workers."""
    flags: dict[str, Any] = {"api-key": ["first-key", "second-key"], "batch-size": 2, "queue-factor": 1.0}
    limits = {"max-queue": 3, "max-streams-per-key": 4, "max-output-tokens": 380, "max-choices": 4}
    more = {"cors-origin": ["https://app.example"], "log-format": "json", "log-prompts": True, "api-workers": 2}
    more["drain-timeout"] = 0.5
    log = tmp_path_factory.mktemp("log") / "small.log"
    with Server(asking, str(folders[1]), log, **flags, **limits, **more) as running:
        yield running


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys(small: Server) -> None:
    for headers in ({}, auth("wrong"), auth("first-ke"), {"Authorization": "Basic first-key"}, auth("")):
        status, body, _ = small.post("/v1/completions", {"prompt": IDS}, **headers)
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/tokenizer_info"):
        assert small.get(path)[0] == 401
    for path in ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert small.get(path)[0] == 200, f"{path} stays open"
    for key in ("first-key", "second-key"):
        with openai.OpenAI(base_url=small.base, api_key=key) as client:
            assert client.completions.create(model="tiny", prompt=IDS, max_tokens=2).choices
    assert "first-key" not in small.log.read_text()


def test_who_has_no_key_is_told_how_to_give_one(small: Server) -> None:
    for given in ({}, auth("wrong")):
        status, answer, headers = small.post("/v1/completions", {"prompt": "x" * 5_000_000}, **given)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer"


def test_keys_compare_with_every_key() -> None:
    keys = Keys(["a", "b"])
    assert keys.find("Bearer a") == 0 and keys.find("bearer b") == 1
    assert keys.find("Bearer c") is None and keys.find("") is None and keys.find("Bearer") is None
    assert not Keys([])


def test_a_full_queue(small: Server) -> None:
    """Two run, three wait, the others hear 429 and when to come back; those that were let in get their text."""
    ask = {**LONG, "max_tokens": 120}
    works = [
        lambda i=i: small.post("/v1/completions", {**ask, "seed": i}, **auth(("first-key", "second-key")[i % 2]))
        for i in range(12)
    ]
    answers = together(works)
    codes = sorted(status for status, _, _ in answers)
    assert codes.count(200) >= 5 and set(codes) == {200, 429}
    texts = {body["choices"][0]["text"] for status, body, _ in answers if status == 200}
    assert len(texts) == 1
    for status, body, headers in answers:
        if status == 429:
            assert body["error"]["code"] in ("queue_full", "too_many_streams")
            assert body["error"]["type"] == "rate_limit_error" and 1 <= int(headers["retry-after"]) <= 60
    now = small.idle()
    refused = [now.get(f'verifypd:refused_total{{code="{code}"}}', 0) for code in ("queue_full", "too_many_streams")]
    assert sum(refused) == codes.count(429) and refused[0]


def test_as_many_streams_as_a_key_may_have(small: Server) -> None:
    """The next one of the same key is refused, another key's is not; when one ends there is room again."""
    streams = [Stream(small, {**LONG, "max_tokens": 160}, key="first-key").start() for _ in range(4)]
    until = time.monotonic() + 20
    while sum(small.metrics()[f"vllm:num_requests_{name}"] for name in ("running", "waiting")) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    status, body, headers = small.post("/v1/completions", {"prompt": IDS}, **auth("first-key"))
    other = small.post("/v1/completions", {"prompt": IDS, "priority": -1}, **auth("second-key"))[0]
    assert (status, body["error"]["code"], other) == (429, "too_many_streams", 200)
    assert body["error"]["type"] == "rate_limit_error" and int(headers["retry-after"]) >= 1
    for stream in streams:
        assert stream.join().finish == "length"
    small.idle()
    assert small.post("/v1/completions", {"prompt": IDS}, **auth("first-key"))[0] == 200


def test_priority_goes_first(small: Server) -> None:
    def ask(priority: int, tokens: int) -> Stream:
        return Stream(small, {**LONG, "max_tokens": tokens, "priority": priority}, key="first-key").start()

    running = [ask(0, 150).begun(), ask(0, 380).begun()]  # one slot is free long before the other
    late = ask(5, 20)
    early = ask(-5, 20)
    early.begun()
    assert not late.parts
    for stream in (*running, late, early):
        assert stream.join().finish == "length"


def test_deadlines(small: Server) -> None:
    status, body, _ = small.post("/v1/completions", {**LONG, "deadline_ms": 0.01}, **auth("first-key"))
    assert status == 429 and body["error"]["param"] == "deadline_ms"
    ended = []
    for deadline in (20, 40, 80, 160, 320, 640):  # one of them falls between the first token and the last
        status, body, _ = small.post("/v1/completions", {**LONG, "deadline_ms": deadline}, **auth("first-key"))
        if status == 200 and body["choices"][0]["finish_reason"] == "deadline":
            ended.append(body["usage"]["completion_tokens"])
    assert any(0 < tokens < LONG["max_tokens"] for tokens in ended)
    status, body, _ = small.post("/v1/completions", {**LONG, "deadline_ms": 60_000}, **auth("first-key"))
    assert body["choices"][0]["finish_reason"] == "length"


def test_sizes(small: Server) -> None:
    for fields, param in (({"max_tokens": 381}, "max_tokens"), ({"n": 5}, "n"), ({"prompt": [IDS] * 5}, "prompt")):
        status, body, _ = small.post("/v1/completions", {**LONG, **fields}, **auth("first-key"))
        assert status == 400 and body["error"]["param"] == param
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "temperature": 0}
    _, body, _ = small.post("/v1/chat/completions", chat, **auth("first-key"))
    assert body["usage"]["completion_tokens"] == 380


def test_cors_only_where_asked(small: Server) -> None:
    for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
        headers = small.get("/health", Origin=origin)[2]
        assert (headers.get("access-control-allow-origin") == origin) == allowed


def test_logs_are_json(small: Server) -> None:
    import json

    body = {"prompt": "say this aloud", "max_tokens": 3, "ignore_eos": True}
    small.post("/v1/completions", body, **auth("first-key"), **{"X-Request-Id": "find-me"})
    lines = [json.loads(line) for line in small.logged('"find-me"').splitlines()]
    [line] = [line for line in lines if line.get("request_id") == "find-me"]
    assert line["status"] == 200 and line["tokens"] == 3 and line["outcome"] == "ok" and line["ms"] > 0
    assert line["prompts"] == ["say this aloud"], "asked for by --log-prompts"


def test_both_workers_serve_and_count_together(small: Server) -> None:
    before = small.idle()
    for seed in range(8):
        assert small.post("/v1/completions", {"prompt": IDS, "seed": seed}, **auth("first-key"))[0] == 200
    name = 'verifypd:http_requests_total{path="/v1/completions",status="200"}'
    after, gaps = small.idle(), "verifypd:inter_token_latency_seconds_count"
    assert after[name] == before.get(name, 0.0) + 8
    assert after[gaps] >= before.get(gaps, 0.0) + 8 * 3, "16 tokens, at most four in a step"


def test_counters_of_two_workers_are_the_servers_own(small: Server, foreign: Path) -> None:
    check_counters(small, foreign, **auth("first-key"))


def test_the_models_sampling_is_that_of_its_server(small: Server) -> None:
    """The model asks for one token out of one."""
    greedy, drawn = greedy_and_drawn(small, **auth("first-key"))
    assert drawn == [greedy] * 3 and '"top_k": 1' in small.log.read_text()


def test_loopback_unless_told_otherwise(small: Server) -> None:
    assert small.address.startswith("http://127.0.0.1:")


def test_a_drain_that_takes_too_long(small: Server) -> None:
    """Whoever still runs is told so; the server ends all the same. After small and large bodies nothing is leaked."""
    for prompt in ("x", "x" * 50_000):
        small.post("/v1/completions", {"prompt": prompt}, **auth("first-key"))
    ask = {**LONG, "max_tokens": 380}
    running = [Stream(small, ask, key=("first-key", "second-key")[i % 2]).start() for i in range(5)]
    for stream in running[:2]:
        stream.begun()
    small.terminate()
    assert small.wait(30) == 0
    cut = 0
    for stream in running:
        stream.join()
        if stream.finish != "length":
            assert stream.error is not None and stream.error["code"] == "draining"
            cut += 1
    assert cut
    log = small.stop()
    assert "leaked" not in log and "Warning" not in log, log[-2000:]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(folders: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        process = launch(folders[0], "ngram", log, **{"tls-cert": cert, "tls-key": key, "port": port})
    trust = ssl.create_default_context(cafile=str(cert))
    until = time.monotonic() + 60
    try:
        while True:  # the engine may still be loading: the connection is all that is looked at
            try:
                with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", context=trust, timeout=10) as answer:
                    assert answer.status == 200
                    break
            except urllib.error.URLError as error:
                if not isinstance(error.reason, (ConnectionRefusedError, TimeoutError)) or time.monotonic() > until:
                    raise
                time.sleep(0.05)
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    finally:
        process.terminate()
        process.communicate(timeout=60)


# -- the rules themselves ----------------------------------------------------------------------------------------------


def test_admission_rules() -> None:
    rules = Admission(max_queue=4, max_per_key=2, slots=2)
    idle = Load(waiting=0, free=2, rate=0.0)
    assert rules.refuse(6, 0, idle, None, 0.0) is None
    refusal = rules.refuse(7, 0, idle, None, 0.0)
    assert refusal is not None and refusal.status == 400
    busy = Load(waiting=4, free=0, rate=0.5)
    refusal = rules.refuse(1, 0, busy, None, 0.0)
    assert refusal is not None and (refusal.status, refusal.code, refusal.retry_after) == (429, "queue_full", 8)
    rules.enter(0)
    rules.enter(0)
    refusal = rules.refuse(1, 0, idle, None, 0.0)
    assert refusal is not None and refusal.code == "too_many_streams"
    assert rules.refuse(1, 1, idle, None, 0.0) is None
    rules.leave(0)
    assert rules.refuse(1, 0, idle, None, 0.0) is None
    half = Load(waiting=2, free=0, rate=1.0)
    refusal = rules.refuse(1, 1, half, 1500.0, 0.0)
    assert refusal is not None and refusal.code == "deadline_unreachable"
    assert rules.refuse(1, 1, half, 2500.0, 0.0) is None


def test_leave_rate() -> None:
    rate = LeaveRate(window=10.0)
    assert rate.rate(0.0) == 0.0
    for second in range(5):
        rate.add(float(second))
    assert rate.rate(5.0) == pytest.approx(1.0)
    assert rate.rate(100.0) == 0.0


def test_back_off_doubles_up_to_a_limit() -> None:
    delays = [back_off(crash) for crash in range(1, 12)]
    assert delays[:3] == [0.25, 0.5, 1.0] and max(delays) == 30.0 and delays == sorted(delays)
