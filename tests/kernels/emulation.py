"""Native kernels as a processor with AVX-512 and AMX tiles would run them, on any processor."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from verifypd.kernels import build

FEATURES = ("AVX", "AVX512F", "AVX512BF16", "AMX_BF16", "AMX_INT8")


def narrow(folder: Path) -> ctypes.CDLL:
    """The library, compiled into `folder` as for an x86 processor without AVX-512, or skip."""
    compiler = build.find_compiler()
    if compiler is None or not ("avx2" in build.processor() and "fma" in build.processor()):
        pytest.skip("no C compiler, or no AVX2")
    target = folder / "native-narrow.so"
    flags = ["-O1", "-std=gnu11", "-fPIC", "-shared", "-mavx2", "-mfma", "-mf16c"]
    subprocess.run([*compiler, *flags, str(build.SOURCE), "-lm", "-o", str(target)], check=True)
    loaded = ctypes.CDLL(str(target))
    build.declare(loaded)
    return loaded


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
