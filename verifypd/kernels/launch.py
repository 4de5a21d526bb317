"""What launches on a device can count on. Knows CUDA's properties; nothing of kernels."""

from __future__ import annotations

from functools import cache

import torch

INTERPRETED_PROCESSORS = 8  # what Triton's interpreter passes for, so that small cases split too
INTERPRETED_MEMORY = 227 * 1024  # bytes of shared memory, as a Hopper program may have


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a program at most."""
    if device.type != "cuda":
        return INTERPRETED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


@cache
def fp8_products(device: torch.device) -> bool:
    """Whether matrix instructions take fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def dependent(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one before it is done (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_early(device: torch.device, allowed: bool = True) -> dict[str, bool]:
    """Options of a Triton launch that may begin so. One without the other is a race: the kernel must wait by itself."""
    begins = allowed and dependent(device)
    return {"PDL": begins, "launch_pdl": begins}
