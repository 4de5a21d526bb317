"""Loads a script of benchmarks/ or of another folder, which finds the modules beside it as it does when it is run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str, folder: Path = FOLDER) -> ModuleType:
    """The script's module, under a name that no other module has."""
    known = f"benchmarks_{name}"
    spec = importlib.util.spec_from_file_location(known, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[known] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
