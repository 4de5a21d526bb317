"""Which attention a device takes. Knows every backend; nothing of models."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from verifypd.attention.base import AttentionBackend
from verifypd.errors import ConfigError
from verifypd.kernels.launch import fp8_products
from verifypd.kernels.registry import C_NEEDS, TRITON_NEEDS, Backend, Registry, anywhere, c_runs_on, triton_runs_on


def _native(batch_invariant: bool) -> AttentionBackend:
    from verifypd.attention.native import NativeAttention

    return NativeAttention()


def _triton(batch_invariant: bool) -> AttentionBackend:
    from verifypd.attention.triton import TritonAttention

    return TritonAttention(batch_invariant=batch_invariant)


def _flashinfer(batch_invariant: bool) -> AttentionBackend:
    if batch_invariant:
        raise ConfigError(
            "--batch-invariant needs --attention triton: how flashinfer splits a context depends on the whole pass"
        )
    from verifypd.attention.flashinfer import FlashInferAttention

    return FlashInferAttention()


def _flashinfer_runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and triton_runs_on(device) and find_spec("flashinfer") is not None


def _torch(batch_invariant: bool) -> AttentionBackend:
    from verifypd.attention.torch import TorchAttention

    return TorchAttention()


ATTENTION: Registry[AttentionBackend] = Registry(
    "--attention",
    Backend("native", C_NEEDS, c_runs_on, _native, by_itself_on="cpu"),
    Backend("triton", TRITON_NEEDS, triton_runs_on, _triton, by_itself_on="cuda"),
    Backend(  # never by itself: see its module
        "flashinfer",
        "CUDA, Triton and the package flashinfer-python (pip install 'verifypd[flashinfer]')",
        _flashinfer_runs_on,
        _flashinfer,
    ),
    Backend("torch", "nothing", anywhere, _torch, by_itself_on=""),
)


READ_E4M3 = ("native", "triton", "torch")  # who read a cache of e4m3


def available_backends(device: torch.device | str = "cpu") -> list[str]:
    """Names of the backends that run on `device`, the preferred one first; "torch" is always among them."""
    return ATTENTION.available(device)


def backend(
    name: str = "auto", device: torch.device | str = "cpu", *, batch_invariant: bool = False, fp8: bool = False
) -> AttentionBackend:
    """The backend called `name`; "auto" takes the preferred one of the device.

    batch_invariant: rows must not feel their neighbours; asked of "triton" only ("native" rows never do, "torch" rows
    always may, and "flashinfer" refuses).
    fp8: keys and values are e4m3.
    """
    if fp8 and name == "auto":
        name = next(each for each in available_backends(device) if _reads_e4m3(each, torch.device(device)))
    if fp8 and name not in READ_E4M3:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs --attention native, triton or torch: {name} does not read such a cache"
        )
    if fp8 and not _reads_e4m3(name, torch.device(device)):
        raise ConfigError(
            "--kv-cache-dtype fp8 with --attention triton needs a GPU of compute capability 8.9 or more: leave one out"
        )
    return ATTENTION.choose(name, device).make(batch_invariant)


def _reads_e4m3(name: str, device: torch.device) -> bool:
    """Whether a backend reads a cache of e4m3 there."""
    return name in READ_E4M3 and (name != "triton" or device.type != "cuda" or fp8_products(device))
