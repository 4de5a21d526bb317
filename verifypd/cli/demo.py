"""`verifypd demo`: the server under traffic of its own making, so that its dashboard lives without a client."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from multiprocessing.process import BaseProcess

from verifypd.bench import traffic
from verifypd.cli import serve
from verifypd.cli.flags import Command, add_engine_flags
from verifypd.cli.terminal import emit
from verifypd.errors import ConfigError


def register(command: Command) -> None:
    """Add the command."""
    parser = command("demo", "serve under traffic of its own, for the dashboard", run, "%(prog)s [OPTION …]")
    parser.add_argument("--clients", type=int, default=3, help="clients that ask at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long they ask (default: %(default)s)")
    serve.add_server_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """`verifypd demo`. The traffic has a process of its own, which ends with this one."""
    if not 1 <= args.clients <= 256:
        raise ConfigError(f"--clients {args.clients} must lie in 1..256")
    if not 0 < args.minutes <= 24 * 60:
        raise ConfigError(f"--minutes {args.minutes:g} must lie above 0, up to 1440")
    settings = serve.settings(args)
    config = settings.server
    if config.tls_cert:
        raise ConfigError("demo speaks plain HTTP to itself: leave out --tls-cert and --tls-key")
    started: list[BaseProcess] = []

    def ready(address: str) -> None:
        emit(serve.welcome(address, settings.model, bool(config.api_key)))
        key = config.api_key[0] if config.api_key else None
        planned = traffic.Traffic(address, settings.model, key, args.clients, args.minutes * 60)
        process = multiprocessing.get_context("spawn").Process(
            target=traffic.run, args=(planned, os.getpid()), name="verifypd-traffic", daemon=True
        )
        process.start()
        started.append(process)
        emit(f"  {args.clients} clients ask for {args.minutes:g} minutes; Ctrl-C ends all\n")

    try:
        return serve.supervise(settings, ready)
    finally:
        for process in started:
            process.terminate()
            process.join(5.0)
