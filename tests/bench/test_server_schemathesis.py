"""What the record takes from schemathesis's reports, without a server and without schemathesis."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.bench.scripts import load

REPORT: dict[str, Any] = {
    "stop_reason": "completed",
    "running_time": 12.4,
    "operations": {"total": 14, "selected": 14, "tested": 13},
    "test_cases": {"generated": 6, "with_failures": 0, "errored": 0},
}


def scenario(label: str, *statuses: int | None) -> str:
    """An operation's end in one phase, as a line of its events."""
    answers = [{"status_code": status} if status else None for status in statuses]
    interactions = {str(i): {"request": {}, "response": answer} for i, answer in enumerate(answers)}
    return json.dumps({"ScenarioFinished": {"recorder": {"label": label, "interactions": interactions}}}) + "\n"


EVENTS = [
    json.dumps({"Initialize": {"seed": 1}}) + "\n",
    json.dumps({"ScenarioFinished": {"status": "skip", "recorder": {"label": "GET /health"}}}) + "\n",
    scenario("POST /v1/completions", 200, 400),
    scenario("POST /v1/completions", 200, 429),
    scenario("GET /v1/models/{id}", 404, None),
    "\n",
]


@pytest.fixture(scope="module")
def script() -> Any:
    return load("server_schemathesis")


def test_answers_are_counted_by_operation_and_status(script: Any) -> None:
    assert script.answers(EVENTS) == {
        ("POST /v1/completions", "200"): 2,
        ("POST /v1/completions", "400"): 1,
        ("POST /v1/completions", "429"): 1,
        ("GET /v1/models/{id}", "404"): 1,
        ("GET /v1/models/{id}", "none"): 1,
    }


def test_the_figures_of_a_run(script: Any) -> None:
    found = script.figures(REPORT, script.answers([*EVENTS, scenario("GET /ready", 503)]))
    assert found == {
        "operations": 14,
        "operations_tested": 13,
        "stopped_by": "completed",
        "seconds": 12,
        "cases": 6,
        "passed": 6,
        "answers_by_status": {"200": 2, "400": 1, "404": 1, "429": 1, "503": 1, "none": 1},
        "answers_of_5xx": 1,
        "answers_200_of_generation": {"/v1/completions": 2, "/v1/chat/completions": 0, "/v1/responses": 0},
    }


def test_a_report_without_requests_is_refused(script: Any) -> None:
    none = {**REPORT, "test_cases": {"generated": 0, "with_failures": 0, "errored": 0}}
    for report, counts in ((none, script.answers(EVENTS)), (REPORT, Counter())):
        with pytest.raises(script.ReportError, match="no requests"):
            script.figures(report, counts)


class Served:
    """In place of a server."""

    port = 1234

    def __init__(self, *flags: str) -> None:
        assert "verifypd.testing.instant:build" in flags

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def run(script: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In place of schemathesis: writes the report this holds, which may be none."""
    given: dict[str, Any] = {"report": REPORT}

    def schemathesis(command: list[str], **_: Any) -> None:
        assert "http://127.0.0.1:1234/openapi.json" in command
        if given["report"]:
            Path(command[command.index("--report-json-path") + 1]).write_text(json.dumps(given["report"]))
            Path(command[command.index("--report-ndjson-path") + 1]).write_text("".join(EVENTS))

    monkeypatch.setattr(script, "Served", Served)
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=schemathesis))
    return given


@pytest.mark.parametrize("failed", [0, 2])
def test_the_record_names_the_tree_and_a_failed_check_is_an_exit_of_1(
    script: Any, run: dict[str, Any], tmp_path: Path, failed: int
) -> None:
    run["report"] = {**REPORT, "test_cases": {"generated": 6, "with_failures": failed, "errored": 0}}
    with pytest.raises(SystemExit) as end:
        script.main(["--json", str(tmp_path / "r.json"), "--commit", "abc", "--max-time", "7"])
    assert end.value.code == (1 if failed else 0)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["commit"] == "abc" and record["files"] and "schemathesis" in record["versions"]
    assert record["schemathesis"].endswith("--seed 1 --max-time 7") and record["passed"] == 6 - failed


def test_a_run_without_a_report_is_said(
    script: Any, run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run["report"] = None
    with pytest.raises(SystemExit) as end:
        script.main(["--json", str(tmp_path / "r.json")])
    assert end.value.code == 1 and "wrote no report.json" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
