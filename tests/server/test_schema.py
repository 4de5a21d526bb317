"""The OpenAPI document against the server: what fits it or nearly does is answered as declared, never with 5xx."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.server.serving import Server
from verifypd.server.responses import ResponsesBody
from verifypd.server.schema import Body, ChatBody, CompletionBody, DetokenizeBody

pytestmark = pytest.mark.xdist_group("server")

CASES = 2000  # at least
EXAMPLES = os.environ.get("VERIFYPD_SCHEMA_EXAMPLES", "4")  # by chance, an operation
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance"


def test_every_operation_declares_its_errors(server: Server) -> None:
    document = server.get("/openapi.json")[1]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert {"200", "400", "401", "404", "408", "413", "429", "431", "500", "503"} <= set(
            document["paths"][path]["post"]["responses"]
        )
        assert "422" not in document["paths"][path]["post"]["responses"]
    assert set(document["paths"]["/metrics"]) == {"get", "head"}
    assert all("head" in methods for methods in document["paths"].values() if "get" in methods)
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]


MANY = 20_000
KEYS = {f"key{i}": "x" for i in range(MANY)}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [0.5] * MANY}),
        (CompletionBody, {"prompt": [[0.5] * MANY, [0.5] * MANY]}),
        *((CompletionBody, {"prompt": "x", name: [0.5] * MANY}) for name in ("stop", "bad_words", "guided_choice")),
        *((CompletionBody, {"prompt": "x", name: ["x"] * MANY}) for name in ("allowed_token_ids", "stop_token_ids")),
        (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": [0.5] * MANY}}),
        (CompletionBody, {"prompt": "x", "logit_bias": KEYS}),
        (CompletionBody, {"prompt": "x", **KEYS}),
        (CompletionBody, {"prompt": "x", "stream_options": KEYS}),
        (ChatBody, {"messages": [{"role": "x"}] * MANY}),
        (ChatBody, {"messages": [{**USER, "content": [{"type": 1}] * MANY}]}),
        (ChatBody, {"messages": [{**USER, "tool_calls": [{"id": "x"}] * MANY}]}),
        (ChatBody, {"messages": [{**USER, **KEYS}]}),
        (ChatBody, {"messages": [USER], "tools": [{"type": "function"}] * MANY}),
        (ResponsesBody, {"input": [{"role": 3}] * MANY}),
        (ResponsesBody, {"input": [{"role": "user", "content": [{"type": 1}] * MANY}]}),
        (ResponsesBody, {"input": "x", "tools": [{"type": "function"}] * MANY}),
        (ResponsesBody, {"input": "x", "include": [1] * MANY}),
        (DetokenizeBody, {"tokens": [0.5] * MANY}),
    ],
)
def test_a_large_wrong_body_is_left_at_its_first_error(kind: type[Body], fields: dict[str, Any]) -> None:
    """One for each kind a field may be; not one for each element."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate(fields)
    assert error.value.error_count() <= 4


@pytest.mark.slow
def test_schemathesis_finds_no_5xx_and_no_undeclared_status(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Most cases come from walking the document, field by field; the rest is chance, always the same.

    The engine is the real one with a short context: most bodies say nothing of length, and run to its end.
    """
    with Server(folders[0], str(folders[1]), tmp_path / "server.log", **{"max-model-len": 32}) as server:
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
    answered = server.metrics()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        served = answered.get(f'verifypd:http_requests_total{{path="{path}",status="200"}}', 0)
        assert served > 30, f"{path}: nearly all was refused at the door"
