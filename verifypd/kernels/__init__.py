"""The operations of a model behind one protocol, and how an implementation is chosen. Knows nothing of models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifypd.kernels.base import Kernels
    from verifypd.kernels.choose import select
    from verifypd.kernels.registry import triton_runs_on
    from verifypd.kernels.weights import Int8Weight

__all__ = ["Int8Weight", "Kernels", "select", "triton_runs_on"]

_HOMES = {"Int8Weight": "weights", "Kernels": "base", "select": "choose", "triton_runs_on": "registry"}


def __getattr__(name: str) -> object:
    """These names without importing torch before they are used."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
