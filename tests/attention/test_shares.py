"""The shares of a context in CUDA C++, compiled for the CPU: each has keys, and together they have all."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from verifypd.attention import arguments, chunks, tiling
from verifypd.kernels import build

PROGRAM = """
#include <algorithm>
using std::max, std::min;
#define __device__ static
#define __forceinline__ inline
struct Arguments { int block_n; };
struct Work { int start, rows, split, shares; };
%s
extern "C" void share(int high, int block_n, int split, int shares, int *found) {
    find_share(Arguments{block_n}, Work{high - 1, 1, split, shares}, found[0], found[1]);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    function = re.search(
        r"__device__ __forceinline__ void find_share\(.*?\n}\n", arguments.SHARED_SOURCE.read_text(), re.DOTALL
    )
    assert function
    folder: Path = tmp_path_factory.mktemp("shares")
    source, target = folder / "shares.cpp", folder / "shares.so"
    source.write_text(PROGRAM % function[0])
    made = subprocess.run(
        [*compiler, "-x", "c++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(target)], capture_output=True
    )
    if made.returncode and b"find_share" not in made.stderr:
        pytest.skip("no compiler of C++")
    assert made.returncode == 0, made.stderr.decode()
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize(
    ("block_n", "least"), [(chunks.KEYS, tiling.LEAST_CHUNK_SPLIT), (64, tiling.LEAST_SPLIT)], ids=["chunks", "short"]
)
def test_no_share_is_empty(library: ctypes.CDLL, block_n: int, least: int) -> None:
    """Who multiplies waits for the first keys of a share: one without keys would stop the device."""
    found = (ctypes.c_int * 2)()
    for high in [*range(1, 5000, 7), 3200, 3201, 8192, 65537]:
        for shares in range(1, min(-(-high // least), tiling.MOST_SPLITS) + 1):
            end = 0
            for split in range(shares):
                library.share(high, block_n, split, shares, found)
                assert found[0] == end < found[1], (high, shares, split)
                assert found[0] % block_n == 0
                end = found[1]
            assert end == high
