"""A model that only spells, in the place of the real one."""

from __future__ import annotations

import pytest

from tests.cli.speller import Speller
from verifypd.cli import running


@pytest.fixture
def llm(monkeypatch):
    speller = Speller()
    monkeypatch.setattr(running, "load", speller)
    return speller
