"""What other people's tools report of the server: guidellm, aiperf and lm_eval, in one file.

    benchmarks/clients/run all

runs the tools and calls this script twice: `--begin`, before the server starts, notes the tree that it is of, and
`--json FILE` gathers the reports when all have run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from script import command_line, keep

from verifypd.bench.provenance import provenance

COMMAND = "benchmarks/clients/run all"
BEGUN = "begun.json"  # where the tools ran, noted before they did


class ReportError(Exception):
    """A report is missing or holds no requests."""


def found(folder: Path, pattern: str) -> Path:
    """The one report of that name below a folder; it came after the tree was noted."""
    begun = folder / BEGUN
    if not begun.exists():
        raise ReportError(f"{folder} holds no {BEGUN}, which names the tree; run {COMMAND}")
    paths = sorted(folder.rglob(pattern))
    if len(paths) != 1:
        raise ReportError(f"{folder} holds {len(paths)} reports {pattern} where one is needed; run {COMMAND}")
    if paths[0].stat().st_mtime < begun.stat().st_mtime:
        raise ReportError(f"{paths[0]} is of an earlier run, perhaps of another tree; run {COMMAND}")
    return paths[0]


def read(folder: Path, pattern: str) -> dict[str, Any]:
    """The content of the one report of that name."""
    return dict(json.loads(found(folder, pattern).read_text(encoding="utf-8")))


def some(count: float, tool: str) -> int:
    """A number of requests, which is not 0."""
    if not count:
        raise ReportError(f"the report of {tool} holds no requests")
    return int(count)


def guidellm(folder: Path) -> dict[str, Any]:
    """Requests by how they ended, and the tokens of the shortest and the longest answer."""
    report = read(folder, "guidellm.json")
    if not report["benchmarks"]:
        raise ReportError("the report of guidellm holds no requests")
    [run] = report["benchmarks"]
    totals = run["metrics"]["request_totals"]
    tokens = run["metrics"]["output_token_count"]["successful"] or {}
    return {
        "version": report["metadata"]["guidellm_version"],
        "requests": some(totals["total"], "guidellm"),
        **{name: totals[name] for name in ("successful", "errored", "incomplete")},
        "output_tokens_each": [int(tokens[end]) for end in ("min", "max")] if totals["successful"] else None,
        "streams": run["config"]["strategy"]["streams"],
    }


def aiperf(folder: Path) -> dict[str, Any]:
    """Requests with and without an answer, and the sums of its Spec Decode table."""
    report = read(folder, "aiperf/profile_export_aiperf.json")
    totals = {name: value["avg"] for name, value in report.items() if isinstance(value, dict) and "avg" in value}
    answered, errors = totals.get("request_count", 0), totals.get("error_request_count", 0)
    table = None  # the server told of no drafts
    if (steps := totals.get("total_spec_decode_steps")) is not None:
        drafted, accepted = totals["total_draft_tokens"], totals["total_accepted_draft_tokens"]
        table = {
            "steps": int(steps),
            "draft_tokens": int(drafted),
            "accepted": int(accepted),
            "overall_acceptance_rate": round(accepted / drafted, 3) if drafted else None,
            "token_weighted_acceptance_length": round(1 + accepted / steps, 2) if steps else None,
        }
    return {
        "version": report["aiperf_version"],
        "requests": some(answered + errors, "aiperf"),
        "errors": int(errors),
        "concurrency": report["input_config"]["phases"][0]["concurrency"],
        "speculation_table": table,
    }


def lm_eval(folder: Path) -> dict[str, Any]:
    """Questions, the prompts scored for them, and how many were right."""
    report = read(folder, "results_*.json")
    [task] = report["results"]
    lines = found(folder, f"samples_{task}_*.jsonl").read_text(encoding="utf-8").splitlines()
    scored = [json.loads(line)["resps"] for line in lines]
    return {
        "version": report["lm_eval_version"],
        "task": task,
        "questions": some(len(scored), "lm_eval"),
        "requests": some(sum(map(len, scored)), "lm_eval"),
        "accuracy": report["results"][task]["acc,none"],
    }


def gathered(folder: Path) -> dict[str, Any]:
    """What all of them say, with where they ran."""
    tools = {tool.__name__: tool(folder) for tool in (guidellm, aiperf, lm_eval)}
    return {**read(folder, BEGUN), **tools}


def main(argv: list[str] | None = None) -> None:
    """Note where the tools are about to run, or gather what they said."""
    parser = command_line(__doc__)
    parser.add_argument("--reports", type=Path, required=True, metavar="DIR", help="where the tools write")
    parser.add_argument("--begin", action="store_true", help="note the tree; the tools run after it")
    parser.add_argument("--model", default="smollm2", help="that the server serves, with --begin")
    args = parser.parse_args(argv)
    if args.begin:
        keep({**provenance(args.commit, COMMAND), "model": args.model}, args.reports / BEGUN)
        return
    try:
        record = gathered(args.reports)
    except ReportError as error:
        parser.exit(1, f"{error}\n")
    print(json.dumps(record, indent=1))
    keep(record, args.json)


if __name__ == "__main__":
    main()
