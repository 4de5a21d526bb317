"""schemathesis over the OpenAPI document of the server, whose engine answers at once. Up to ten minutes on two cores.

    python benchmarks/server_schemathesis.py --json benchmarks/results/server_schemathesis.json

It exits with 1 where an answer failed a check; the report is written all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from script import command_line, keep
from server_cost import Served

from verifypd.bench.provenance import provenance

ENGINE = "verifypd.testing.instant:build"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class ReportError(Exception):
    """schemathesis left no report, or one without cases."""


def answers(events: Iterable[str]) -> Counter[tuple[str, str]]:
    """Answers by operation and status, from the lines of its events; status "none": none came."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in filter(str.strip, events):
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for each in recorder.get("interactions", {}).values():
            answer = each.get("response")
            counts[recorder["label"], str(answer["status_code"]) if answer else "none"] += 1
    return counts


def figures(report: dict[str, Any], counts: Counter[tuple[str, str]]) -> dict[str, Any]:
    """What stands in the record, from its report and the answers."""
    cases = report["test_cases"]
    if not cases["generated"] or not counts:
        raise ReportError("the report of schemathesis holds no requests")
    by_status: Counter[str] = Counter()
    for (_, status), count in counts.items():
        by_status[status] += count
    return {
        "operations": report["operations"]["selected"],
        "operations_tested": report["operations"]["tested"],
        "stopped_by": report["stop_reason"],
        "seconds": round(report["running_time"]),
        "cases": cases["generated"],
        "passed": cases["generated"] - cases["with_failures"] - cases["errored"],
        "answers_by_status": dict(sorted(by_status.items())),
        "answers_of_5xx": sum(count for status, count in by_status.items() if status.startswith("5")),
        "answers_200_of_generation": {path: counts[f"POST {path}", "200"] for path in GENERATIONS},
    }


def walk(address: str, options: list[str], folder: Path) -> dict[str, Any]:
    """Run it against a server; returns the figures of its reports, which lie in the folder."""
    summary, events = folder / "report.json", folder / "events.ndjson"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", *options]
    command += ["--generation-database", "none", "--no-color"]
    command += ["--report-json-path", str(summary), "--report-ndjson-path", str(events)]
    subprocess.run(command, cwd=folder, stdout=sys.stderr, check=False)
    for path in (summary, events):
        if not path.exists():
            raise ReportError(f"schemathesis wrote no {path.name}; what it said stands above")
    with events.open(encoding="utf-8") as lines:
        return figures(json.loads(summary.read_text(encoding="utf-8")), answers(lines))


def main(argv: list[str] | None = None) -> None:
    """Start the server, have it asked, and write what was found."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer it has")
    parser.add_argument("--max-model-len", type=int, default=256, help="most bodies run to its end")
    parser.add_argument("--max-examples", type=int, default=60, help="by chance, an operation")
    parser.add_argument("--max-time", type=int, default=500, help="seconds")
    args = parser.parse_args(argv)
    options = ["--checks", CHECKS, "--max-examples", str(args.max_examples), "--phases", "examples,coverage,fuzzing"]
    options += ["--mode", "all", "--seed", "1", "--max-time", str(args.max_time)]
    record = provenance(args.commit)
    flags = ["--model", args.model, "--engine-factory", ENGINE, "--draft", "none", "--arch", "plain"]
    flags += ["--max-model-len", str(args.max_model_len)]
    try:
        with tempfile.TemporaryDirectory() as folder, Served(*flags) as server:
            found = walk(f"http://127.0.0.1:{server.port}", options, Path(folder))
    except ReportError as error:
        parser.exit(1, f"{error}\n")
    record["versions"]["schemathesis"] = version("schemathesis")
    record |= {"serve": " ".join(flags), "schemathesis": " ".join(options), **found}
    print(json.dumps(record, indent=1))
    keep(record, args.json)
    sys.exit(found["passed"] < found["cases"])


if __name__ == "__main__":
    main()
