"""Which numbers a model's weights are kept in on this CPU: timed once, and kept. Knows products and files; nothing of
engines.

A candidate's time is that of the products of a token, alone or with four drafts, whichever is less: all else in a pass
is computed in float32 whatever the weights are in. Candidates take turns, every turn must agree, and this process must
have had its processors meanwhile: where other programs disturb the timing, the usual one is taken, and the next start
times again.
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
from verifypd.kernels.base import Kernels
from verifypd.kernels.weights import Weight
from verifypd.models.config import ModelConfig
from verifypd.models.smollm2 import cache_root

FORMAT = 3  # of the files; raise it when they, or what is timed, change
USUAL = torch.bfloat16
CANDIDATES = (USUAL, torch.float32)  # each within 0.001 nats of float32: docs/cpu.md
MARGIN = 0.9  # another than the usual one is taken where it needs less than this of its time
SAMPLE = 64_000_000  # weights that are timed, more than caches hold; a smaller model is not timed
LARGEST = 256_000_000  # weights of a model that may take float32: a gigabyte
ROWS, TOKENS = 5, 2.3  # of a pass with four drafts, and what it brings
ROUNDS = 5
UNDISTURBED = 0.6  # of its threads' time, that this process must have had

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
        if choose(seconds) is None:
            log.info("weights in %s: other programs disturb the timing; the next start times again", _name(USUAL))
            return USUAL
        keep(path, {"setup": setup, "seconds": seconds})
    chosen = choose(seconds) or USUAL
    least = {name: min(times) for name, times in seconds.items()}
    times = ", ".join(f"{value / least[_name(USUAL)]:.2f} in {name}" for name, value in least.items())
    log.info("weights in %s: a token takes %s, as timed once and kept in %s", _name(chosen), times, path)
    return chosen


def choose(seconds: dict[str, list[float]]) -> torch.dtype | None:
    """The candidate that every turn found fastest; the usual one unless another is clearly so. None: turns differ."""
    turns = [dict(zip(seconds, turn, strict=True)) for turn in zip(*seconds.values(), strict=True)]
    found = {
        best if turn[_name(best)] < MARGIN * turn[_name(USUAL)] else USUAL
        for turn in turns
        for best in [min(CANDIDATES, key=lambda dtype: turn[_name(dtype)])]
    }
    return found.pop() if len(found) == 1 else None


def measure(config: ModelConfig, kernels: Kernels, *, drafts: bool) -> dict[str, list[float]]:
    """Seconds of a token's products in each candidate, turn by turn; none where other programs had the processors."""
    weights = {dtype: sample(config, kernels, dtype) for dtype in CANDIDATES}

    def turn(dtype: torch.dtype) -> float:
        alone = _seconds(kernels, weights[dtype], 1)
        return min(alone, _seconds(kernels, weights[dtype], ROWS) / TOKENS) if drafts else alone

    for dtype in CANDIDATES:
        turn(dtype)  # warms up
    begun, used = time.perf_counter(), time.process_time()
    turns = [{_name(dtype): turn(dtype) for dtype in CANDIDATES} for _ in range(ROUNDS)]
    had = (time.process_time() - used) / ((time.perf_counter() - begun) * torch.get_num_threads())
    return {_name(dtype): [each[_name(dtype)] for each in turns if had >= UNDISTURBED] for dtype in CANDIDATES}


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


def _read(text: str, setup: dict[str, Any]) -> dict[str, list[float]] | None:
    """What was kept for the same combination; None where it is not sound."""
    try:
        data = json.loads(text)
        seconds = {_name(dtype): [float(each) for each in data["seconds"][_name(dtype)]] for dtype in CANDIDATES}
        times = [each for own in seconds.values() for each in own]
        sound = data["setup"] == setup and all(0 < each < math.inf for each in times) and choose(seconds) is not None
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        log.warning("kept times of weights are not of this version: measuring again")
        return None
    return seconds
