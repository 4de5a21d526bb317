"""`verifypd deploy --local` up to where Ray starts. What it deploys is in test_ray."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import tiny
from verifypd.cli import deploy, main
from verifypd.errors import EngineError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, when it is imported


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray is started with; Ctrl-C comes before it has."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        calls.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(deploy, "QUICKER", {})
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return calls


def test_a_model_that_is_not_there_is_refused_before_ray_starts(
    begun: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "--local", "--model", "nosuch", "--port", "0"]) == 2
    assert "no model 'nosuch'" in capsys.readouterr().err and not begun


def test_a_port_that_is_taken_is_refused_before_ray_starts(
    begun: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["deploy", "--local", "--model", "nosuch", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err and not begun


def test_local_is_a_ray_of_its_own_with_room_for_every_replica(begun: list[dict[str, Any]], tmp_path: Path) -> None:
    """Not the one that $RAY_ADDRESS names, or that was started here before; Ctrl-C while it starts ends the command."""
    wanted = ["--port", "0", "--replicas", "129", "--cpus-per-replica", "0.5"]
    assert main(["deploy", "--local", "--model", str(tiny("llama", tmp_path)), *wanted]) == 0
    assert begun[0]["address"] == "local" and begun[0]["num_cpus"] >= 65


def test_replicas_that_do_not_start_are_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    from verifypd.cluster import application

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("Deploying application verifypd failed: Failed to update the deployments ['Engine'].")

    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(application, "build", lambda _: None)
    chosen = deploy.settings(_parsed("deploy", "--model", "m"))
    with pytest.raises(EngineError, match=r"verifypd failed: .*\['Engine'\]: Ray's log says why"):
        deploy.deploy(chosen)


def _parsed(*arguments: str) -> Any:
    from verifypd.cli import build_parser

    return build_parser().parse_args(arguments)
