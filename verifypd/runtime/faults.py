"""Tells what kind of error a device raised. Knows the wording of PyTorch's errors; nothing of what to do about them."""

from __future__ import annotations

import torch

_WORDS = ("out of memory", "not enough memory", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the device and the process are sound, and less work at once may succeed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
