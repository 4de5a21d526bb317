"""Tiny pairs shared by the engine tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import parameters, prompts
from tests.engine.heads import head_for
from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import VOCAB, tiny
from verifypd import LLM


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and a draft that agrees with it about half of the time."""
    base = tmp_path_factory.mktemp("pair")
    verifier = tiny("llama", base / "verifier")
    head_for(verifier, base / "head", vocab=VOCAB)  # found beside it by those who want a draft head
    return verifier, noisy_copy(verifier, base / "draft", 0.15)


@pytest.fixture(scope="session")
def plain(pair: tuple[Path, Path]) -> list[list[int]]:
    """What plain decoding gives each request alone."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_memory": "32MB", "prefix_cache": False}
    with LLM(str(pair[0]), draft=None, arch="plain", batch_size=1, **options) as llm:
        both = zip(prompts(10), parameters(10), strict=True)
        return [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt, params in both]
