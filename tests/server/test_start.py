"""Starting the server wrongly: one line that says what to do, exit status 2, and nothing left running."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import zmq

from tests.server.serving import ROOT, children, launch
from verifypd.config import EngineConfig
from verifypd.errors import ConfigError, EngineError
from verifypd.server import worker
from verifypd.server.config import ServerConfig
from verifypd.server.engine_process import make_engine
from verifypd.server.lifeline import BAD_SETTINGS
from verifypd.server.messages import Addresses, inbox
from verifypd.server.supervisor import Supervisor, check_tls, listen, runtime_folder, warn_if_open

pytestmark = pytest.mark.xdist_group("server-faults")


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verifypd", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)


def test_a_port_that_is_taken(folders: tuple[Path, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = serve("--model", str(folders[0]), "--draft", "ngram", "--port", str(port))
    assert found.returncode == 2 and f"127.0.0.1:{port}" in found.stderr and "--port" in found.stderr
    assert "Traceback" not in found.stderr


def test_interrupted_while_its_processes_import(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal, whatever each is doing."""
    with (tmp_path / "log").open("w") as log:
        process = launch(folders[0], "ngram", log)
        while len(processes := children(process.pid)) < 3:  # multiprocessing's own, the engine, an API worker
            assert process.poll() is None
        for pid in (*processes, process.pid):
            os.kill(pid, signal.SIGINT)
        _, status = process.communicate(timeout=60), process.returncode
    told = (tmp_path / "log").read_text()
    assert status == 0 and "died" not in told and "Traceback" not in told


def test_sockets_have_room_below_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / ("x" * 100)
    root.mkdir()
    for chosen, taken in ((root, False), (Path("/tmp"), True)):
        monkeypatch.setattr(tempfile, "tempdir", str(chosen))
        folder = runtime_folder()
        try:
            assert Path(folder).is_relative_to(chosen) == taken and Path(folder).stat().st_mode & 0o777 == 0o700
            with zmq.Context() as context:
                inbox(context, Addresses(folder).engine(1_000_000)).close()
        finally:
            shutil.rmtree(folder)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*choose another --host$"):
        listen(ServerConfig(host=host))


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": ("k",)}, False), ({"host": "127.0.0.1"}, False)],
)
def test_an_open_server_says_so(settings: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(port=0, **settings)
    with listen(config) as listener:
        warn_if_open(config, listener)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert not warned or "it has no --api-key" in caplog.text


def test_origins() -> None:
    origins = ("*", "null", "https://example.org", "http://localhost:3000", "http://[::1]:8080", "app://here")
    assert ServerConfig(cors_origin=origins).cors_origin == origins


def test_settings_the_engine_refuses(folders: tuple[Path, Path]) -> None:
    found = serve("--model", str(folders[0]), "--draft", "ngram", "--port", "0", "--max-model-len", "100000")
    assert found.returncode == 2 and "--max-model-len" in found.stderr and "Traceback" not in found.stderr
    assert "serves" not in found.stdout


def broken(folders: tuple[Path, Path], tmp_path: Path, name: str, text: str) -> Path:
    """The verifier with another text in one of its files."""
    folder = tmp_path / "model"
    shutil.copytree(folders[0], folder)
    (folder / name).write_text(text)
    return folder


def test_a_tokenizer_that_cannot_be_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = broken(folders, tmp_path, "tokenizer.json", "{")
    found = serve("--model", str(folder), "--draft", "ngram", "--port", "0")
    assert found.returncode == 2 and "cannot be read" in found.stderr and str(folder) in found.stderr
    assert "Traceback" not in found.stderr and "restarts" not in found.stderr


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("chat_template.jinja", "{% for %}", "the chat template is broken"),
        ("generation_config.json", '{"top_p": 7}', "start with --generation-config none"),
    ],
)
def test_a_worker_gives_up_where_files_will_never_do(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    text: str,
    why: str,
) -> None:
    """One line, and the status that tells the supervisor not to start it again."""
    folder = broken(folders, tmp_path, name, text)
    for each in ("die_with", "obey_parent", "set_up_logs"):  # they are about a process of its own
        monkeypatch.setattr(worker, each, lambda *_: None)
    monkeypatch.setattr(worker, "Worker", lambda *_: SimpleNamespace(start=None, stop=None))  # its sockets
    with socket.socket() as listener, pytest.raises(SystemExit) as ended:
        worker.run_worker(
            0, EngineConfig(), ServerConfig(), Addresses(str(tmp_path)), listener, str(folder), os.getpid()
        )
    assert ended.value.code == BAD_SETTINGS
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert why in line and str(folder) in line and "\n" not in line


def test_a_certificate_that_is_none(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    flags = ("--tls-cert", str(tmp_path / "key.pem"), "--tls-key", str(tmp_path / "key.pem"))
    found = serve("--model", str(folders[0]), "--draft", "ngram", "--port", "0", *flags)
    assert found.returncode == 2 and "--tls-cert" in found.stderr and "Traceback" not in found.stderr
    with pytest.raises(ConfigError, match=r"--tls-cert.*missing"):
        check_tls(ServerConfig(tls_cert=str(tmp_path / "missing.pem"), tls_key=str(tmp_path / "key.pem")))


def unlucky(config: EngineConfig) -> NoReturn:
    raise EngineError("rank 1 has ended with status -9")


def hopeless(config: EngineConfig) -> NoReturn:
    raise ConfigError("there is no such model")


def test_only_what_will_never_do_is_not_tried_again() -> None:
    with pytest.raises(EngineError):
        make_engine(EngineConfig(), ServerConfig(engine_factory="tests.server.test_start:unlucky"))
    with pytest.raises(SystemExit) as ended:
        make_engine(EngineConfig(), ServerConfig(engine_factory="tests.server.test_start:hopeless"))
    assert ended.value.code == BAD_SETTINGS


@pytest.mark.parametrize(
    ("code", "epoch", "crashes", "status", "why"),
    [
        (-9, 1, 0, 1, "its first start failed"),
        (BAD_SETTINGS, 1, 0, 2, "these settings will never do"),
        (-9, 7, 5, 1, "--max-restarts 5 are used up"),
        (-9, 7, 4, 0, None),
    ],
)
def test_a_server_that_gives_up_says_why(
    code: int, epoch: int, crashes: int, status: int, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(EngineConfig(), ServerConfig(), None)
    supervisor.to_workers, supervisor.epoch, supervisor.crashes = [], epoch, crashes
    with caplog.at_level("INFO"):
        supervisor._engine_died(cast(BaseProcess, SimpleNamespace(join=lambda: None, exitcode=code)))
    told = {record.getMessage(): record.__dict__["fields"] for record in caplog.records}
    assert supervisor.status == status
    assert told.get("the engine is not started again", {}).get("because") == why
    assert ("engine restarts" in told) == (why is None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": ""}, "--host is empty"),
        ({"port": 70000}, "--port"),
        ({"api_workers": 0}, "--api-workers"),
        ({"drain_timeout": -1}, "--drain-timeout -1 must be 0 or more"),
        ({"step_timeout": 0}, "--step-timeout 0 must be 0.1 or more"),
        ({"start_timeout": 0}, "--start-timeout 0 must be 0.1 or more"),
        ({"served_model_name": ""}, "--served-model-name is empty"),
        ({"cors_origin": ("https://a.example", "example.org")}, "--cors-origin 'example.org' is no origin"),
        ({"cors_origin": ("https://example.org/",)}, "without a path or a slash"),
        ({"cors_origin": ("https://[",)}, "--cors-origin"),
        ({"cors_origin": ("https://*.example.org",)}, "is no origin"),
        ({"cors_origin": ("https://Example.org",)}, "is no origin"),
        ({"cors_origin": ("https://u@example.org",)}, "is no origin"),
        ({"cors_origin": ("https://a b",)}, "is no origin"),
        ({"cors_origin": ("https://example.org:443",)}, "is no origin"),
        ({"cors_origin": ("https://example.org:99999",)}, "is no origin"),
        ({"tls_cert": "x"}, "--tls-key"),
        ({"api_key": ("",)}, "--api-key"),
        ({"api_key": ("good", "no client can send it ")}, "--api-key"),
        ({"admin_key": " nor this"}, "--admin-key"),
        ({"admin_key": ""}, "--admin-key"),
        ({"admin_key": "kéy"}, "--admin-key"),
        ({"admin_key": "same", "api_key": ("same",)}, "--admin-key"),
        ({"max_body": "lots"}, "--max-body"),
        ({"log_format": "xml"}, "--log-format"),
        ({"engine_factory": "nothing"}, "--engine-factory"),
        ({"colour": 1}, "colour"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig.from_kwargs(**settings)
