"""Engines with a fault that a test sets off by writing a file; given to the server as its engine factory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from verifypd.config import EngineConfig
from verifypd.engine.build import Built
from verifypd.engine.build import build as plain
from verifypd.testing.instant import build as instant

VARIABLE = "VERIFYPD_TEST_FAULT"
SLOW = 0.004  # s, of every pass


def ordered(kind: str) -> str | None:
    """What the test asks of this kind of fault now; each order is carried out once."""
    path = Path(os.environ[VARIABLE]) / kind
    try:
        text = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return None
    return text


def on_gpu(config: EngineConfig) -> Any:
    """The engine that answers at once, on what it says is a GPU."""
    built = instant(config)
    built.engine.slots.device = torch.device("cuda", 0)
    return built


def build(config: EngineConfig) -> Built:
    """The real engine, no faster than some 200 steps a second, so that tests can step in.

    Its drafter can stall, its verify pass can run out of memory, and it may never be done loading.
    """
    if ordered("load") is not None:
        bar = tqdm([], desc="loading", disable=True)  # as a real engine has one while it measures its costs
        (Path(os.environ[VARIABLE]) / "loading").touch()
        time.sleep(3600)
        bar.close()
    built = plain(config)
    engine: Any = built.engine
    draft, forward, left = engine.drafter.launch, engine.verify.forward, [0]

    def launch(batch: Any) -> None:
        if ordered("stall") is not None:
            time.sleep(3600)
        draft(batch)

    def verify(batch: Any, *how: Any) -> Any:
        order = ordered("memory")
        left[0] = int(order) if order else left[0]
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("injected: out of memory")
        time.sleep(SLOW)
        return forward(batch, *how)

    engine.drafter.launch, engine.verify.forward = launch, verify
    return built
