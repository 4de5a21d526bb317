"""Loads in their order: scenarios of one kind by their numbers, kinds as they first came. Knows names only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def in_order(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers alone are of one kind: `closed 1`, `closed 8`, `closed 32`."""
    return _sorted({name: ("", name) for name in names})


def by_load(scenarios: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Any]:
    """Scenarios by their loads. grid: pair of models and load of those that have them."""
    return {name: scenarios[name] for name in _sorted({name: tuple(grid.get(name, ("", name))) for name in scenarios})}


def _sorted(loads: Mapping[str, tuple[str, ...]]) -> list[str]:
    kinds = {name: (pair, NUMBER.sub("#", level)) for name, (pair, level) in loads.items()}
    first = {kind: place for place, kind in reversed([*enumerate(kinds.values())])}
    return sorted(
        loads, key=lambda name: (first[kinds[name]], [float(each) for each in NUMBER.findall(loads[name][1])])
    )
