"""Starting the server wrongly: one line that says what to do, exit status 2, and nothing left running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.server.serving import ROOT
from verifypd.config import EngineConfig
from verifypd.errors import ConfigError, EngineError
from verifypd.server.config import ServerConfig
from verifypd.server.engine_process import BAD_SETTINGS, make_engine
from verifypd.server.supervisor import check_tls

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


def test_settings_the_engine_refuses(folders: tuple[Path, Path]) -> None:
    found = serve("--model", str(folders[0]), "--draft", "ngram", "--port", "0", "--max-model-len", "100000")
    assert found.returncode == 2 and "--max-model-len" in found.stderr and "Traceback" not in found.stderr
    assert "serves" not in found.stdout


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
    ("settings", "words"),
    [
        ({"port": 70000}, "--port"),
        ({"api_workers": 0}, "--api-workers"),
        ({"tls_cert": "x"}, "--tls-key"),
        ({"api_key": ("",)}, "--api-key"),
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
