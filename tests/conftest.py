"""What all tests share: those that use the same servers or models run in one process; programs can be interrupted."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUP = re.compile(r'^pytestmark = (?:\[\s*)?.*xdist_group\("([\w-]+)"\)', re.MULTILINE)
GROUP_BY = re.compile(r'^GROUP_BY = r"([^"]+)"', re.MULTILINE)


def pytest_configure() -> None:
    """A shell that runs this in the background has it ignore SIGINT; programs that tests start would inherit that. And
    how long Hypothesis' examples take says how busy the machine is, no more."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ImportError):  # tests marked gpu do without
        from hypothesis import HealthCheck, settings

        settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("untimed")


@cache
def source(path: str) -> str:
    """A file of tests as text."""
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def group(nodeid: str) -> str | None:
    """The group of a test: its file's, or what its file's `GROUP_BY` finds in its name."""
    path, _, name = nodeid.partition("::")
    whole, part = GROUP.search(source(path)), GROUP_BY.search(source(path))
    if whole:
        return whole.group(1)
    found = re.search(part.group(1), name) if part else None
    return f"{path}/{found.group(1)}" if found else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup` by the files' own marks: pytest-xdist 3.8 writes groups into names that pytest 9.2 ignores."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Groups(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid) or nodeid

    return Groups(config, log)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium, one for the module."""
    from tests.server.browser import launched  # playwright may be missing: its tests are skipped then

    yield from launched()


@pytest.fixture
def watched(browser: Any) -> Iterator[Any]:
    """A page in it."""
    from tests.server.browser import Watched

    made = Watched(browser, viewport={"width": 1280, "height": 900})
    yield made
    made.context.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test begins first: in the end no worker waits for it alone."""
    items.sort(key=lambda item: item.path.name != "test_hopper.py")


def pytest_collection_finish() -> None:
    """What was imported stays to the end: it is not looked through again whenever garbage is collected."""
    gc.collect()
    gc.freeze()
