"""Controllers and architectures by name."""

from __future__ import annotations

from verifypd.config import ARCHITECTURES
from verifypd.control.architectures import PD, PDV, Architecture, Baseline, Plain, Table, Unified
from verifypd.control.auto import Auto
from verifypd.control.controller import Controller, FixedController, ThresholdController
from verifypd.control.cost import CostModel
from verifypd.control.throughput import ThroughputController
from verifypd.errors import ConfigError

SHAPES: dict[str, type[Architecture]] = {each.name: each for each in (Plain, Unified, Baseline, PD, PDV, Table, Auto)}


def make_controller(
    name: str, max_draft: int, cost: CostModel | None = None, *, search_temperature: bool = False
) -> Controller:
    """The controller of that name."""
    if name == "fixed":
        return FixedController(max_draft)
    if name == "threshold":
        return ThresholdController(max_draft)
    if name == "throughput":
        return ThroughputController(cost, max_draft, search_temperature=search_temperature)
    raise ConfigError(f"--controller {name!r} is not known; choose from throughput, threshold, fixed")


def make_architecture(name: str, controller: Controller, cost: CostModel | None = None) -> Architecture:
    """The architecture of that name, over a controller and the costs that both believe."""
    if name not in SHAPES:
        raise ConfigError(f"--arch {name!r} is not known; choose from {', '.join(ARCHITECTURES)}")
    return SHAPES[name](controller, cost)
