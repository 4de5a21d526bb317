"""Tiny pairs shared by the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.heads import head_for
from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and a draft that agrees with it about half of the time."""
    base = tmp_path_factory.mktemp("pair")
    verifier = tiny("llama", base / "verifier")
    head_for(verifier, base / "head")  # found beside it by those who want a draft head
    return verifier, noisy_copy(verifier, base / "draft", 0.15)
