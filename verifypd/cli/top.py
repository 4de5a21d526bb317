"""`verifypd top`: a server's essentials in a terminal."""

from __future__ import annotations

import argparse
import asyncio

from verifypd.cli.flags import Command
from verifypd.errors import ConfigError


def register(command: Command) -> None:
    """Add the command."""
    parser = command("top", "watch a server in a terminal: ours, or vLLM", run, "%(prog)s [URL] [OPTION …]")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="s between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print the figures of one interval, and end")


def run(args: argparse.Namespace) -> int:
    """`verifypd top`."""
    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval {args.interval:g} must lie in 0.05..3600")
    try:
        from rich.console import Console

        from verifypd.watch.top import watch
    except ModuleNotFoundError as error:
        raise ConfigError(f"top needs {error.name}: pip install 'verifypd[server]'") from None
    asyncio.run(watch(args.url, args.interval, args.once, Console()))
    return 0
