"""Compiles native.c and its headers once per machine, into the user's cache. Knows compilers and files; nothing of
what the kernels do.

A compiler is never required: where there is none, or it fails, `library` returns None and the torch kernels are used.
VERIFYPD_NATIVE=0 turns the native kernels off; CC names a compiler to try first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.c")
# -fno-schedule-insns: GCC for ARM would load far ahead and spill accumulators for it, which costs 5 % at 64 rows
BASE_FLAGS = (
    "-O2", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-schedule-insns",
)  # fmt: skip
COMPILE_SECONDS = 600.0  # it takes some 20 of a processor, and torch in its place costs more, step by step


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/verifypd/kernels, ~/.cache by default."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "verifypd" / "kernels"


def find_compiler() -> list[str] | None:
    """The compiler as a command: $CC, else the first of cc, gcc, clang on the path."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = shlex.split(name)
        found = shutil.which(command[0]) if command else None
        if found:
            return [found, *command[1:]]
    return None


def openmp_runtime() -> str | None:
    """The OpenMP library already in the process (torch brings one), so that no second one comes in beside it."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")) and ".so" in path:
            return path
    return None


@functools.cache
def processor() -> str:
    """The processor's architecture, model and features: what the compiled code depends on."""
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})])


def _key(compiler: list[str], runtime: str | None) -> str:
    stat = os.stat(os.path.realpath(compiler[0]))
    parts = (
        *(path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))),
        " ".join(compiler).encode(),
        f"{stat.st_size} {stat.st_mtime_ns} {runtime} {BASE_FLAGS}".encode(),
        processor().encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _flag_sets(runtime: str | None) -> Iterator[list[str]]:
    """Best first: tuned to this processor with threads, without threads; the same without tiles, which an older
    assembler does not know; then plain."""
    arm = platform.machine() in ("aarch64", "arm64")
    native = ["-mcpu=native" if arm else "-march=native"]
    for tuned in [native, []] if arm else [native, [*native, "-mno-amx-bf16"], []]:
        if runtime is not None:
            yield [*tuned, "-fopenmp"]
        yield tuned


def _compile(compiler: list[str], runtime: str | None, target: Path) -> bool:
    """Compile to a temporary file beside `target` and move it there whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built, compiled = Path(folder, "native.so"), Path(folder, "native.o")
        for flags in _flag_sets(runtime):
            # linked to the runtime in the process by its own path: -fopenmp at link time would name the compiler's
            libraries = [runtime] if runtime is not None and "-fopenmp" in flags else []
            steps = (
                [*compiler, *BASE_FLAGS, *flags, "-c", str(SOURCE), "-o", str(compiled)],
                [*compiler, "-shared", "-Wl,--no-undefined", str(compiled), *libraries, "-lm", "-lc", "-o", str(built)],
            )
            for step in steps:
                done = subprocess.run(step, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
                if done.returncode != 0:
                    logger.debug("%s failed: %s", shlex.join(step), done.stderr.strip())
                    break
            else:
                os.replace(built, target)
                return True
    return False


def build() -> Path | None:
    """The compiled library, made if it is not there yet; None where that is impossible."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("native kernels: no C compiler found; using torch kernels")
        return None
    runtime = openmp_runtime()
    try:
        folder = cache_folder()
        target = folder / f"native-{_key(compiler, runtime)}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        logger.info("native kernels: compiling for this processor, once")
        if _compile(compiler, runtime, target):
            return target
        logger.info("native kernels: %s cannot compile them; using torch kernels", compiler[0])
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.info("native kernels: %s; using torch kernels", error)
    return None


@functools.cache
def _load() -> ctypes.CDLL | None:
    import torch  # noqa: F401  its OpenMP runtime has to be in the process before ours is looked up

    path = build()
    if path is None:
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("native kernels: %s; using torch kernels", error)
        return None
    declare(loaded)
    return loaded


def library() -> ctypes.CDLL | None:
    """The compiled kernels, built on first use; None when there is no compiler or VERIFYPD_NATIVE=0."""
    if os.environ.get("VERIFYPD_NATIVE", "1") == "0":
        return None
    return _load()


def loaded() -> ctypes.CDLL | None:
    """The compiled kernels where somebody uses them already; never a reason to compile."""
    return library() if _load.cache_info().currsize else None


def name() -> str | None:
    """Of the file of the kernels in use, which says what they were made of and by which compiler."""
    found = loaded()
    return None if found is None else Path(found._name).name


def declare(loaded: ctypes.CDLL) -> None:
    """The C signatures of native.c and its headers: p pointer, n ptrdiff_t, i int, f float."""
    types = {"p": ctypes.c_void_p, "n": ctypes.c_ssize_t, "i": ctypes.c_int, "f": ctypes.c_float}
    signatures = {
        "vpd_linear": "pnnpippipnni",
        "vpd_takes_half": "",
        "vpd_takes_tiles": "",
        "vpd_takes_panels": "i",
        "vpd_norm": "pnpppipnnffi",
        "vpd_gated": "pnpnnii",
        "vpd_rotate": "pnnpnnpppnnni",
        "vpd_positions": "pppnpnpnnpnpp",
        "vpd_decode_positions": "pppnpnnpnnpnppp",
        "vpd_ids": "pppppnpnnp",
        "vpd_look_up": "pnnppnnnnipnp",
        "vpd_keep": "ppnpnnppppn",
        "vpd_attend": "pnpnpnppippppppnnppnnnnnnffi",
        "vpd_layers": "pnppppppppnnippppppnnpnni",
        "vpd_scratch": "p",
        "vpd_propose": "ppnnpni",
        "vpd_judge": "p",
        "vpd_emit": "p",
        "vpd_embed": "pnpipnnp",
        "vpd_project": "ppnnfppni",
        "vpd_read": "pppppppppppnni",
        "vpd_draft": "p",
    }
    told = (
        "vpd_linear", "vpd_takes_half", "vpd_takes_tiles", "vpd_takes_panels", "vpd_attend", "vpd_layers",
        "vpd_positions", "vpd_embed", "vpd_project", "vpd_read", "vpd_draft", "vpd_decode_positions", "vpd_ids",
        "vpd_propose", "vpd_judge",
    )  # fmt: skip
    results: dict[str, type] = dict.fromkeys(told, ctypes.c_int)
    results["vpd_scratch"] = ctypes.c_ssize_t
    for name, letters in signatures.items():
        function = getattr(loaded, name)
        function.argtypes = [types[letter] for letter in letters]
        function.restype = results.get(name)
