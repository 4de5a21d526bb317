"""Where a figure comes from: command, commit, versions and machine, for every JSON a benchmark writes."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the source tree, or where packages are installed
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")


def provenance(commit: str | None = None, command: str | None = None) -> dict[str, Any]:
    """What a reader needs to repeat a run. `commit`: where the source tree has no git to ask.

    `modified` is None where nobody can say; `files` tells the code from any other, with git and without.
    """
    import torch

    from verifypd import __version__

    return {
        "command": command or " ".join(["python", *map(relative, sys.argv)]),
        "commit": commit or _git("rev-parse", "HEAD") or "unknown",
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")) if tracked() else None,
        "files": files_hash(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"verifypd": __version__, "python": platform.python_version(), **_versions()},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
    }


def tracked(root: Path = ROOT) -> list[str]:
    """Files that git tracks in a source tree, by path; none where the tree is none of git's."""
    if _git("rev-parse", "--show-toplevel", root=root) != str(root):  # an environment within somebody else's tree
        return []
    return sorted(filter(None, _git("ls-files", "-z", root=root).split("\0")))


def files_hash(root: Path = ROOT) -> str:
    """SHA-256 over paths and contents: of all tracked files, or, without git, of the package's own."""
    kind, names = "tracked", tracked(root)
    if not names:
        kind = "package"
        own = (path for path in (root / "verifypd").rglob("*") if path.is_file() and path.suffix != ".pyc")
        names = sorted(path.relative_to(root).as_posix() for path in own)
    paths = {name: root / name for name in names}
    contents = {n: p.read_bytes() if p.is_file() and not p.is_symlink() else b"" for n, p in paths.items()}
    return f"{kind}:{_whole({name: hashlib.sha256(content).hexdigest() for name, content in contents.items()})}"


def _whole(digests: dict[str, str]) -> str:
    """One hash of files by path and hash of their content."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


class History:
    """Hashes of a repository's commits, made from git's own objects. A file's content is read once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._known: dict[str, str] = {}  # git's name of a content -> SHA-256

    @property
    def shallow(self) -> bool:
        """Whether commits are missing because the repository was cloned without them."""
        return _git("rev-parse", "--is-shallow-repository", root=self.root) == "true"

    def hashes(self, commit: str) -> dict[str, str] | None:
        """What `files_hash` says in a tree of that commit, with git and without; None where the commit is not here."""
        listing = _git("ls-tree", "-r", "-z", "--full-tree", commit, root=self.root)
        lines = [line.partition("\t")[::2] for line in listing.split("\0") if line]
        blobs = {path: (head.split()[0], head.split()[2]) for head, path in lines}
        if not blobs:
            return None
        self._read({name for mode, name in blobs.values() if mode != "120000"} - set(self._known))
        empty = hashlib.sha256(b"").hexdigest()
        digests = {path: empty if mode == "120000" else self._known[name] for path, (mode, name) in blobs.items()}
        own = {path: value for path, value in digests.items() if path.startswith("verifypd/")}
        return {"tracked": f"tracked:{_whole(digests)}", "package": f"package:{_whole(own)}"}

    def _read(self, names: set[str]) -> None:
        """Have git give the contents of these names, all at once."""
        ordered = sorted(names)
        command = ["git", "cat-file", "--batch"]
        given = "".join(f"{name}\n" for name in ordered).encode()
        out = subprocess.run(command, cwd=self.root, input=given, capture_output=True, check=True).stdout
        at = 0
        for name in ordered:
            end = out.index(b"\n", at)
            size = int(out[at:end].split()[2])
            self._known[name] = hashlib.sha256(out[end + 1 : end + 1 + size]).hexdigest()
            at = end + 1 + size + 1


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


def _git(*arguments: str, root: Path = ROOT) -> str:
    """What git says of the tree this package is in; nothing where it is none of git's."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def relative(argument: str) -> str:
    """A path below the working folder without it: a report names no one's home."""
    path = Path(argument)
    if path.is_absolute():
        try:
            return str(path.relative_to(Path.cwd()))
        except ValueError:
            return path.name
    return argument
