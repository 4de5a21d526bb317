"""Where a figure comes from: command, commit, versions and machine, for every JSON a benchmark writes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")


def provenance(commit: str | None = None) -> dict[str, Any]:
    """What a reader needs to repeat a run. `commit`: where the source tree has no git to ask."""
    import torch

    from verifypd import __version__

    return {
        "command": " ".join(["python", *map(_relative, sys.argv)]),
        "commit": commit or _git("rev-parse", "HEAD") or "unknown",
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"verifypd": __version__, "python": platform.python_version(), **_versions()},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
    }


def cpu_name() -> str:
    """Model and instruction set."""
    try:
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listing = ""
    names = [line.split(":", 1)[1].strip() for line in listing.splitlines() if line.startswith("Model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'} ({platform.machine()})"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    """What git says of the tree this package is in; nothing where it is none of git's."""
    here = Path(__file__).resolve().parent
    try:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _relative(argument: str) -> str:
    """A path below the working folder without it: a report names no one's home."""
    path = Path(argument)
    if path.is_absolute():
        try:
            return str(path.relative_to(Path.cwd()))
        except ValueError:
            return path.name
    return argument
