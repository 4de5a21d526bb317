"""What cuts and judges on a device. Knows every implementation; nothing of models."""

from __future__ import annotations

import functools

import torch

from verifypd.kernels.registry import C_NEEDS, TRITON_NEEDS, Backend, Registry, anywhere, c_runs_on, triton_runs_on
from verifypd.sampling.base import SamplingKernels


def _native(batch_invariant: bool) -> SamplingKernels:
    from verifypd.sampling.native import NativeSampling

    return NativeSampling()


def _triton(batch_invariant: bool) -> SamplingKernels:
    from verifypd.sampling.triton import TritonSampling

    return TritonSampling()


def _torch(batch_invariant: bool) -> SamplingKernels:
    from verifypd.sampling.torch import TorchSampling

    return TorchSampling()


SAMPLERS: Registry[SamplingKernels] = Registry(
    "--sampler",
    Backend("native", C_NEEDS, c_runs_on, _native, by_itself_on="cpu"),
    Backend("triton", TRITON_NEEDS, triton_runs_on, _triton, by_itself_on="cuda"),
    Backend("torch", "nothing", anywhere, _torch, by_itself_on=""),
)


def pick_sampler(name: str, device: torch.device | str) -> str:
    """Which one is meant. auto: Triton on CUDA, C on a CPU that has a compiler, torch elsewhere."""
    return SAMPLERS.choose(name, device).name


@functools.cache
def implementation(name: str) -> SamplingKernels:
    """The one called so; they keep nothing, so that one serves all."""
    return SAMPLERS.backends[name].make(False)
