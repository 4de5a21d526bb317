"""Tables in the pages are those of their JSON."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tables.py"


@pytest.fixture(scope="module")
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(tables: Any) -> None:
    assert tables.main(["--check"]) == 0, "run: python benchmarks/tables.py"


def test_every_table_stands_somewhere(tables: Any) -> None:
    used = {match[2] for page in tables.PAGES for match in tables.PLACE.finditer(page.read_text())}
    assert used == set(tables.TABLES)


def test_what_a_page_says_comes_from_the_json(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table head-closed -->\nold\n<!-- end -->\nafter\n")
    made = tables.written(page)
    cell = tables.read("beside-vllm-closed")["cells"]["closed 8"]["ours:head"]
    assert f"{cell['figures']['tok_s']:,.0f}" in made and "old" not in made
    assert made.startswith("before\n") and made.endswith("after\n")
