"""Measured pass times on disk, a file for each combination of models, numbers and device. Knows files and settings;

nothing of how passes are timed. What is kept are the measurements, so that another form of the cost model may be fitted
to them; they depend on shapes and not on weights, so models of one shape share a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from verifypd import __version__
from verifypd.control.cost import CostModel
from verifypd.control.observe import StepTiming
from verifypd.engine.engine import Engine
from verifypd.engine.measure import Measured, measure
from verifypd.kernels import build
from verifypd.models.base import Model
from verifypd.models.smollm2 import cache_root

FORMAT = 5  # of the files; raise it when they or the points change
TIMING = {field.name for field in fields(StepTiming)}

log = logging.getLogger(__name__)


def obtain(engine: Engine, *, fresh: bool = False, progress: bool = True) -> Measured:
    """The times of this engine's passes: those that are kept, or (`fresh`: in any case) measured now and kept."""
    setup = describe(engine)
    path = place(setup)
    kept = None if fresh else read(path, setup)
    if kept is not None:
        return kept
    found = measure(engine, progress=progress)
    log.info("%d pass times measured in %.1f s", len(found.timings), found.seconds)
    if found.timings:
        write(path, setup, found)
    return found


def fit(cost: CostModel, measured: Measured) -> CostModel:
    """Teach a cost model what was measured. Without any measurement it is left as it was."""
    if measured.timings:
        cost.fit(measured.timings)
        cost.overhead = measured.overhead
    return cost


def describe(engine: Engine) -> dict[str, Any]:
    """Everything a pass time depends on, as plain data."""
    config, runner = engine.config, engine.verify.runner
    drafter = engine.drafter
    draft = getattr(drafter, "runner", None)
    return {
        "verifypd": __version__,
        "torch": torch.__version__,
        "device": device_name(runner.model.device),
        "threads": torch.get_num_threads() if runner.model.device.type == "cpu" else 0,
        "attention": runner.attention.name,
        "sampler": engine.sampling.kernels,
        "graphs": engine.verify.padded is not None,
        "model": _model(runner.model),
        "drafter": drafter.name if drafter else None,
        "draft": _model(draft.model) if draft is not None else getattr(drafter, "description", None),
        "max_model_len": engine.max_model_len,
        **{
            name: getattr(config, name)
            for name in (
                "batch_size",
                "max_draft",
                "prefill_chunk",
                "draft_chunk",
                "block_size",
                "kv_cache_dtype",
                "placement",
                "batch_invariant",
                "tensor_parallel_size",
                "wait",
            )
        },
    }


def _model(model: Model) -> dict[str, Any]:
    shape = json.dumps(asdict(model.config), sort_keys=True, default=str)
    return {
        "family": model.config.family,
        "parameters": model.config.parameters,
        "shape": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes": model.weight_bytes,
        "kernels": model.kernels.name,
        "library": build.name() if model.kernels.name == "native" else None,
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the number of cores."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.multi_processor_count} SMs"
    lines = [line for line in build.processor().splitlines() if not line.lower().startswith(("flags", "features"))]
    return ", ".join([*(" ".join(line.replace(":", " ").split()) for line in lines), f"{os.cpu_count()} cores"])


def place(setup: dict[str, Any]) -> Path:
    """Where the times of this combination are kept."""
    key = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:24]
    return cache_root() / "costs" / f"{key}.json"


def read(path: Path, setup: dict[str, Any]) -> Measured | None:
    """What `write` wrote for the same combination; None where there is nothing, or nothing sound."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        data = None
    try:
        if data["format"] != FORMAT or data["setup"] != setup:
            raise ValueError
        timings = tuple(_timing(entry) for entry in data["timings"])
        return Measured(timings, _number(data["overhead"]), _number(data["seconds"]), int(data["skipped"]))
    except (TypeError, KeyError, ValueError):
        log.warning("%s holds no pass times of this version: measuring again", path)
        return None


def _timing(entry: dict[str, Any]) -> StepTiming:
    if set(entry) != TIMING:
        raise ValueError
    timing = StepTiming(**{name: _number(value) for name, value in entry.items()})
    if timing.device_seconds <= 0:
        raise ValueError
    counts = {f.name: int(getattr(timing, f.name)) for f in fields(StepTiming) if f.type == "int"}
    return replace(timing, **counts)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def write(path: Path, setup: dict[str, Any], measured: Measured) -> None:
    """Keep what was measured."""
    data = {
        "format": FORMAT,
        "setup": setup,
        "overhead": measured.overhead,
        "seconds": measured.seconds,
        "skipped": measured.skipped,
        "timings": [asdict(timing) for timing in measured.timings],
    }
    keep(path, data)


def keep(path: Path, data: dict[str, Any]) -> None:
    """Write a file whole. A cache that cannot be written costs a measurement at the next start, and no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("pass times cannot be kept in %s (%s)", path.parent, error.strerror or error)
