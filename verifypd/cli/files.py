"""What a command is to write, looked at before it works: a path that cannot be used must not cost an hour."""

from __future__ import annotations

import os
from pathlib import Path

from verifypd.errors import ConfigError


def writable_folder(option: str, folder: Path) -> None:
    """Make a folder, or refuse one that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder}: {error.strerror}; give a folder that can be written") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: Permission denied; give a folder that can be written")


def writable_file(option: str, file: Path) -> None:
    """Refuse a file that cannot be written. It is not made."""
    parent = file.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else parent, os.W_OK):
        raise ConfigError(f"{option} {file} cannot be written; give another file")
