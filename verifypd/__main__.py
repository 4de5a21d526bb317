"""Lets `python -m verifypd` stand for the `verifypd` command. Knows nothing else."""

from __future__ import annotations

import sys

from verifypd.cli import main

if __name__ == "__main__":
    sys.exit(main())
