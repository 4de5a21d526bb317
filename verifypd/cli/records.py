"""`verifypd trace`, `explain` and `replay`: what a recorded run did and why."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verifypd.cli.flags import Command, Parser
from verifypd.cli.terminal import emit
from verifypd.errors import ConfigError, RequestError


def register(command: Command) -> None:
    """Add the commands."""
    trace = command("trace", "turn a recorded run into a trace for ui.perfetto.dev", run_trace)
    trace.add_argument("folder", metavar="DIR", help="what --record wrote")
    trace.add_argument("--out", metavar="FILE", default="trace.json", help="file to write (default: trace.json)")
    explain = command("explain", "say what a recorded run did and why", run_explain)
    explain.add_argument("folder", metavar="DIR", help="what --record wrote")
    explain.add_argument("--step", type=int, metavar="N", help="one step: its plan, and what it was chosen over")
    replay = command("replay", "play recorded runs back on the dashboard", run_replay, "%(prog)s DIR [DIR …]")
    text = "what --record wrote, or a folder of `verifypd compare`; several are shown side by side"
    replay.add_argument("folders", nargs="+", metavar="DIR", help=text)
    add_site_flags(replay, 8001)


def add_site_flags(parser: Parser, port: int) -> None:
    """Where a page that watches is served."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=port, help="port to listen on; 0: any (default: %(default)s)")


def run_replay(args: argparse.Namespace) -> int:
    """`verifypd replay`: serves the page until it is interrupted."""
    try:
        from verifypd.watch import replay
        from verifypd.watch.site import Site
    except ModuleNotFoundError as error:
        raise ConfigError(f"the page needs {error.name}: pip install 'verifypd[server]'") from None
    with _reading(" or ".join(args.folders)):
        show = replay.show([Path(folder) for folder in args.folders])
    with Site(show, args.host, args.port) as site:
        emit(f"watch it at {site.address}/\n  Ctrl-C ends it\n")
        threading.Event().wait()
    return 0


@contextmanager
def _reading(folder: str) -> Iterator[None]:
    """Say of lines that are none of a record's that they are not."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise RequestError(f"{folder} holds no record, or a damaged one: {error!r}") from None


def run_trace(args: argparse.Namespace) -> int:
    """`verifypd trace`."""
    from verifypd.engine import trace

    with _reading(args.folder):
        batches = trace.write(args.folder, args.out)
    emit(f"{batches} batches written to {args.out}; open it at ui.perfetto.dev\n")
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """`verifypd explain`."""
    from verifypd.engine import trace

    with _reading(args.folder):
        step = args.step
        told = trace.explain(trace.read(args.folder)) if step is None else trace.explain_step(args.folder, step)
    emit(told + "\n")
    return 0
