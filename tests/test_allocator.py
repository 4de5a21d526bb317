"""Memory that passes free and take again stays with the process, where torch's allocator can be told so."""

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
    kept = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_setting_of_the_users_own_is_kept() -> None:
    code = "import verifypd, os; print(os.environ['MIMALLOC_PURGE_DELAY'])"
    assert (run(code), run(code, MIMALLOC_PURGE_DELAY="5")) == ("10000", "5")


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
def test_memory_that_is_taken_again_costs_no_page_faults() -> None:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libc10.so"
    if not library.exists() or b"mimalloc_" not in library.read_bytes():
        pytest.skip("this torch has another allocator")
    assert int(run(CHURN)) < 200
    assert int(run(CHURN, MIMALLOC_PURGE_DELAY="0")) > 1000, "the test can fail"
