"""The table of the policy's numbers: a number is changed before anything reads it, and what is none of it is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import FOLDER, load
from verifypd.control import tuning

SEEN = """
import sys
sys.path.insert(0, sys.argv[1])
import tuning
from verifypd.control import tuning as numbers
arm = tuning.Arm("MEAN_OUTPUT", "half", numbers.MEAN_OUTPUT // 2)
tuning.run((arm, [], []))
from verifypd.control import snapshot
default = snapshot.Snapshot.__dataclass_fields__["mean_output"].default
assert default == snapshot.mean_output(0, 0) == arm.value
try:
    tuning.run((arm, [], []))
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def script() -> Any:
    return load("tuning")


def test_a_changed_number_is_changed_for_whoever_reads_it() -> None:
    """Defaults that are bound at a class's birth, too; where it is too late the script says so."""
    command = [sys.executable, "-c", SEEN, str(FOLDER)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert "read MEAN_OUTPUT before it was changed" in found.stdout
    assert "verifypd.control.snapshot" in found.stdout


def test_every_number_is_halved_and_doubled(script: Any) -> None:
    arms = script.arms(script.names())
    assert set(script.names()) == {name for name in vars(tuning) if name.isupper()}
    assert set(script.NONE) <= set(script.names())
    for name in script.names():
        value = getattr(tuning, name)
        changed = {arm.change: arm.value for arm in arms if arm.name == name}
        assert changed["half"] == pytest.approx(value / 2, abs=0.5) and changed["double"] == 2 * value
        assert all(each != value for each in changed.values())
        assert all(type(changed[change]) is type(value) for change in ("half", "double")), "a count stays a count"
    assert len([arm for arm in arms if arm.name == "again"]) == script.AGAIN


def test_ratios_are_over_the_numbers_as_they_stand_seed_by_seed(script: Any) -> None:
    runs = [
        {"name": name, "change": change, "kind": "steady", "seed": seed, "e2e_mean": value, "changes": 0.0}
        for name, change, values in (("", "as it stands", (10.0, 20.0)), ("OVERDUE", "half", (11.0, 18.0)))
        for seed, value in zip((1, 2), values, strict=True)
    ]
    assert script.ratios(runs, "OVERDUE", "half", "steady", "e2e_mean") == pytest.approx([1.1, 0.9])
    assert script.table(runs, "steady")[-2] == "| `OVERDUE` | half | 1.000 ± 0.100 |"
