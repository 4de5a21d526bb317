"""Reports of other people's tools: what is taken from them, and which are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load

GUIDELLM: dict[str, Any] = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "concurrent", "streams": 4}},
            "metrics": {
                "request_totals": {"successful": 5, "errored": 1, "incomplete": 2, "total": 8},
                "output_token_count": {"successful": {"min": 15.0, "max": 16.0}, "errored": None},
            },
        }
    ],
}
AIPERF: dict[str, Any] = {
    "aiperf_version": "0.13.0",
    "input_config": {"phases": [{"name": "profiling", "concurrency": 4}]},
    "request_count": {"unit": "requests", "avg": 7.0},
    "error_request_count": {"unit": "requests", "avg": 1.0},
    "total_spec_decode_steps": {"unit": "count", "avg": 10.0},
    "total_draft_tokens": {"unit": "tokens", "avg": 12.0},
    "total_accepted_draft_tokens": {"unit": "tokens", "avg": 5.0},
}
LM_EVAL: dict[str, Any] = {"lm_eval_version": "0.4.13", "results": {"capitals": {"alias": "capitals", "acc,none": 0.5}}}


@pytest.fixture(scope="module")
def script() -> Any:
    return load("server_clients")


@pytest.fixture
def reports(script: Any, tmp_path: Path) -> Path:
    """What the tools leave: two questions of three choices, eight requests of either of the others."""
    folder = tmp_path / "reports"
    script.main(["--begin", "--reports", str(folder), "--model", "tiny", "--commit", "abc"])
    write(folder / "guidellm.json", GUIDELLM)
    write(folder / "aiperf" / "profile_export_aiperf.json", AIPERF)
    write(folder / "lm_eval" / "tiny" / "results_2026.json", LM_EVAL)
    samples = folder / "lm_eval" / "tiny" / "samples_capitals_2026.jsonl"
    samples.write_text(2 * (json.dumps({"resps": [[["-1.0", "False"]]] * 3}) + "\n"))
    return folder


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_the_record_names_the_tree_and_what_each_tool_met(script: Any, reports: Path, tmp_path: Path) -> None:
    script.main(["--reports", str(reports), "--json", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["command"], record["commit"], record["model"]) == ("benchmarks/clients/run all", "abc", "tiny")
    assert record["files"] and record["versions"] and "modified" in record
    assert record["guidellm"] == {
        "version": "0.8.1",
        "requests": 8,
        "successful": 5,
        "errored": 1,
        "incomplete": 2,
        "output_tokens_each": [15, 16],
        "streams": 4,
    }
    assert record["aiperf"] == {
        "version": "0.13.0",
        "requests": 8,
        "errors": 1,
        "concurrency": 4,
        "speculation_table": {
            "steps": 10,
            "draft_tokens": 12,
            "accepted": 5,
            "overall_acceptance_rate": 0.417,
            "token_weighted_acceptance_length": 1.5,
        },
    }
    assert record["lm_eval"] == {
        "version": "0.4.13",
        "task": "capitals",
        "questions": 2,
        "requests": 6,
        "accuracy": 0.5,
    }


def test_a_table_is_none_where_the_tool_has_none_and_of_zeros_where_nothing_was_drafted(
    script: Any, reports: Path
) -> None:
    zeros = {name: {"unit": "count", "avg": 0.0} for name in AIPERF if name.startswith("total_")}
    write(reports / "aiperf" / "profile_export_aiperf.json", {**AIPERF, **zeros})
    table = script.aiperf(reports)["speculation_table"]
    assert table["steps"] == table["draft_tokens"] == table["accepted"] == 0
    assert table["overall_acceptance_rate"] is table["token_weighted_acceptance_length"] is None
    plain = {name: value for name, value in AIPERF.items() if not name.startswith("total_")}
    write(reports / "aiperf" / "profile_export_aiperf.json", plain)
    assert script.aiperf(reports)["speculation_table"] is None


@pytest.mark.parametrize(
    "name",
    [
        "begun.json",
        "guidellm.json",
        "aiperf/profile_export_aiperf.json",
        "lm_eval/tiny/results_2026.json",
        "lm_eval/tiny/samples_capitals_2026.jsonl",
    ],
)
def test_a_missing_report_is_said(
    script: Any, reports: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (reports / name).unlink()
    with pytest.raises(SystemExit) as end:
        script.main(["--reports", str(reports), "--json", str(tmp_path / "record.json")])
    assert end.value.code == 1 and not (tmp_path / "record.json").exists()
    said = capsys.readouterr().err
    assert Path(name).name.partition("_2026")[0] in said and "run benchmarks/clients/run all" in said


def test_two_reports_of_a_tool_are_one_too_many(script: Any, reports: Path) -> None:
    write(reports / "lm_eval" / "tiny" / "results_2027.json", LM_EVAL)
    with pytest.raises(script.ReportError, match="2 reports"):
        script.gathered(reports)


def test_a_report_of_an_earlier_run_is_refused(script: Any, reports: Path) -> None:
    os.utime(reports / "guidellm.json", (1.0, 1.0))
    with pytest.raises(script.ReportError, match="earlier run"):
        script.gathered(reports)


@pytest.mark.parametrize("tool", ["guidellm", "guidellm without a run", "aiperf", "lm_eval"])
def test_a_report_without_requests_is_refused(script: Any, reports: Path, tool: str) -> None:
    none = dict.fromkeys(("successful", "errored", "incomplete", "total"), 0)
    metrics = {"request_totals": none, "output_token_count": {"successful": None}}
    if tool == "guidellm":
        [run] = GUIDELLM["benchmarks"]
        write(reports / "guidellm.json", {**GUIDELLM, "benchmarks": [{**run, "metrics": metrics}]})
    elif tool == "aiperf":
        write(reports / "aiperf" / "profile_export_aiperf.json", {**AIPERF, "request_count": None,
                                                                  "error_request_count": {"avg": 0.0}})  # fmt: skip
    elif tool == "lm_eval":
        (reports / "lm_eval" / "tiny" / "samples_capitals_2026.jsonl").write_text("")
    else:
        write(reports / "guidellm.json", {**GUIDELLM, "benchmarks": []})
    with pytest.raises(script.ReportError, match=f"the report of {tool.split()[0]} holds no requests"):
        script.gathered(reports)
