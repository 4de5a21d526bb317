"""What benchmark scripts share: a command line, a way to keep a report, and what rounding does to a law, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.bench.scripts import FOLDER, load


def test_a_report_is_written_where_one_is_asked_for(tmp_path: Path) -> None:
    script = load("script")
    args = script.command_line("About it.").parse_args(["--json", str(tmp_path / "new" / "r.json"), "--commit", "abc"])
    assert args.commit == "abc"
    script.keep({"a": 1}, args.json)
    assert json.loads(args.json.read_text()) == {"a": 1} and [*args.json.parent.iterdir()] == [args.json]
    script.keep({"a": 1}, script.command_line(None).parse_args([]).json)  # nothing to write


def test_scripts_write_their_reports_in_one_way() -> None:
    """Only a map, which has a line for each run, writes its JSON by itself."""
    own = [f.name for f in FOLDER.glob("*.py") if "write_text(json.dumps(report" in f.read_text()]
    own += [f.name for f in FOLDER.glob("*.py") if 'add_argument("--json"' in f.read_text() and f.name != "script.py"]
    assert own == []


def test_how_far_a_law_moves() -> None:
    even, likely = torch.zeros(2), torch.tensor([math.log(3.0), 0.0])
    arms = {"float32": lambda ids: even.expand(len(ids), 2), "other": lambda ids: likely.expand(len(ids), 2)}
    found = load("rounding").moved([torch.arange(3), torch.arange(2)], arms)
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found == {
        "other": {
            "positions": 5,
            "mean_kl": pytest.approx(kl),
            "p99_kl": pytest.approx(kl),
            "argmax_agreement": 1.0,
        }
    }
