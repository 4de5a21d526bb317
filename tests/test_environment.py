"""What importing the package sets for libraries: an allocator that keeps memory, threads that let others run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHURN = """
import verifypd, resource, time, torch
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(12):
    if turn == 4:
        before = faults()
    torch.empty(2_000_000).zero_()
    time.sleep(0.02)
print(faults() - before)
"""


def run(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("MIMALLOC_PURGE_DELAY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["MIMALLOC_PURGE_DELAY", "GOMP_SPINCOUNT"])
def test_a_setting_of_the_users_own_is_kept(name: str) -> None:
    code = f"import verifypd, os; print(os.environ['{name}'])"
    assert 1000 <= int(run(code)) <= 20000 and run(code, **{name: "5"}) == "5"


@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU's library for threads")
def test_threads_that_wait_are_told_before_they_are_loaded() -> None:
    """The library says at its start what it goes by, on stderr."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    environment.pop("GOMP_SPINCOUNT", None)
    code = "import verifypd, os, torch; torch.ones(9).sum(); print(os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    said = done.stderr
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("this torch has another library for threads")
    assert f"GOMP_SPINCOUNT = '{done.stdout.strip()}'" in said


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
def test_memory_that_is_taken_again_costs_no_page_faults() -> None:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libc10.so"
    if not library.exists() or b"mimalloc_" not in library.read_bytes():
        pytest.skip("this torch has another allocator")
    assert int(run(CHURN)) < 200
    assert int(run(CHURN, MIMALLOC_PURGE_DELAY="0")) > 1000, "the test can fail"
