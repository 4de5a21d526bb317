"""Native kernels as a processor with AVX-512 and AMX tiles would run them, on any processor."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from verifypd.kernels import build

FEATURES = ("AVX", "AVX512F", "AVX512BF16", "AMX_BF16", "AMX_INT8")


def emulated(folder: Path) -> ctypes.CDLL:
    """The library, compiled into `folder` with operations that are functions of plain C. Slow."""
    compiler = build.find_compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler for Linux")
    target = folder / "native-emulated.so"
    flags = [
        "-O0",
        "-w",
        "-std=gnu11",
        "-fPIC",
        "-shared",
        "-ffp-contract=off",
        *(f"-D__{name}__" for name in FEATURES),
    ]
    headers = ["-I", str(Path(__file__).with_name("emulated"))]
    subprocess.run([*compiler, *flags, *headers, str(build.SOURCE), "-lm", "-o", str(target)], check=True)
    loaded = ctypes.CDLL(str(target))
    build.declare(loaded)
    return loaded
