"""The `verifypd` command. Each module of this package is a command or a few; `register` adds them to the parser.

Knows how to talk to a terminal; nothing of tensors. Torch is imported only by a command that runs a model.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from verifypd import __version__
from verifypd.cli import (
    bench,
    chat,
    compare,
    costs,
    demo,
    deploy,
    distil,
    evaluate,
    generate,
    models,
    records,
    serve,
    top,
)
from verifypd.cli.flags import Parser, Run, wide
from verifypd.cli.terminal import BAD_INPUT, INTERRUPTED, PIPE_CLOSED, one_line, say
from verifypd.errors import VerifyPDError

COMMANDS = (
    generate,
    chat,
    serve,
    deploy,
    demo,
    compare,
    top,
    models,
    costs,
    bench,
    distil,
    evaluate,
    records,
)  # in the order `--help` lists them


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="verifypd", description="Exact speculative decoding for large language models.")
    parser.add_argument("--version", action="version", version=f"verifypd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Run, usage: str | None = None) -> Parser:
        sub: Parser = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            allow_abbrev=False,
            formatter_class=wide,
            usage=usage,
        )
        sub.set_defaults(run=run, parser=sub)
        return sub

    for module in COMMANDS:
        module.register(command)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for, and a file that it names."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    if getattr(args, "config", None) is not None:
        from verifypd.cli import config_file

        config_file.apply(args, args.parser)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    try:
        args = parse(argv)
        logging.basicConfig(
            level=logging.INFO if getattr(args, "verbose", False) else logging.WARNING, format="%(message)s"
        )
        logging.getLogger("verifypd.progress").setLevel(logging.INFO)  # where no terminal shows a bar
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except VerifyPDError as error:
        say(f"error: {one_line(error)}")
        return BAD_INPUT
    except BrokenPipeError:
        # the reader has gone: nothing to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:  # a disk that is full, a place that cannot be written
        say(f"error: {one_line(error)}")
        return 1
    except KeyboardInterrupt:
        say("")
        return INTERRUPTED
