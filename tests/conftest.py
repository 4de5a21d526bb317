"""What all tests share: tests that use the same servers or models run in the same process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUP = re.compile(r'^pytestmark = .*xdist_group\("([\w-]+)"\)', re.MULTILINE)


@cache
def group(path: str) -> str | None:
    """The group that a file of tests puts itself in."""
    file = ROOT / path
    found = GROUP.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return found.group(1) if found else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup` by the files' own marks: pytest-xdist 3.8 writes groups into names that pytest 9.2 ignores."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Groups(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid.partition("::")[0]) or nodeid

    return Groups(config, log)
