"""The operations of a model behind one protocol. Knows which implementation suits a device; nothing of models."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from verifypd.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from verifypd.kernels.base import Int8Weight, Kernels

__all__ = ["Int8Weight", "Kernels", "select", "triton_runs_on"]


def select(device: torch.device | str = "cpu", name: str = "auto", *, batch_invariant: bool = False) -> Kernels:
    """The kernels for `device`: "native" (compiled C, CPU only), "triton" (CUDA), "torch", or "auto", the best of them.

    batch_invariant: a row's result never depends on how many rows come with it ("native" and "triton"; it costs time).
    """
    import torch

    from verifypd.kernels import build
    from verifypd.kernels.torch import TorchKernels

    if name not in ("auto", "native", "triton", "torch"):
        raise ConfigError(f"kernels={name!r} is not known; use auto, native, triton or torch")
    on_cpu = torch.device(device).type == "cpu"
    if name == "triton" and not triton_runs_on(device):
        raise ConfigError(f"kernels=triton cannot be used on {device}: they need CUDA and Triton; use auto or torch")
    if name == "triton" or (name == "auto" and torch.device(device).type == "cuda" and triton_runs_on(device)):
        from verifypd.kernels.triton import TritonKernels

        return TritonKernels(batch_invariant=batch_invariant)
    if name != "torch" and on_cpu and build.library() is not None:
        from verifypd.kernels.native import NativeKernels

        return NativeKernels(batch_invariant=batch_invariant)
    if name == "native":
        reason = "no C compiler works here: install gcc or clang" if on_cpu else f"they run on the CPU, not on {device}"
        raise ConfigError(f"kernels=native cannot be used ({reason}); use auto or torch")
    return TorchKernels()


def triton_runs_on(device: torch.device | str) -> bool:
    """Whether Triton kernels can be launched: on CUDA, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""
    import torch

    if find_spec("triton") is None:
        return False
    return torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def __getattr__(name: str) -> object:
    """Int8Weight and Kernels without importing torch before they are used."""
    if name in ("Int8Weight", "Kernels"):
        from verifypd.kernels import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
