"""Which numbers a model's weights are kept in on this CPU: timed once, and kept. Knows products and files; nothing of
engines.

A candidate's time is that of the products of a token, alone or with four drafts, whichever is less: all else in a pass
is computed in float32 whatever the weights are in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from dataclasses import asdict
from itertools import cycle
from typing import Any

import torch

from verifypd.engine.costs import device_name, keep
from verifypd.kernels import build
from verifypd.kernels.base import Kernels, Weight
from verifypd.models.config import ModelConfig
from verifypd.models.smollm2 import cache_root

FORMAT = 1  # of the files; raise it when they, or what is timed, change
USUAL = torch.bfloat16
CANDIDATES = (USUAL, torch.float32)  # each within 0.001 nats of float32: docs/cpu.md
MARGIN = 0.9  # another than the usual one is taken where it needs less than this of its time
SAMPLE = 64_000_000  # weights that are timed, more than caches hold; a smaller model is not timed
LARGEST = 256_000_000  # weights of a model that may take float32: a gigabyte
ROWS, TOKENS = 5, 2.3  # of a pass with four drafts, and what it brings
ROUNDS = 5

log = logging.getLogger(__name__)


def fastest(config: ModelConfig, kernels: Kernels, *, drafts: bool) -> torch.dtype:
    """The dtype with most tokens a second on this CPU, with `drafts` or without: the one that is kept, or timed now."""
    if not SAMPLE <= config.parameters <= LARGEST:
        return USUAL
    setup = {
        "format": FORMAT,
        "device": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "library": build.name(),
        "torch": torch.__version__,
        "shape": hashlib.sha256(json.dumps(asdict(config), sort_keys=True, default=str).encode()).hexdigest()[:16],
        "drafts": drafts,
    }
    key = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_root() / "costs" / f"dtype-{key}.json"
    seconds = _read(path.read_text(encoding="utf-8"), setup) if path.is_file() else None
    if seconds is None:
        seconds = measure(config, kernels, drafts=drafts)
        keep(path, {"setup": setup, "seconds": seconds})
    chosen = choose(seconds)
    times = ", ".join(f"{value / seconds[_name(USUAL)]:.2f} in {name}" for name, value in seconds.items())
    log.info("weights in %s: a token takes %s, as timed once and kept in %s", _name(chosen), times, path)
    return chosen


def choose(seconds: dict[str, float]) -> torch.dtype:
    """The candidate with the least seconds, or the usual one where none is clearly faster."""
    best = min(CANDIDATES, key=lambda dtype: seconds[_name(dtype)])
    return best if seconds[_name(best)] < MARGIN * seconds[_name(USUAL)] else USUAL


def measure(config: ModelConfig, kernels: Kernels, *, drafts: bool) -> dict[str, float]:
    """Seconds of a token's products in each candidate, the least of several rounds by turns."""
    weights = {dtype: sample(config, kernels, dtype) for dtype in CANDIDATES}
    found = dict.fromkeys(CANDIDATES, math.inf)
    for _ in range(ROUNDS):
        for dtype in CANDIDATES:
            alone = _seconds(kernels, weights[dtype], 1)
            wide = _seconds(kernels, weights[dtype], ROWS) / TOKENS if drafts else math.inf
            found[dtype] = min(found[dtype], alone, wide)
    return {_name(dtype): value for dtype, value in found.items()}


def sample(config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> list[Weight]:
    """Matrices of the layers' shapes, SAMPLE weights or little more, as the engine would keep them."""
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    shapes = (
        (queries + 2 * config.kv_heads * config.head_dim, hidden),
        (hidden, queries),
        (2 * config.mlp_size, hidden),
        (hidden, config.mlp_size),
    )
    made: list[Weight] = []
    turns = cycle(shapes)
    while sum(math.prod(weight.shape) for weight in made) < SAMPLE:
        made.append(kernels.pack(torch.full(next(turns), 0.01, dtype=dtype)))
    return made


def _seconds(kernels: Kernels, weights: list[Weight], rows: int) -> float:
    inputs = {weight.shape[1]: torch.ones(rows, weight.shape[1]) for weight in weights[:4]}
    begun = time.perf_counter()
    for weight in weights:
        kernels.linear(inputs[weight.shape[1]], weight)
    return time.perf_counter() - begun


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(text: str, setup: dict[str, Any]) -> dict[str, float] | None:
    """What was kept for the same combination; None where it is not sound."""
    try:
        data = json.loads(text)
        seconds = {_name(dtype): float(data["seconds"][_name(dtype)]) for dtype in CANDIDATES}
        sound = data["setup"] == setup and all(math.isfinite(value) and value > 0 for value in seconds.values())
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        log.warning("kept times of weights are not of this version: measuring again")
        return None
    return seconds
