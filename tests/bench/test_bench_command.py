"""`verifypd bench` as a user runs it: our real server over HTTP, engines in this process, interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from tests.server.serving import ROOT, Server
from verifypd import cli
from verifypd.bench.campaign import Folder
from verifypd.bench.workload import read
from verifypd.cli.campaign import command_line

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bench-server")]
TRAFFIC = ["--source", "fixed:12x6", "--vocab", "300", "--seeds", "2", "--num-requests", "6"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny verifier and a draft that agrees with it now and then."""
    base = tmp_path_factory.mktemp("pair")
    verifier = tiny("llama", base / "verifier", max_position_embeddings=512)
    return verifier, noisy_copy(verifier, base / "draft", 0.15)


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our server, as a process of its own."""
    with Server(pair[0], str(pair[1]), tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def bench(*arguments: str | Path) -> int:
    return cli.main(["bench", *map(str, arguments), "--no-png"])


def test_servers_over_http(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One server under two names, and twice as the control: all requests answered, drafts told, no difference."""
    urls = [f"one={server.address}", f"two={server.base}"]
    fields = ["--field", "two:slo_ttft=200", "--field", "top_p=0.5"]
    loads = ["--concurrency", "2", "--rate", "40", "--seeds", "3"]
    about = ["--about", "two=python -m verifypd serve --port=8000 <tiny>", "--note", "TINY, and random"]
    assert bench("serve", *urls, "--out", tmp_path, *TRAFFIC, *loads, *fields, *about) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["complete"] and list(found["scenarios"]) == ["fixed 12x6 closed 2", "fixed 12x6 poisson 40/s"]
    for scenario in found["scenarios"].values():
        assert set(scenario["arms"]) == {"one", "two", "one again"}
        for own in scenario["arms"].values():
            f = own["figures"]
            assert (f["requests"], f["unfinished"], f["failed"]) == (18, 0, 0)
            assert f["output_tokens"] == 18 * 6 and f["prompt_tokens"] >= 18 * 12
            assert f["tok_s"] == pytest.approx(f["tok_s_original"])
            assert own["drafts"]["spans"] > 0 and len(own["drafts"]["by_place"]) == 3
            assert {"compiled", "captured", "collected", "collected_ms"} <= set(own["pauses"])
            assert own["pauses"]["captured"] == 0 <= own["pauses"]["collected_ms"] < 1e3 * f["seconds"]
    assert found["note"] == "TINY, and random"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure") == page.count("[TINY, and random]") > 4, "every picture says it"
    assert page.count("(TINY, and random)") == 2 and "TINY" in (tmp_path / "summary.md").read_text(), "and every table"
    itself = [each for s in found["scenarios"].values() for each in s["itself"].values()]
    same = sum(each["verdict"] == "no difference" for each in itself)
    for s in found["scenarios"].values():  # spans may come in one piece: then there is no time per token to compare
        assert set(s["itself"]) & set(s["compared"]["two"]) >= {"tok_s", "e2e_ms_mean", "ttft_ms_p95"}
    assert found["sittings"][0]["files"] and found["sittings"][0]["commit"]
    assert found["arms"]["one"]["about"]["model"] == "tiny"
    assert found["arms"]["one"]["spec"]["fields"] == {"temperature": 0.0, "ignore_eos": True, "top_p": 0.5}
    assert found["arms"]["two"]["spec"]["fields"]["slo_ttft"] == 200
    assert found["arms"]["two"]["about"]["launch"] == "python -m verifypd serve --port=8000 <tiny>"
    assert "launch" not in found["arms"]["one"]["about"]
    assert (
        "<p>two: <code>python -m verifypd serve --port=8000 &lt;tiny&gt;</code></p>"
        in (tmp_path / "report.html").read_text()
    )
    assert f"one ran twice (A/A): {same} of {len(itself)} comparisons" in capsys.readouterr().out


def test_conversations_and_a_workload_file(server: Server, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "Hi"}], "output_tokens": 4}\n{"prompt": "Once"}\n')
    out = tmp_path / "a"
    common = ["--seeds", "1", "--no-control", "--output-tokens", "4"]
    assert (
        bench(
            "serve",
            server.address,
            "--out",
            out,
            "--source",
            f"prompts:{lines}",
            "--at-once",
            "--num-requests",
            "4",
            *common,
        )
        == 0
    )
    [kept] = (out / "workloads").glob("*.json")
    assert {a.messages is None for a in read(kept).arrivals} == {True, False}
    again = tmp_path / "b"
    assert bench("serve", server.address, "--out", again, "--workload", kept, "--seeds", "1", "--no-control") == 0
    [first], [second] = (Folder(each).cells() for each in (out, again))
    assert first.workload == second.workload
    for cell in (first, second):
        assert [r.tokens for r in cell.outcome.records] == [4] * 4 and not any(r.error for r in cell.outcome.records)


def test_requests_that_are_refused_are_shown(server: Server, tmp_path: Path) -> None:
    """Half of the prompts are longer than the model takes: they are counted and named, and the run goes on."""
    work = tmp_path / "w.json"
    requests = [{"at": 0, "prompt_tokens": 12 if i % 2 else 450, "output_tokens": 4} for i in range(6)]
    work.write_text(json.dumps({"name": "half", "clients": 2, "requests": requests}))
    assert (
        bench(
            "serve",
            server.address,
            "--out",
            tmp_path / "o",
            "--workload",
            work,
            "--vocab",
            "300",
            "--no-control",
            "--seeds",
            "1",
        )
        == 0
    )
    [own] = json.loads((tmp_path / "o" / "results.json").read_text())["scenarios"]["half"]["arms"].values()
    assert (own["figures"]["failed"], own["figures"]["unfinished"], own["figures"]["requests"]) == (3, 0, 6)
    assert any("HTTP 400" in error for error in own["errors"])
    assert "3 failed" in (tmp_path / "o" / "report.html").read_text()


def test_an_interrupted_run_is_a_report_and_goes_on(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "bench",
        "serve",
        f"one={server.address}",
        "--out",
        str(out),
        *TRAFFIC,
        "--concurrency",
        "1",
        "--rate",
        "8",
        "--no-png",
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "verifypd", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    until = time.monotonic() + 60
    while len(list((out / "cells").glob("*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    found = json.loads((out / "results.json").read_text())
    assert not found["complete"] and 2 <= found["cells"]["run"] < found["cells"]["planned"] == 8
    assert "interrupted" in text and "Partial" in (out / "report.html").read_text()
    assert cli.main(arguments) == 0
    found = json.loads((out / "results.json").read_text())
    assert found["complete"] and len(found["sittings"]) == 2


def test_engines_in_this_process(pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = [
        "--model",
        pair[0],
        "--draft",
        pair[1],
        "--dtype",
        "float32",
        "--kv-memory",
        "32MB",
        "--max-model-len",
        "400",
    ]
    arms = ["--arm", "plain", "--arm", "unified:controller=fixed,max_draft=3"]
    out = tmp_path / "out"
    assert bench("run", *arms, *engine, "--out", out, *TRAFFIC, "--concurrency", "2", "--no-control") == 0
    found = json.loads((out / "results.json").read_text())
    [scenario] = found["scenarios"].values()
    plain, drafting = scenario["arms"].values()
    assert plain["drafts"] is None and drafting["drafts"]["spans"] > 0 and len(drafting["drafts"]["by_place"]) == 3
    assert drafting["drafts"]["drafted"][0] == drafting["drafts"]["spans"], "it says how many drafts had a place"
    assert plain["figures"]["output_tokens"] == drafting["figures"]["output_tokens"] == 72
    assert set(scenario["compared"]) == {"unified:controller=fixed,max_draft=3"}
    assert str(pair[0].parent) not in (out / "results.json").read_text(), "a report names no one's folders"
    traffic = ["--quick", "--vocab", "300", "--scale", "64", "--rate", "8", "--duration", "0.8", "--seeds", "2"]
    assert bench("mixed", "--arm", "plain", *engine, "--out", tmp_path / "m", *traffic) == 0
    found = json.loads((tmp_path / "m" / "results.json").read_text())
    assert found["complete"] and list(found["scenarios"]) == ["mixed 8/s, lengths / 64"]
    assert found["note"] == "scaled: lengths / 64; requests arrive for 0.8 s"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "http://127.0.0.1:1", "--server-wait", "0"], "does not answer"),
        (["serve", "ftp://x"], "no URL"),
        (["serve", "h:1", "--source", "nothing"], "not known"),
        (["serve", "http://[::1"], "no URL"),
        (["serve", "h:1", "--concurrency", "0"], "--concurrency"),
        (["serve", "h:1", "--concurrency", "1.5"], "whole numbers"),
        (["serve", "h:1", "--concurrency", "inf"], "whole numbers"),
        (["serve", "h:1", "--concurrency", ","], "--concurrency"),
        (["serve", "h:1", "--rate", "inf"], "--rate"),
        (["serve", "h:1", "--seeds", "0"], "--seeds"),
        (["serve", "h:1", "--duration", "-1"], "--duration"),
        (["serve", "h:1", "--num-requests", "0"], "--num-requests"),
        (["serve", "a=h:1", "a=h:2"], "the same name"),
        (["serve", "h:1", "--reference", "x"], "none of the arms"),
        (["serve", "a=h:1", "--field", "b:slo_ttft=9"], "with an arm of a"),
        (["serve", "a=h:1", "--field", "slo_ttft"], "NAME=VALUE"),
        (["serve", "a=h:1", "--about", "b=verifypd serve"], "with an arm of a"),
        (["serve", "a=h:1", "--about", "a"], "NAME=TEXT"),
        (["run", "--arm", "fast"], "no architecture"),
        (["run", "--arm", "plain:colour=red"], "unknown setting"),
        (["run", "--arch", "pd"], "--arm ARCH"),
        (["mixed", "h:1", "--arm", "plain"], "URLs or --arm"),
        (["mixed", "h:1", "--concurrency", "8"], "comes at a rate"),
        (["mixed", "--pair", "a:b", "--num-requests", "8"], "leave out URLs"),
        (["mixed", "h:1", "--rate", "0.001", "--duration", "0.1"], "no request arrives"),
        (["mixed", "h:1", "--model", "x", "--batch-size", "2"], "leave out --model, --batch-size"),
        (["mixed", "--arm", "plain", "--api-key", "x", "--about", "a=b"], "leave out --api-key, --about"),
        (["mixed", "h:1", "--workload", "x", "--rate", "2", "--scale", "3"], "leave out --rate, --scale"),
        (["serve", "h:1", "--workload", "x", "--source", "chat", "--quick"], "leave out --source, --quick"),
        (["serve", "h:1", "--cv", "2"], "leave out --cv"),
        (["serve", "h:1", "--max-concurrent", "2"], "closed loop"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments, "--out", tmp_path) == 2
    assert words in capsys.readouterr().err


def test_a_plan_is_said_and_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server answers there, and none is asked."""
    out = tmp_path / "out"
    assert bench("serve", "a=http://127.0.0.1:9", *TRAFFIC, "--concurrency", "1,2", "--out", out, "--plan") == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8 and said[0].endswith("seed 0, a: 6 requests, 1 at once"), said  # two seeds, each arm twice
    assert not out.exists()


def test_a_report_keeps_secrets(tmp_path: Path) -> None:
    given: list[Any] = ["bench", "serve", "h:1", "--api-key", "k1", "--hf-token=k2", "--out", str(tmp_path / "x")]
    assert command_line(given) == "verifypd bench serve h:1 --api-key HIDDEN --hf-token=HIDDEN --out x"
