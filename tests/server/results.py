"""Keeps what `make soak` finds, with where it comes from."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from verifypd.bench.campaign import write_whole
from verifypd.bench.provenance import provenance

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WHENCE = provenance(command="make soak")  # of the tree before the first result is written to it


def keep(name: str, drafts: str, figures: dict[str, Any]) -> None:
    """Write them as a result of this name. `drafts`: whose."""
    record = {
        **WHENCE,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "model": f"a random Llama of 0.1 M parameters{drafts}, fp32",
        **figures,
    }
    write_whole(RESULTS / f"{name}.json", json.dumps(record, indent=2) + "\n")
