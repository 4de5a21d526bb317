"""The OpenAPI document against the server: what fits it or nearly does is answered as declared, never with 5xx."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import Server

pytestmark = pytest.mark.xdist_group("server")

CASES = 2000  # at least
EXAMPLES = os.environ.get("VERIFYPD_SCHEMA_EXAMPLES", "4")  # by chance, an operation
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance"


def test_every_operation_declares_its_errors(server: Server) -> None:
    document = server.get("/openapi.json")[1]
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert {"200", "400", "401", "404", "408", "413", "429", "500", "503"} <= set(
            document["paths"][path]["post"]["responses"]
        )
        assert "422" not in document["paths"][path]["post"]["responses"]
    assert set(document["paths"]["/metrics"]) == {"get", "head"}
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]


@pytest.mark.slow
def test_schemathesis_finds_no_5xx_and_no_undeclared_status(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Most cases come from walking the document, field by field; the rest is chance, always the same.

    The engine is the real one with a short context: most bodies say nothing of length, and run to its end.
    """
    with Server(folders[0], str(folders[1]), tmp_path / "server.log", **{"max-model-len": 64}) as server:
        walk(server, tmp_path)
        server.idle()


def walk(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.address}/openapi.json", "--checks", CHECKS]
    command += ["--max-examples", EXAMPLES, "--phases", "coverage,fuzzing", "--mode", "all"]
    command += ["--request-timeout", "60", "--generation-database", "none", "--seed", "1", "--no-color"]
    command += ["--suppress-health-check", "all"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    tail = found.stdout[-4000:]
    assert found.returncode == 0, tail
    counts = [int(count) for count in re.findall(r"(\d+) generated", found.stdout)]
    assert counts and sum(counts) >= CASES, tail
