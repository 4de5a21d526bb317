"""benchmarks/serve_beside_vllm.py: two real servers on a CPU, and the command line that vLLM's would get."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.scripts import load

ROOT = Path(__file__).resolve().parents[2]
beside = load("serve_beside_vllm")


@pytest.mark.slow
def test_servers_are_started_driven_and_stopped(tmp_path: Path) -> None:
    traffic = ["--quick", "--source", "fixed:12x8", "--concurrency", "1", "--seeds", "1", "--no-control", "--no-png"]
    arms = ["--arms", "ours:plain", "ours:head:controller=fixed", "--tiny", "--batch", "4"]
    small, other = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "small.json")], [*traffic, "--seed", "2"]
    assert beside.main([*arms, *small, "--", *traffic, "--", *other]) == 0
    first, second = (json.loads((tmp_path / f"small-{n}.json").read_text()) for n in (1, 2))
    found = first["scenarios"]["fixed 12x8 closed 1"]["arms"]
    assert set(found) == {"ours-plain", "ours-head-controller-fixed"}
    assert found["ours-head-controller-fixed"]["drafts"]["spans"] > 0
    assert all(arm["figures"]["failed"] == 0 and arm["figures"]["tpot_ms_p50"] > 0 for arm in found.values())
    assert (first["seeds"], second["seeds"]) == ([0], [2])
    assert first["note"] == second["note"] == "random weights (tiny models), drafts accepted by chance (α = 0.8)"
    launched = {name: arm["about"]["launch"] for name, arm in second["arms"].items()}
    assert all(text.startswith("python -m verifypd serve --") for text in launched.values())
    assert "--draft none" in launched["ours-plain"]
    assert "--controller fixed" in launched["ours-head-controller-fixed"]


@pytest.mark.slow
def test_a_time_limit_ends_the_servers_too(tmp_path: Path) -> None:
    """They are in sessions of their own: no signal but this script's reaches them."""

    def running() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if str(tmp_path / "out" / "models").encode() in path.read_bytes():
                    return True
        return False

    arms = ["--arms", "ours:plain", "--tiny", "--batch", "4", "--out", str(tmp_path / "out")]
    command = [sys.executable, str(ROOT / "benchmarks" / "serve_beside_vllm.py"), *arms, "--", "--quick"]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path) as script:
        until = time.monotonic() + 120
        while not running() and time.monotonic() < until:
            time.sleep(0.1)
        assert running()
        script.terminate()
        assert script.wait(60) == 143
    assert not running()


def test_traffic_that_cannot_be_is_refused_before_servers_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--arms", "ours:plain", "--tiny", "--out", str(tmp_path / "out"), "--", "--source", "fixed:12:8"]
    assert beside.main(given) == 2
    assert "give PROMPTxOUTPUT" in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_a_server_says_how_it_was_started(tmp_path: Path) -> None:
    config = json.dumps({"a": str(tmp_path / "out" / "b")})
    command = [sys.executable, "-c", "", "--model", str(Path.cwd() / "out" / "m"), "--config", config]
    server = beside.Server("ours", command, {}, tmp_path / "log", 1, tmp_path / "out")
    server.stop()
    assert server.about == """ours=python -c '' --model out/m --config '{"a": "b"}'"""


@pytest.mark.parametrize(
    ("arms", "tiny", "said"),
    [
        (["ours:plain", "vllm:plain"], False, "random weights (llama-2-7b)"),
        (["ours:head", "vllm:eagle:k=2"], False, "random weights (llama-2-7b), drafts accepted by chance (α = 0.8)"),
        (
            ["ours:head", "vllm:eagle:alpha=0.6"],
            True,
            "random weights (tiny models), drafts accepted by chance (α = 0.6, 0.8)",
        ),
    ],
)
def test_a_report_says_that_weights_are_random(arms: list[str], tiny: bool, said: str) -> None:
    setup = beside.Setup("llama-2-7b", 0.8, 4, 500, 1 << 25, tiny)
    assert beside.note([beside.parse(text, "eagle") for text in arms], setup) == said


def test_settings_become_flags() -> None:
    given = {"model": "m", "enable_prefix_caching": False, "tiny": True, "draft": None, "config": {"a": [1]}, "seed": 0}
    expected = ["--model", "m", "--no-enable-prefix-caching", "--tiny", "--config", '{"a": [1]}', "--seed", "0"]
    assert beside.flags(given) == expected


def test_a_folder_without_vllm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        beside.arguments(["--arms", "vllm:eagle", "--out", str(tmp_path), "--peer", str(tmp_path)])
    assert "there is no folder site/" in capsys.readouterr().err
