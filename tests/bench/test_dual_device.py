"""The comparison of one device and two: what is measured runs, and what is simulated says so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.scripts import load


@pytest.fixture(scope="module")
def dual() -> Any:
    return load("dual_device")


def test_two_processes_are_measured(dual: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is all but the verifier: every token was drafted by the other process, some of them ahead."""
    monkeypatch.setattr(dual, "LAYERS", 3)
    monkeypatch.setattr(dual, "HIDDEN", 64)
    monkeypatch.setattr(dual, "FAINT", 0.001)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # other tests have as many as before
    cores = os.sched_getaffinity(0)
    out = tmp_path / "dual.json"
    given = "--part measured --arms fused ahead --requests 2 --tokens 60 --rounds 1 --json"
    result = dual.main([*given.split(), str(out)])
    assert os.sched_getaffinity(0) == cores
    assert json.loads(out.read_text())["measured"]["arms"] == result["measured"]["arms"]
    fused, ahead = result["measured"]["arms"]
    assert fused["acceptance"] > 0.8 and ahead["acceptance"] > 0.8 and ahead["ahead"] > 0
    assert all(arm["tokens_per_s"] > 0 and arm["gap_p95_ms"] > 0 for arm in (fused, ahead))


def test_what_is_simulated_says_so(dual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual, "SIMULATED", (1,))
    monkeypatch.setattr(dual, "PAIRS", dual.PAIRS[:1])
    part = dual.main(["--part", "simulated"])["simulated"]
    assert "SIMULATED" in part["what"]
    speed = {arm["arm"]: arm["tokens_per_s"] for arm in part["arms"] if arm["alpha"] == 0.8}
    assert speed["plain"] < speed["apart"] < speed["ahead"], "what is drafted ahead need not be waited for"
