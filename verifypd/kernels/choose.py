"""Which kernels a device takes. Knows every implementation; nothing of models."""

from __future__ import annotations

import torch

from verifypd.kernels.base import Kernels
from verifypd.kernels.registry import C_NEEDS, TRITON_NEEDS, Backend, Registry, anywhere, c_runs_on, triton_runs_on


def _native(batch_invariant: bool) -> Kernels:
    from verifypd.kernels.native import NativeKernels

    return NativeKernels(batch_invariant=batch_invariant)


def _triton(batch_invariant: bool) -> Kernels:
    from verifypd.kernels.triton import TritonKernels

    return TritonKernels(batch_invariant=batch_invariant)


def _torch(batch_invariant: bool) -> Kernels:
    from verifypd.kernels.torch import TorchKernels

    return TorchKernels()


KERNELS: Registry[Kernels] = Registry(
    "--kernels",
    Backend("native", C_NEEDS, c_runs_on, _native, by_itself_on="cpu"),
    Backend("triton", TRITON_NEEDS, triton_runs_on, _triton, by_itself_on="cuda"),
    Backend("torch", "nothing", anywhere, _torch, by_itself_on=""),
)


def select(device: torch.device | str = "cpu", name: str = "auto", *, batch_invariant: bool = False) -> Kernels:
    """The kernels for `device`: "native" (compiled C, CPU only), "triton" (CUDA), "torch", or "auto", the best of them.

    batch_invariant: a row's result never depends on how many rows come with it ("native" and "triton"; it costs time).
    """
    return KERNELS.choose(name, device).make(batch_invariant)
