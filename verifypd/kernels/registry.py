"""Implementations of one thing, by name: which of them run on a device, and which one is taken. Knows none of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Generic, TypeVar

import torch

from verifypd.errors import ConfigError
from verifypd.kernels import build

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Backend(Generic[Made]):
    """One implementation. `make` takes whether rows must not feel their neighbours."""

    name: str
    needs: str  # where it runs, for those whom it does not suit
    runs_on: Callable[[torch.device], bool]
    make: Callable[[bool], Made]
    by_itself_on: str | None = None  # kind of device where "auto" may take it; None: nowhere, "": everywhere


class Registry(Generic[Made]):
    """The implementations behind one setting, those that "auto" prefers first."""

    def __init__(self, flag: str, *backends: Backend[Made]) -> None:
        self.flag = flag
        self.backends = {backend.name: backend for backend in backends}

    def available(self, device: torch.device | str) -> list[str]:
        """Names of those that "auto" may take on `device`, the preferred one first."""
        where = torch.device(device)
        return [
            backend.name
            for backend in self.backends.values()
            if backend.by_itself_on in ("", where.type) and backend.runs_on(where)
        ]

    def choose(self, name: str, device: torch.device | str) -> Backend[Made]:
        """The implementation called `name`; "auto": the preferred one of the device."""
        if name == "auto":
            return self.backends[self.available(device)[0]]
        chosen = self.backends.get(name)
        if chosen is None:
            raise ConfigError(f"{self.flag} {name} is not known; use one of: {', '.join(['auto', *self.backends])}")
        if not chosen.runs_on(torch.device(device)):
            raise ConfigError(
                f"{self.flag} {name} does not run on {device} here: it needs {chosen.needs}; use one of: "
                f"{', '.join(['auto', *self.available(device)])}"
            )
        return chosen


def c_runs_on(device: torch.device) -> bool:
    """Whether the compiled C kernels can be called."""
    return device.type == "cpu" and build.library() is not None


def triton_runs_on(device: torch.device | str) -> bool:
    """Whether Triton kernels can be launched: on CUDA, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""
    if find_spec("triton") is None:
        return False
    return torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def anywhere(device: torch.device) -> bool:
    """Every device will do."""
    return True


C_NEEDS = "a CPU and a C compiler (install gcc or clang)"
TRITON_NEEDS = "CUDA and Triton"
