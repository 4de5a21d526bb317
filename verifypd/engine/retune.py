"""Other policy settings for an engine that is idle: one load of the models serves every arm of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from verifypd.config import BY_DEVICE, EngineConfig
from verifypd.control.architectures import Architecture
from verifypd.control.cost import CostModel
from verifypd.engine.engine import Engine
from verifypd.engine.wiring import policies
from verifypd.errors import ConfigError

POLICY = (
    "arch", "controller", "max_draft", "batch_size", "verify_batch", "verify_wait_ms", "workers", "queue_factor",
    "lane_weights", "slo_ttft", "slo_tpot", "slo_gap", "search_temperature",
)  # fmt: skip
Architectures = Callable[[str], Architecture]


def tuned(loaded: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    """The settings an engine was loaded with, with others of its policy; none may need more than was loaded."""
    for name in changes:
        if name not in POLICY:
            raise ConfigError(f"{name} is set when an engine is loaded; a policy has {', '.join(POLICY)}")
    of_others = dict.fromkeys(("verify_batch", "verify_wait_ms", "workers", "lane_weights"))  # not every one reads them
    given = {name: value for name, value in changes.items() if value or name not in BY_DEVICE["cpu"]}
    config = replace(loaded, **{**of_others, **given})  # 0 is what the device decided at start
    for name, wanted, there in (
        ("max_draft", config.max_draft, loaded.max_draft),
        ("batch_size", config.slots, loaded.slots),
    ):
        if wanted > there:
            raise ConfigError(f"this engine was loaded for {name} up to {there}; load it with more")
    return config


def fresh(engine: Engine, config: EngineConfig) -> Architectures:
    """Architectures of these settings that have learnt nothing yet but what passes cost."""
    return policies(config, CostModel() if engine.cost is None else deepcopy(engine.cost))


def retune(engine: Engine, config: EngineConfig, architectures: Architectures, admitted: int | None = None) -> None:
    """Go on with these settings and architectures. admitted: requests that hold a slot at most (default: config's)."""
    if engine.busy:
        raise ConfigError("the engine is at work: policies are changed between requests")
    engine.config, engine.architectures = config, architectures
    engine.architecture = architectures(config.arch)
    engine.verify.keeps = engine.architecture.speculative
    slots = engine.residents.config.slots
    engine.residents.most = engine.residents.limit = min(slots, config.slots if admitted is None else admitted)
