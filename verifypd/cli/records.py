"""`verifypd trace` and `explain`: what a recorded run did and why."""

from __future__ import annotations

import argparse

from verifypd.cli.flags import Command
from verifypd.cli.terminal import emit


def register(command: Command) -> None:
    """Add the commands."""
    trace = command("trace", "turn a recorded run into a trace for ui.perfetto.dev", run_trace)
    trace.add_argument("folder", metavar="DIR", help="what --record wrote")
    trace.add_argument("--out", metavar="FILE", default="trace.json", help="file to write (default: trace.json)")
    explain = command("explain", "say what a recorded run did and why", run_explain)
    explain.add_argument("folder", metavar="DIR", help="what --record wrote")
    explain.add_argument("--step", type=int, metavar="N", help="one step: its plan, and what it was chosen over")


def run_trace(args: argparse.Namespace) -> int:
    """`verifypd trace`."""
    from verifypd.engine import trace

    batches = trace.write(args.folder, args.out)
    emit(f"{batches} batches written to {args.out}; open it at ui.perfetto.dev\n")
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """`verifypd explain`."""
    from verifypd.engine import trace

    if args.step is not None:
        emit(trace.explain_step(args.folder, args.step) + "\n")
    else:
        emit(trace.explain(trace.read(args.folder)) + "\n")
    return 0
