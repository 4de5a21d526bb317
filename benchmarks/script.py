"""What the scripts of this folder share: their command line, and the file of their report."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A script's options: `--json` and `--commit`, and what it adds. `about`: its docstring. Progress is logged."""
    log_progress()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--commit", help="of this code, where the tree has no git")
    return parser


def log_progress() -> None:
    """Lines that say how far long work is, where no terminal shows a bar."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("verifypd.progress").setLevel(logging.INFO)


def keep(report: dict[str, Any], file: Path | None) -> None:
    """Write a report where a file was named. A run that is cut short leaves the last one that is whole."""
    from verifypd.bench.campaign import write_whole  # here: a worker of an older checkout imports this module too

    if file is not None:
        write_whole(file, json.dumps(report, indent=1) + "\n")
