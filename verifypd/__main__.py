"""Lets `python -m verifypd` stand for the `verifypd` command. Knows nothing else."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # processes that it starts import this module too, and need no commands
    from verifypd.cli import main

    sys.exit(main())
